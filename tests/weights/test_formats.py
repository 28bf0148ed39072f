"""Weights of every format and age give the logits that the published code gave; what a file can't
tell is asked for.
"""

import functools
import http.server
import json
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN, applied, below, golden, golden_file, golden_folder
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.errors import UserError
from vit_jax.weights import load as pretrained
from vit_jax.weights import scan_layout
from vit_jax.weights.formats import huggingface, safetensors_folder, timm
from vit_jax.weights.formats.infer import number_of_heads
from vit_jax.weights.formats.vision_transformer import LINEN_NAMES
from vit_jax.weights.formats.weights import POSEMB

BIG_VISION = sorted(path.stem for path in GOLDEN.glob("bv_*.npz"))
# test_autoencoder.py has those of autoencoders, which have no logits.
FOLDERS = sorted(
    path.name for path in GOLDEN.iterdir() if path.is_dir() and not path.name.startswith("mae_")
)


def assert_same(found: dict, wanted: dict) -> None:
    found, wanted = scan_layout.flatten(found), scan_layout.flatten(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def bare(flat: dict) -> dict:
    """big_vision's arrays without the prefix params/."""
    return {name.removeprefix("params/"): value for name, value in flat.items()}


def prefixed(flat: dict, prefix: str = "params/") -> dict:
    return {f"{prefix}{name}": value for name, value in flat.items()}


def published_names(flat: dict) -> dict:
    """With the names of encoder blocks from before Linen."""

    def rename(name):
        if "encoderblock" not in name:
            return name
        return "/".join(LINEN_NAMES.get(part, part) for part in name.split("/"))

    return {rename(name): value for name, value in flat.items()}


@pytest.mark.parametrize("prefix", ["params", "params_scan"])
@pytest.mark.parametrize("name", BIG_VISION)
def test_big_vision_files_give_the_published_logits(name, prefix, tmp_path):
    arrays, config = golden(name)
    stored = prefixed(bare(below(arrays, prefix)))
    if config["scan"] != "both":
        assert bool(stored) == (prefix == "params")
    if not stored:
        return
    np.savez(tmp_path / "w.npz", **stored)
    pool = dict(pool="0") if config["pool_type"] == "0" else {}  # no file shows it
    model, params = vit_jax.from_pretrained(
        tmp_path / "w.npz", image_size=arrays["inputs"].shape[1:3], **pool
    )
    truth = arrays["logits_f64"]
    assert (
        np.abs(applied(model, params, arrays["inputs"]) - truth).max()
        <= 1e-5 * np.abs(truth).max() + 2e-5
    )
    found = (
        model.pool,
        model.posemb,
        model.depth,
        model.num_heads,
        model.width,
        bool(model.pre_logits),
    )
    wanted = (
        config["pool_type"],
        config["posemb"].removesuffix("ed"),
        config["depth"],
        config["num_heads"],
    )
    assert found == (*wanted, config["width"], bool(config["rep_size"]))


def test_a_mixer_gives_the_published_logits(tmp_path):
    arrays, _ = golden("mixer_p8")
    path = golden_file(tmp_path, "mixer_p8")
    model, params = vit_jax.from_pretrained(path)
    truth = arrays["logits_f64"]
    assert (
        np.abs(applied(model, params, arrays["inputs"]) - truth).max()
        <= 1e-5 * np.abs(truth).max() + 2e-5
    )
    _, same = vit_jax.from_pretrained(golden_file(tmp_path, "mixer_p8", change=prefixed))
    assert_same(same, params)


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_give_the_logits_of_their_library(name):
    with np.load(GOLDEN / name / "expected.npz") as expected:
        image, truth = expected["image"], expected["logits"]
    model, params = vit_jax.from_pretrained(GOLDEN / name)
    assert np.abs(applied(model, params, image) - truth).max() <= 2e-5 * max(1, np.abs(truth).max())
    eps = 1e-12 if name in ("hf_vit", "hf_deit") else 1e-6
    assert (model.gelu, model.ln_eps) == ("erf", eps)
    assert model.image_size == image.shape[1:3] and model.distilled == ("deit" in name)


def without_positions(name: str):
    """A change of a golden file: no position embedding, as in a file that is not whole."""
    return lambda flat: {key: value for key, value in flat.items() if not key.endswith(name)}


def test_a_published_file_without_positions_is_an_error(tmp_path):
    path = golden_file(tmp_path, "vit_token_rep", change=without_positions("pos_embedding"))
    problem = rf"has no {POSEMB}, .*give posemb=sincos2d \(--config\.model\.posemb=sincos2d in"
    with pytest.raises(UserError, match=problem):
        vit_jax.from_pretrained(path)
    with pytest.raises(UserError, match=f"lack {POSEMB}"):
        vit_jax.from_pretrained(path, posemb="learn")
    model, params = vit_jax.from_pretrained(path, posemb="learn", allow=POSEMB)
    assert model.posemb == "learn" and POSEMB in scan_layout.flatten(params)
    for kind in ("sincos2d", "none"):
        model, params = vit_jax.from_pretrained(path, posemb=kind)
        assert model.posemb == kind and POSEMB not in scan_layout.flatten(params)
        assert pretrained.read(path, posemb=kind).fields["posemb"] == kind


def test_a_big_vision_file_without_positions_has_fixed_ones(tmp_path):
    for change in (prefixed, lambda flat: prefixed(flat, "opt/target/"), bare):
        path = golden_file(tmp_path, "bv_gap_sincos2d_rep", change=lambda f, c=change: c(bare(f)))
        assert vit_jax.from_pretrained(path)[0].posemb == "sincos2d"


def combined(place: str):
    """The class token's position as a row of the embedding at `place`, as until 2022."""

    def change(flat):
        flat = bare(flat)
        positions, row = flat.pop("pos_embedding"), np.full((1, 1, 48), 0.25, np.float32)
        return flat | {place: np.concatenate([row, positions], 1), "cls": flat["cls"] - row}

    return change


@pytest.mark.parametrize("prefix", ["", "params/"])
@pytest.mark.parametrize("place", ["pos_embedding", "Transformer/pos_embedding", POSEMB])
def test_positions_with_a_row_for_the_class_token(place, prefix, tmp_path):
    change = combined(place)
    path = golden_file(tmp_path, "bv_tok_learn", change=lambda flat: prefixed(change(flat), prefix))
    _, params = vit_jax.from_pretrained(path)
    found, wanted = (
        scan_layout.flatten(params),
        published_names(bare(below(golden("bv_tok_learn")[0], "params"))),
    )
    np.testing.assert_array_equal(found[POSEMB][:, 1:], wanted.pop("pos_embedding"))
    np.testing.assert_allclose(found["cls"] + found[POSEMB][:, :1], wanted.pop("cls"), atol=1e-6)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_class_token_without_a_position_gets_zero(tmp_path):
    weights = pretrained.read(golden_file(tmp_path, "bv_tok_learn"))
    assert weights.format == "big_vision" and weights.params[POSEMB].shape == (1, 17, 48)
    assert not weights.params[POSEMB][:, 0].any()


def beside_optimizer(flat):
    states = {f"opt/1/0/mu/{name}": value for name, value in bare(flat).items()}
    return (
        prefixed(bare(flat))
        | states
        | {"opt/1/0/count": np.int32(7), "extra/text": np.array("hello")}
    )


def of_flax_optim(flat):
    return prefixed(bare(flat), "opt/target/") | {"opt/state/step": np.int64(7)}


def image_tower(flat):
    both = (
        prefixed(bare(flat), "img/")
        | prefixed(bare(flat), "txt/")
        | {"t": np.float32(10), "b": np.zeros(1)}
    )
    return prefixed(both)


@pytest.mark.parametrize(
    "change",
    [
        prefixed,
        published_names,
        beside_optimizer,
        of_flax_optim,
        image_tower,
        lambda flat: bare(image_tower(flat)),
    ],
)
@pytest.mark.parametrize("name", ["bv_tok_learn", "bv_map_rep"])
def test_names_of_any_age_are_the_same_parameters(name, change, tmp_path):
    plain = vit_jax.from_pretrained(golden_file(tmp_path, name))
    other = vit_jax.from_pretrained(golden_file(tmp_path, name, change=change))
    assert plain[0] == other[0]
    assert_same(other[1], plain[1])


@pytest.mark.parametrize("prefix", ["", "params/"])
def test_attention_pooling_that_stands_at_the_top(prefix, tmp_path):
    def inlined(flat):
        return prefixed(
            {name.removeprefix("MAPHead_0/"): value for name, value in bare(flat).items()}, prefix
        )

    plain = vit_jax.from_pretrained(golden_file(tmp_path, "bv_map_learn"))
    other = vit_jax.from_pretrained(golden_file(tmp_path, "bv_map_learn", change=inlined))
    assert other[0].pool == "map"
    assert_same(other[1], plain[1])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, ">f4"])
@pytest.mark.parametrize("name", ["bv_gap_rep_scanpair", "vit_gap_rep"])
def test_every_float_is_read_as_float32(name, dtype, tmp_path):
    weights = pretrained.read(golden_file(tmp_path, name))
    path = golden_file(
        tmp_path,
        name,
        change=lambda flat: {key: value.astype(dtype) for key, value in flat.items()},
    )
    if dtype is ml_dtypes.bfloat16:
        with np.load(path) as raw:
            assert raw[raw.files[0]].dtype == np.dtype("V2")
    for key, value in pretrained.read(path).params.items():
        assert value.dtype == np.float32 and value.dtype.isnative
        np.testing.assert_array_equal(value, weights.params[key].astype(dtype).astype(np.float32))


def test_linen_names_are_read_like_published_ones(tmp_path):
    back = {new: old for old, new in LINEN_NAMES.items()}

    def rename(flat):
        return {
            "/".join(back.get(part, part) for part in key.split("/")): value
            for key, value in flat.items()
        }

    _, plain = vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_rep"))
    _, linen = vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_rep", change=rename))
    assert_same(linen, plain)


def test_one_parameter_under_two_names_is_an_error(tmp_path):
    published = "Transformer/encoderblock_0/LayerNorm_2/scale"
    linen = published.replace("LayerNorm_2", "LayerNorm_1")
    path = golden_file(
        tmp_path, "vit_token_rep", change=lambda flat: flat | {linen: flat[published]}
    )
    with pytest.raises(
        UserError, match=rf"npz has both {published} and {linen}, which are one parameter"
    ):
        vit_jax.from_pretrained(path)


def test_a_grid_that_the_file_cannot_tell_is_asked_for(tmp_path):
    path = golden_file(tmp_path, "vit_token_p8_nonsquare")
    with pytest.raises(
        UserError, match=r"24 patch tokens, not a square number: give grid=\(h, w\)"
    ):
        vit_jax.from_pretrained(path)
    with pytest.raises(UserError, match=r"24 patch tokens, not 5 x 5"):
        vit_jax.from_pretrained(path, grid=(5, 5))
    assert vit_jax.from_pretrained(path, grid=(4, 6))[0].image_size == (32, 48)
    assert vit_jax.from_pretrained(path, image_size=(32, 48))[0].grid == (4, 6)
    model, params = vit_jax.from_pretrained(path, grid=(4, 6), image_size=(48, 32))
    assert (
        model.grid == (6, 4)
        and params["Transformer"]["posembed_input"]["pos_embedding"].shape[1] == 25
    )


def test_a_count_that_is_a_square_is_still_what_the_user_says(tmp_path):
    """16 tokens, with and without a row for the class token."""
    for name in ("vit_token_norep", "bv_tok_learn", "mixer_p8"):
        path = golden_file(tmp_path, name)
        assert vit_jax.from_pretrained(path, grid=(2, 8))[0].image_size == (16, 64)
        assert vit_jax.from_pretrained(path, image_size=(64, 16))[0].grid == (8, 2)


def as_huggingface(folder, **changes):
    """timm's non-square model as a folder of Hugging Face."""
    weights = pretrained.read(GOLDEN / "timm_nonsquare")
    model, _ = pretrained.build(weights)
    arrays, configs = huggingface.write(weights, model)
    config = {
        key: value for key, value in (configs["config"] | changes).items() if value is not None
    }
    safetensors_folder.write(folder, arrays, **(configs | dict(config=config)))
    return folder


def test_the_grid_comes_from_the_config_of_a_folder(tmp_path):
    assert vit_jax.from_pretrained(as_huggingface(tmp_path))[0].grid == (4, 6)
    as_huggingface(tmp_path, image_size=None)
    with pytest.raises(UserError, match=r"24 patch tokens, not a square number"):
        vit_jax.from_pretrained(tmp_path)
    assert vit_jax.from_pretrained(tmp_path, image_size=(48, 32))[0].grid == (6, 4)


def lone(folder, name: str):
    """A copy of model.safetensors under another name, without its config.json."""
    path = folder / "lone.safetensors"
    path.write_bytes((GOLDEN / name / "model.safetensors").read_bytes())
    return path


@pytest.mark.parametrize(
    ("name", "eps"), [("timm_token", 1e-6), ("timm_map", 1e-6), ("hf_vit", 1e-12)]
)
def test_a_lone_file_needs_its_heads(name, eps, tmp_path):
    path = lone(tmp_path, name)
    with pytest.raises(
        UserError,
        match=r"lone\.safetensors does not say how many heads a width of 48 has: give num_he",
    ):
        vit_jax.from_pretrained(path)
    model, params = vit_jax.from_pretrained(path, num_heads=3)
    whole, wanted = vit_jax.from_pretrained(GOLDEN / name)
    assert (model.gelu, model.ln_eps, model.num_heads) == ("erf", eps, 3) and model == whole
    assert_same(params, wanted)


def test_known_widths_have_known_heads(tmp_path):
    sizes = dict(
        width=192,
        depth=1,
        mlp_dim=32,
        num_heads=3,
        patch_size=8,
        image_size=16,
        num_classes=2,
        gelu="erf",
    )
    model = vit_jax.create_model(**sizes)
    params = scan_layout.flatten(
        jax.jit(model.init)(jax.random.key(0), np.zeros((1, 16, 16, 3)))["params"]
    )
    fields = {key: getattr(model, key) for key in sizes}
    arrays, _ = timm.write(pretrained.Weights(params, fields), model)
    save_file(
        {key: np.ascontiguousarray(value) for key, value in arrays.items()},
        tmp_path / "w.safetensors",
    )
    assert vit_jax.from_pretrained(tmp_path / "w.safetensors")[0].num_heads == 3
    assert number_of_heads(1280, 32, 5120, "") == 16 and number_of_heads(1024, 2, 7, "") == 16


def edited(folder, name: str, file: str = "config.json", **values):
    """A golden folder with other values in one of its JSON files."""
    folder = golden_folder(folder, name)
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | values))
    return folder


def test_class_names_come_from_the_config(tmp_path):
    names = [f"animal {i}" for i in range(7)]
    hf = edited(tmp_path, "hf_vit", id2label={str(i): name for i, name in enumerate(names)})
    of_timm = edited(tmp_path, "timm_token", label_names=names)
    assert pretrained.read(hf).class_names == pretrained.read(of_timm).class_names == tuple(names)
    assert (
        pretrained.read(GOLDEN / "hf_vit").class_names == ()
    )  # LABEL_0 and so on are placeholders


def test_preprocessing_comes_from_the_config(tmp_path):
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    cfg = dict(mean=mean, std=std, interpolation="bicubic", crop_pct=0.9, input_size=[3, 32, 32])
    of_timm = edited(tmp_path, "timm_token", pretrained_cfg=cfg)
    processor = dict(
        image_mean=mean,
        image_std=std,
        resample=3,
        do_center_crop=True,
        size=40,
        crop_size=dict(height=36),
    )
    hf = edited(tmp_path, "hf_vit", "preprocessor_config.json", **processor)
    wanted = dict(
        mean=tuple(mean), std=tuple(std), image_size=(32, 32), interpolation="bicubic", crop=0.9
    )
    assert vit_jax.from_pretrained(of_timm)[0].preprocess == wanted
    assert vit_jax.from_pretrained(hf)[0].preprocess == wanted
    half = dict(
        mean=(0.5,) * 3, std=(0.5,) * 3, image_size=(32, 32), interpolation="bilinear", crop=None
    )
    assert vit_jax.from_pretrained(golden_file(tmp_path, "vit_gap_rep"))[0].preprocess == half


def sharded(folder):
    """hf_vit with its arrays in two files."""
    folder = golden_folder(folder, "hf_vit")
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{i}-of-00002.safetensors": sorted(arrays)[i - 1 :: 2] for i in (1, 2)}
    for file, names in parts.items():
        save_file({name: arrays[name] for name in names}, folder / file)
    index = dict(weight_map={name: file for file, names in parts.items() for name in names})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_several_files(tmp_path):
    folder = sharded(tmp_path)
    assert_same(vit_jax.from_pretrained(folder)[1], vit_jax.from_pretrained(GOLDEN / "hf_vit")[1])
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"model-00002-of-00002\.safetensors does not exist: fetch the whole folder"
    ):
        vit_jax.from_pretrained(folder)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder quietly; of short.npz it sends half, of chunked.npz a chunk that ends too
    early.
    """

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path == "/chunked.npz":
            self.protocol_version = "HTTP/1.1"
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ffff\r\nPK")
        elif self.path == "/short.npz":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"PK" * 250)
        else:
            super().do_GET()


@pytest.fixture
def server(tmp_path):
    """Address of a server of tmp_path."""
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_weights_are_fetched(server, tmp_path):
    golden_file(tmp_path, "vit_gap_rep")
    golden_folder(tmp_path, "hf_vit")
    golden_folder(tmp_path, "timm_token")
    (tmp_path / "timm_token/model.safetensors").rename(tmp_path / "lone.safetensors")
    for address, local in [
        ("vit_gap_rep.npz?download=true", "vit_gap_rep.npz"),
        ("hf_vit", "hf_vit"),
        ("hf_vit/", "hf_vit"),
        ("hf_vit/model.safetensors", "hf_vit"),
    ]:
        model, params = vit_jax.from_pretrained(f"{server}/{address}")
        wanted = vit_jax.from_pretrained(tmp_path / local)
        assert model == wanted[0]
        assert_same(params, wanted[1])
    assert vit_jax.from_pretrained(f"{server}/lone.safetensors", num_heads=3)[0].num_heads == 3


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("absent.npz", r"/absent\.npz can't be fetched \(HTTP Error 404: .*\): check address"),
        ("empty_folder", r"/empty_folder/model\.safetensors can't be fetched \(HTTP Error 404"),
        ("short.npz", r"/short\.npz ended after 500 of 1000 bytes: try again"),
        ("chunked.npz", r"/chunked\.npz can't be fetched .*IncompleteRead"),
        (
            "text.npz",
            r"http://127.*text\.npz: .* can't be read as \.npz or \.safetensors: it has another format",
        ),
        ("a b.npz", r"/a%20b\.npz can't be fetched \(it has spaces"),
    ],
)
def test_what_cannot_be_fetched_is_named(address, message, server, tmp_path):
    (tmp_path / "text.npz").write_text("<html>sign in first</html>")
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(UserError, match=message) as error:
        vit_jax.from_pretrained(f"{server}/{address}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:1/w.npz", "http://127.0.0.1:port/w.npz", "https:///w.npz"]
)
def test_addresses_without_a_server_are_named(address):
    with pytest.raises(UserError, match=r"w\.npz can't be fetched"):
        vit_jax.from_pretrained(address)
