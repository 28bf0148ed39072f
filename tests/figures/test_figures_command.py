"""The command against what `vit_jax.intermediates` and the functions of arrays give, for every kind
of model, and its mistakes.
"""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import GOLDEN, ROOT, golden_file, last_error
from PIL import Image
from store.process import RunningStore

import vit_jax
from vit_jax import figures
from vit_jax.figures import __main__ as command
from vit_jax.figures import of_images
from vit_jax.figures.folder import Folder
from vit_jax.weights.pretrained import Pretrained

WEIGHTS = str(GOLDEN / "timm_token")
OF_WEIGHTS = {"embedding_filters", "position_similarity"}
OF_ATTENTION = {"attention_distance", "attention_heads", "attention_rollout"}
OF_NORMS = {"token_norms", "token_norm_maps"}
OF_PATCHES = {"patch_colors", "patch_similarity"}
OF_IMAGES = OF_ATTENTION | OF_NORMS | OF_PATCHES


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten images in two folders, and a file that is not an image."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep").mkdir()
    rng = np.random.default_rng(0)
    for i in range(10):
        pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(folder / ("deep" if i % 2 else ".") / f"{i}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def drawn(folder) -> set[str]:
    """Names of the figures in a folder, each a PNG."""
    names = set()
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 50
        names.add(path.stem)
    return names


def numbers(folder) -> dict:
    with np.load(folder / "numbers.npz", allow_pickle=False) as archive:
        return dict(archive)


def test_weights_alone(tmp_path, capsys):
    path = golden_file(tmp_path, "vit_token_p8_nonsquare")
    assert command.main([str(path), "--image_size=32x48", f"--out={tmp_path}/new/out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert drawn(tmp_path / "new/out") == OF_WEIGHTS
    assert "principal components of the" in lines[0] and "posemb=learn" in lines[1]
    assert lines[2].startswith("with images: attention distance, rollout")
    model, params = vit_jax.from_pretrained(path, image_size=(32, 48))
    found = numbers(tmp_path / "new/out")
    np.testing.assert_allclose(found["filters"], figures.filters(params["embedding"]["kernel"]))
    wanted = figures.position_similarity(model, params)
    np.testing.assert_allclose(found["position_similarity"], wanted, atol=1e-6)
    assert found["position_similarity"].shape == (4, 6, 4, 6)


def test_numbers_of_images_in_small_batches(photos, tmp_path, monkeypatch, capsys):
    """Of a distilled model, 3 images at a time, one of which is broken."""
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"nothing")
    monkeypatch.setattr(of_images, "MEMORY", 13 * 2 * 3 * 18**2)
    paths = sorted(str(path) for path in photos.glob("*.png"))
    paths += sorted(str(path) for path in photos.glob("deep/*.png"))
    weights = GOLDEN / "timm_deit_distilled"
    given = [*paths[:2], str(bad), *paths[2:]]
    assert command.main([str(weights), *given, f"--out={tmp_path}/out"]) == 1
    error = last_error(capsys)
    assert f"1 of 11 images can't be read, and are left out: {bad} can't be read" in error
    assert drawn(tmp_path / "out") == OF_WEIGHTS | OF_IMAGES

    pretrained = vit_jax.from_pretrained(weights)
    model = pretrained.model
    image = vit_jax.preprocess(model, paths)
    found = numbers(tmp_path / "out")
    seen = jax.device_get(vit_jax.intermediates(*pretrained, image))
    assert seen["num_prefix"] == 2
    wanted = figures.mean_distance(np.float64(seen["attention"]), (4, 4), 8, 2)
    np.testing.assert_allclose(found["distance"], wanted, rtol=1e-5)
    spread = [0, 1, 2, 3, 5, 6, 8, 9]  # 8 of the 11 that were given; the one between 1 and 2 is bad
    first = seen | dict(attention=seen["attention"][:, spread])
    wanted = figures.attention_map(model, first)
    np.testing.assert_allclose(found["rollout"], wanted, rtol=1e-4)
    np.testing.assert_allclose(found["heads"], figures.head_maps(model, first), rtol=1e-4)
    wanted = np.linalg.norm(seen["tokens"], axis=-1).swapaxes(0, 1)[spread]
    np.testing.assert_allclose(found["norms"], wanted, rtol=1e-4)
    features = seen["encoded"][spread, 2:].reshape(8, 4, 4, -1)
    np.testing.assert_allclose(found["colors"], figures.principal_colors(features), atol=1e-3)
    wanted = figures.patch_similarity(features, found["queries"])
    np.testing.assert_allclose(found["patch_similarity"], wanted, atol=1e-4)


SIZES = dict(
    width=24, depth=2, mlp_dim=8, num_heads=3, patch_size=4, image_size=(8, 14), num_classes=3
)
HYBRID = SIZES | dict(patch_size=1, image_size=(24, 32), stem_units=(1,), stem_width=32)
KINDS = {
    "gap": (dict(pool="gap", posemb="sincos2d"), OF_WEIGHTS | OF_IMAGES),
    "map": (dict(pool="map", registers=2, num_classes=0), OF_WEIGHTS | OF_IMAGES),
    "scan": (
        dict(scan=True, attention="blockwise", pre_logits=8, pool="tok_gap", posemb="relative"),
        OF_WEIGHTS | OF_IMAGES,
    ),
    "one patch": (dict(image_size=4, pool="unpooled", posemb_at="every"), OF_WEIGHTS | OF_IMAGES),
    "no layers": (dict(depth=0, posemb="none"), {"embedding_filters"} | OF_NORMS | OF_PATCHES),
    "hybrid": (HYBRID, OF_WEIGHTS | OF_IMAGES),
    "mixer": (
        dict(architecture="mixer", width=16, depth=1, patch_size=8, image_size=20)
        | dict(tokens_mlp_dim=4, channels_mlp_dim=8),
        {"embedding_filters"} | OF_NORMS | OF_PATCHES,
    ),
    "bit": (
        dict(architecture="bit", units=(1,), width_factor=0.5, image_size=(16, 24)),
        {"embedding_filters"} | OF_PATCHES,
    ),
}


def random_weights(fields: dict) -> Pretrained:
    fields = fields if "architecture" in fields else SIZES | fields
    # Images are prepared without TensorFlow, whose import takes seconds.
    model = vit_jax.create_model(**{"num_classes": 3} | fields, pixels_of="timm")
    rng = np.random.default_rng(0)
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    leaves = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), leaves)
    return Pretrained(model, params, path="random")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind, photos, tmp_path, capsys):
    """It draws what there is, and says what there is not."""
    fields, wanted = KINDS[kind]
    pretrained = random_weights(fields)
    folder = Folder(str(tmp_path))
    command.draw_weights(pretrained, folder)
    paths = [str(path) for path in photos.rglob("*.png")]
    assert command.draw_images(pretrained, paths[:3], folder) == {}
    assert drawn(tmp_path) == wanted
    out = capsys.readouterr().out
    left_out = [line for line in out.splitlines() if line.startswith("left out: ")]
    kinds = [{"position_similarity"}, OF_ATTENTION, OF_NORMS]
    assert len(left_out) == sum(not kind & wanted for kind in kinds), left_out
    model = pretrained.model
    arrays = folder.numbers
    assert arrays["patch_similarity"].shape[2:] == arrays["colors"].shape[1:3] == model.grid
    if "rollout" in arrays:
        assert arrays["rollout"].shape == (3, *model.grid)
        assert arrays["heads"].shape == (3, 3, *model.grid)
        longest = np.hypot(*np.multiply(model.grid, model.cell))
        assert (arrays["distance"] >= 0).all() and (arrays["distance"] < longest).all()


OWN = """
import flax.linen as nn

class Net(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(5, (3, 2), name="first")(x).mean((1, 2))
        return nn.Dense(self.num_classes, name="head")(x)
"""


def test_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "net_of_figures.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = vit_jax.create_model("net_of_figures:Net", num_classes=2, image_size=8)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]
    folder = Folder(str(tmp_path / "out"))
    command.draw(Pretrained(model, params), ["some.png"], folder)
    out = capsys.readouterr().out
    assert "of the 5 filters first/kernel" in out and "left out: figures of images" in out
    assert drawn(tmp_path / "out") == {"embedding_filters"}
    del params["first"]
    command.draw(Pretrained(model, params), [], folder)
    assert "left out: filters, because no parameter is a" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_on_a_store(tmp_path):
    with RunningStore(tmp_path) as store:
        words = [sys.executable, "-m", "vit_jax.figures", WEIGHTS, "--out=gs://bucket/new/out"]
        variables = os.environ | store.environment
        done = subprocess.run(
            words, env=variables, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        names = {name.removeprefix("new/out/") for name in store.names("new/")}
        assert names == {f"{name}.png" for name in OF_WEIGHTS} | {"numbers.npz"}
        assert store.read("bucket/new/out/embedding_filters.png").startswith(b"\x89PNG")


def test_rows_at_once_fit_in_memory():
    large = vit_jax.create_model("L/16", image_size=1024)
    assert of_images.rows_at_once(large) == 1
    model = vit_jax.create_model("B/16")
    assert of_images.rows_at_once(model) == 2**29 // (4 * 12 * 12 * 197**2) == 24
    assert of_images.rows_at_once(vit_jax.create_model("R50x1")) == of_images.MOST_ROWS


@pytest.fixture
def damaged(tmp_path):
    """Weights with one number that is not finite in the head."""
    folder = shutil.copytree(GOLDEN / "timm_token", tmp_path / "damaged")
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + size])["head.weight"]["data_offsets"]
    content[8 + size + start : 12 + size + start] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    return folder


def test_damaged_weights_are_named(damaged, tmp_path, capsys):
    assert command.main([str(damaged), f"--out={tmp_path}/out"]) == 1
    assert "damaged has numbers that are not finite in head/kernel" in last_error(capsys)


def test_results_that_overflow_are_named(photos, tmp_path):
    pretrained = random_weights(dict(depth=0))
    layer = pretrained.params["embedding"]
    layer["kernel"] = np.full_like(layer["kernel"], 1e38)
    paths = [str(photos / "0.png")]
    with pytest.raises(vit_jax.errors.NegativeResult, match="random gives results that are not"):
        command.draw_images(pretrained, paths, Folder(str(tmp_path)))


MISTAKES = [
    ([WEIGHTS, "/no/such.png"], "/no/such.png does not exist"),
    ([WEIGHTS, "{folder}"], "has no images"),
    (["/no/such/weights"], "/no/such/weights"),
    (
        [WEIGHTS, "--out={folder}/file/below"],
        "can't be written (a part of the path is a file): choose another",
    ),
    ([WEIGHTS, "--out={folder}/file"], "can't be written (it is a file): choose another"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_mistakes_are_one_line(words, message, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    words = [word.format(folder=tmp_path) for word in words]
    assert command.main([f"--out={tmp_path}/out", *words]) == 2
    assert message in last_error(capsys)


@pytest.mark.parametrize("size", ["0", "-8", "32x", "8x8x8", "x", "", "1e3"])
def test_sizes_that_are_refused(size, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main([WEIGHTS, f"--image_size={size}", f"--out={tmp_path}"])
    assert "--image_size: give a side in pixels, or HEIGHTxWIDTH" in last_error(capsys)


def test_images_that_all_are_broken(tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    assert command.main([WEIGHTS, f"{tmp_path}/bad.png", f"--out={tmp_path}/out"]) == 1
    assert "1 of 1 images can't be read" in last_error(capsys)
    assert drawn(tmp_path / "out") == OF_WEIGHTS


def test_names_are_printed_harmlessly(tmp_path, capsys):
    out = tmp_path / "a\x1b[2Jb"
    assert command.main([WEIGHTS, f"--out={out}"]) == 0
    assert "\x1b" not in capsys.readouterr().out and drawn(out) == OF_WEIGHTS
