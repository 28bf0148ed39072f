"""Every kind of damaged or foreign file gives one line that names the file and what to do."""

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from conftest import GOLDEN, below, golden, golden_file, golden_folder, last_error
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import convert
from vit_jax.distributed import runtime
from vit_jax.errors import Unavailable, UserError
from vit_jax.train import __main__ as train
from vit_jax.weights.formats import npz
from vit_jax.weights.formats.dinov2 import MASK_TOKEN
from vit_jax.weights.formats.weights import POSEMB

ARCHIVES = ["vit_token_rep", "bv_map_rep", "hybrid_rti_nostage", "mixer_p8"]
FOLDERS = ["timm_token", "timm_map", "timm_dinov2", "hf_vit", "hf_deit", "hf_dinov2_registers"]
SETTINGS = {"hybrid_rti_nostage": dict(grid=(2, 3))}
QUERY = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"


def refusal(path, **settings) -> str:
    """The one line that reading `path` ends in."""
    with pytest.raises(UserError) as error:
        vit_jax.from_pretrained(path, **settings)
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text and len(text) < 700
    assert os.path.basename(path) in text, text
    assert ": " in text, text  # what is wrong: what to do
    return text


def arrays_of(name: str) -> dict:
    return (
        load_file(GOLDEN / name / "model.safetensors")
        if name in FOLDERS
        else below(golden(name)[0], "params")
    )


def store(folder, name: str, flat: dict):
    """A golden case with other arrays."""
    if name not in FOLDERS:
        np.savez(folder / f"{name}.npz", **flat)
        return folder / f"{name}.npz"
    if not (folder / name).exists():
        golden_folder(folder, name)
    save_file(flat, folder / name / "model.safetensors")
    return folder / name


CHANGES = {
    "missing": lambda flat, key: {name: value for name, value in flat.items() if name != key},
    "renamed": lambda flat, key: {
        name + "x" * (name == key): value for name, value in flat.items()
    },
    "shorter": lambda flat, key: flat | {key: np.ascontiguousarray(flat[key][..., :-1])},
    "flat": lambda flat, key: flat | {key: flat[key].reshape(-1)},
    "integers": lambda flat, key: flat | {key: flat[key].astype(np.int32)},
    "empty": lambda flat, key: flat | {key: np.zeros(0, np.float32)},
    "surplus": lambda flat, key: flat | {key + ".extra": np.ones(3, np.float32)},
}


def victims(kind: str, flat: dict) -> list[str]:
    """Some parameters of a file; not those whose absence is an architecture of its own, or that are
    flat already.
    """
    apart = ("pos_embed", "position_embed", "patch", "stem", "embedding/kernel", "gn_", "conv_root")
    apart += (MASK_TOKEN,)
    names = [
        name
        for name in sorted(flat)
        if not any(word in name for word in apart) and flat[name].ndim > 0
    ]
    if kind == "flat":
        names = [
            name
            for name in names
            if flat[name].ndim > 1 and flat[name].shape != (1, 1, 48) and "bias" not in name
        ]
    return list(np.random.default_rng(0).permutation(names)[:6])


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", ARCHIVES + FOLDERS)
def test_one_array_that_is_wrong_is_named(name, kind, tmp_path):
    flat = arrays_of(name)
    for key in victims(kind, flat):
        text = refusal(store(tmp_path, name, CHANGES[kind](flat, key)), **SETTINGS.get(name, {}))
        assert tmp_path.name in text


@pytest.mark.parametrize("name", FOLDERS)
def test_every_name_of_a_hub_file_counts(name, tmp_path):
    """Each array of the first block and outside of the blocks, renamed or missing, is named as in
    the file.
    """
    flat = arrays_of(name)
    for key in (key for key in flat if ".1." not in key and key != MASK_TOKEN):
        assert key in refusal(store(tmp_path, name, CHANGES["missing"](flat, key)))
        assert key in refusal(store(tmp_path, name, CHANGES["renamed"](flat, key)))


def without(name):
    return lambda flat: {key: value for key, value in flat.items() if key != name}


def renamed(old, new):
    return lambda flat: {new if key == old else key: value for key, value in flat.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("Transformer/encoder_norm/scale"), "lack Transformer/encoder_norm/scale"),
        (without("embedding/kernel"), "has no embedding/kernel"),
        (
            renamed(QUERY, QUERY.replace("query", "querry")),
            f"lack {QUERY} .* nearest name is .*querry",
        ),
        (
            lambda flat: flat | {"extra/kernel": np.zeros(3)},
            "have extra/kernel, which the model does not have",
        ),
        (
            lambda flat: flat | {QUERY: np.zeros((48, 4, 11))},
            r"is \(48, 4, 11\), but the model has \(48, 4, 12\)",
        ),
        (
            lambda flat: {k: v for k, v in flat.items() if "encoderblock_0" not in k},
            r"blocks \[1\]: some are missing",
        ),
        (lambda flat: dict(a=np.zeros(3)), "has no embedding/kernel .* not the weights of a ViT"),
        (lambda flat: {}, "has no embedding/kernel among its 0 parameters"),
        (without("head/bias"), "lack head/bias"),
        (without("head/kernel"), "lack head/kernel"),
        (without("pre_logits/bias"), "lack pre_logits/bias"),
        (without("pre_logits/kernel"), "lack pre_logits/kernel"),
        (
            lambda flat: flat | {"embedding/kernel": np.zeros((8, 8, 3, 48), np.int32)},
            "embedding/kernel of type int32",
        ),
        (
            lambda flat: flat | {"head/bias": np.float32(1)},
            r"head/bias of type float32, shape \(\)",
        ),
        (
            lambda flat: flat | {"head/bias": np.zeros(0)},
            r"head/bias of type float64, shape \(0,\)",
        ),
        (
            lambda flat: flat | {"embedding/kernel": np.zeros(48, np.float32)},
            r"embedding/kernel of shape \(48,\)",
        ),
        (
            lambda flat: flat | {"embedding/kernel": np.zeros((8, 8, 1, 48))},
            r"is \(8, 8, 1, 48\), but the model has",
        ),
        (lambda flat: flat | {POSEMB: np.zeros((1, 1, 48), np.float32)}, "it has no patch rows"),
        (
            lambda flat: flat | {POSEMB: np.zeros((1, 19, 48), np.float32)},
            "18 patch tokens, not a square number",
        ),
        (lambda flat: flat | {"cls": np.array(["text"])}, "cls of type <U4"),
        (lambda flat: flat | {"cls": np.zeros((1, 1, 48), np.complex64)}, "cls of type complex64"),
    ],
)
def test_what_is_wrong_is_said(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_rep", change=change))


def test_a_stem_that_no_model_has_is_named(tmp_path):
    flat = arrays_of("hybrid_rti_nostage")
    narrow = flat | {"conv_root/kernel": flat["conv_root/kernel"][..., :-1]}
    text = refusal(store(tmp_path, "hybrid_rti_nostage", narrow), grid=(2, 3))
    assert "groups (32) does not divide" in text
    text = refusal(
        store(tmp_path, "bv_map_rep", without("embedding/kernel")(arrays_of("bv_map_rep")))
    )
    assert "has no embedding/kernel" in text


@pytest.mark.parametrize("name", ["vit_token_rep", "bv_map_rep", "timm_token", "hf_vit"])
def test_values_that_are_not_finite_are_still_weights(name, tmp_path):
    flat = arrays_of(name)
    key = next(key for key in flat if key.endswith(("head/bias", "head.bias", "classifier.bias")))
    flat[key] = np.full_like(flat[key], np.nan)
    _, params = vit_jax.from_pretrained(store(tmp_path, name, flat))
    assert np.isnan(params["head"]["bias"]).all()


def pickled_arrays() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([{}], object))
    return buffer.getvalue()


def of_pytorch() -> bytes:
    """What torch.save writes: a zip with a pickle and raw storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"cls_token": 1}))
        archive.writestr("archive/data/0", b"\0" * 16)
    return buffer.getvalue()


def a_zip(**entries) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in entries.items():
            archive.writestr(name.replace("__", "."), text)
    return buffer.getvalue()


def single_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


FILES = {
    "empty": (b"", "it is empty; fetch the file again"),
    "text": (
        b"<html>Not found</html>",
        "it has another format, or is damaged; fetch the file again",
    ),
    "zeros": (b"\0" * 1000, "it has another format, or is damaged"),
    "one byte": (b"P", "it has another format, or is damaged"),
    "old PyTorch": (pickle.dumps({"cls_token": 1}), "it is a pickle, which may run code"),
    "PyTorch": (
        of_pytorch(),
        "is a pickle of PyTorch, which may run code: save it as .safetensors",
    ),
    "pickled arrays": (pickled_arrays(), "Object arrays cannot be loaded"),
    "zip of text": (a_zip(readme__txt="hello"), "can't be read as .npz"),
    "zip of no arrays": (a_zip(cls__npy="hello"), "can't be read as .npz"),
    "empty zip": (a_zip(), "has no embedding/kernel among its 0 parameters"),
    "one array": (single_array(), "it has another format, or is damaged"),
}


@pytest.mark.parametrize("suffix", ["npz", "bin", "pth", "safetensors"])
@pytest.mark.parametrize("kind", FILES)
def test_files_that_hold_no_weights_are_named(kind, suffix, tmp_path):
    content, message = FILES[kind]
    (tmp_path / f"w.{suffix}").write_bytes(content)
    assert message in refusal(tmp_path / f"w.{suffix}")


def small_file(folder, kind: str):
    """A small file that reads well, to be damaged."""
    if kind == "safetensors":
        (folder / "w.safetensors").write_bytes(
            (GOLDEN / "timm_token/model.safetensors").read_bytes()
        )
        return folder / "w.safetensors"
    flat = arrays_of("bv_map_rep")
    (np.savez if kind == "stored" else np.savez_compressed)(folder / "w.npz", **flat)
    return folder / "w.npz"


@pytest.mark.parametrize("kind", ["stored", "compressed", "safetensors"])
def test_files_that_end_too_early_are_named(kind, tmp_path):
    path = small_file(tmp_path, kind)
    content = path.read_bytes()
    cuts = [
        1,
        4,
        8,
        9,
        30,
        100,
        *np.linspace(200, len(content) - 1, 20).astype(int),
        len(content) - 5,
    ]
    for cut in cuts:
        path.write_bytes(content[:cut])
        assert "fetch the file again" in refusal(
            path, num_heads=3 if kind == "safetensors" else None
        )


@pytest.mark.parametrize("kind", ["stored", "compressed"])
def test_flipped_bytes_are_found_or_change_nothing(kind, tmp_path):
    path = small_file(tmp_path, kind)
    content, wanted = path.read_bytes(), npz.read(path)
    rng, found = np.random.default_rng(0), 0
    directory = content.rindex(b"PK\x01\x02") - 2000
    for place in [*rng.integers(0, len(content), 60), *rng.integers(directory, len(content), 60)]:
        flipped = bytearray(content)
        flipped[place] ^= int(rng.integers(1, 256))
        path.write_bytes(flipped)
        try:
            arrays = npz.read(path)
        except UserError as error:
            assert "\n" not in str(error) and "w.npz" in str(error)
            found += 1
        else:  # a time stamp, or the like; a name of an entry is noticed by the next reader
            assert sorted(map(np.ndarray.tobytes, arrays.values())) == sorted(
                map(np.ndarray.tobytes, wanted.values())
            )
    assert found >= 60


def test_a_header_that_says_less_than_there_is_is_found(tmp_path):
    """Half of the numbers, as float16: zipfile checks the sum only of what is read to its end."""
    path = small_file(tmp_path, "stored")
    content = bytearray(path.read_bytes())
    place = content.index(b"'<f4'", content.index(b"embedding/kernel.npy"))
    content[place : place + 5] = b"'<f2'"
    path.write_bytes(content)
    assert "embedding/kernel.npy is longer than its header says" in refusal(path)


def safetensors_file(header, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16)) -> dict:
    return dict(dtype=dtype, shape=list(shape), data_offsets=list(offsets))


HEADERS = {
    "length 2^63": safetensors_file({}, length=2**63),
    "length 2^64 - 1": safetensors_file({}, length=2**64 - 1),
    "length past the end": safetensors_file({"a": entry()}, length=1000),
    "length of the file": safetensors_file(
        {"a": entry()}, b"", length=8 + len(json.dumps({"a": entry()}))
    ),
    "brackets": safetensors_file(b'{"a":' + b"[" * 100_000),
    "objects": safetensors_file(b'{"a":' * 100_000),
    "half a header": safetensors_file(b'{"a": {"dtype": "F32", "sha'),
    "no UTF-8": safetensors_file(b'{"\xff\xfe": 1}'),
    "a list": safetensors_file(b'["a"]'),
    "no offsets": safetensors_file({"a": dict(dtype="F32", shape=[4])}),
    "overlap": safetensors_file({"a": entry(), "b": entry(offsets=(8, 24))}),
    "negative offsets": safetensors_file({"a": entry(offsets=(-16, 0))}),
    "offsets past the end": safetensors_file({"a": entry(shape=(400,), offsets=(0, 1600))}),
    "offsets backwards": safetensors_file({"a": entry(offsets=(16, 0))}),
    "a hole": safetensors_file({"a": entry(offsets=(16, 32))}),
    "another size": safetensors_file({"a": entry(shape=(5,))}),
    "a huge shape": safetensors_file({"a": entry(shape=(2**40, 2**40))}),
    "a negative shape": safetensors_file({"a": entry(shape=(-4,))}),
    "an unknown type": safetensors_file({"a": entry(dtype="Q4_0")}),
    "integers": safetensors_file({"patch_embed.proj.weight": entry(dtype="I32")}, b"\0" * 16),
    "8 bits": safetensors_file(
        {"patch_embed.proj.weight": entry(dtype="F8_E4M3", shape=(16,))}, b"\0" * 16
    ),
    "no arrays": safetensors_file({}, b""),
    "foreign arrays": safetensors_file({"bert.pooler": entry()}, b"\0" * 16),
    "no rank": safetensors_file(
        {"patch_embed.proj.weight": entry(shape=(), offsets=(0, 4))}, b"\0" * 4
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_absurd_headers_are_named(kind, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(HEADERS[kind])
    assert "w.safetensors" in refusal(tmp_path / "w.safetensors", num_heads=3)


def test_folders_without_weights_are_named(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "has neither a checkpoint of ours nor model.safetensors: give a workdir" in refusal(
        folder
    )
    (folder / "pytorch_model.bin").write_bytes(of_pytorch())
    (folder / "config.json").write_text("{}")
    assert "PyTorch pickles, .bin and .pth, are never read" in refusal(folder)
    assert "does not exist: give a workdir" in refusal(tmp_path / "absent")
    assert "does not exist" in refusal(folder / "pytorch_model.bin" / "x")


def test_half_a_checkpoint_is_named(tmp_path):
    assert convert.main([str(golden_file(tmp_path, "vit_gap_norep")), str(tmp_path / "ours")]) == 0
    assert {"state", "meta"} <= {path.name for path in (tmp_path / "ours").iterdir()}
    for missing in ("meta", "state"):
        (tmp_path / "ours" / missing).rename(tmp_path / missing)
        refusal(tmp_path / "ours")
        (tmp_path / missing).rename(tmp_path / "ours" / missing)
    meta = next((tmp_path / "ours/meta").rglob("metadata"))
    text = meta.read_text()
    for damaged in (
        "",
        "{",
        "[]",
        "{}",
        '{"model": {}}',
        text.replace("width", "wide"),
        text.replace("class_names", "x"),
    ):
        meta.write_text(damaged)
        refusal(tmp_path / "ours")
    meta.write_text(text)
    assert vit_jax.from_pretrained(tmp_path / "ours")[0].width == 48
    (tmp_path / "ours").rename(tmp_path / "7")
    (tmp_path / "7/state").rename(tmp_path / "state")
    refusal(tmp_path)  # a workdir whose newest checkpoint has no state


CONFIGS = {
    "no JSON": "{",
    "binary": "\x00\x01",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "a text": '"vit"',
    "deep": '{"a":' * 100_000,
}


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", ["timm_token", "hf_vit"])
def test_a_config_that_is_no_object_is_named(name, content, tmp_path):
    folder = golden_folder(tmp_path, name)
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


ABSURD = {
    "hf_vit": dict(
        num_attention_heads=[-1, "12", 7, [3], {"a": 1}, 2.5, 10**30],
        image_size=[-32, {"height": 32}, "32", [32], [32, 32, 32], 32.5],
        layer_norm_eps=["x", None, [], {}],
        hidden_act=["relu", None, 3, [], {}],
        id2label=[[1], 3, "x", {"a": "b"}],
    ),
    "timm_token": dict(
        model_args=[[], 3, "x"],
        pretrained_cfg=[[], 3, "x"],
        global_pool=["max", 3, [], {}],
        label_names=[3, 2.5],
    ),
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in ABSURD.items() for key in keys]
)
def test_absurd_values_of_a_config_are_refused(name, key, tmp_path):
    folder = golden_folder(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    for value in ABSURD[name][key]:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert name in refusal(folder)


NESTED = {
    "model_args": dict(
        num_heads=[-1, "3", 7, [3]],
        img_size=[-32, "32", {"a": 1}, [32]],
        act_layer=["relu", 3, [1]],
    ),
    "pretrained_cfg": dict(
        mean=[3, [0.5], ["a", "b", "c"]], std=[0, [0, 0, 0], [0.5, 0.5]], crop_pct=["x", []]
    ),
}


@pytest.mark.parametrize(
    ("part", "key"), [(part, key) for part, keys in NESTED.items() for key in keys]
)
def test_absurd_values_of_timms_parts_are_refused(part, key, tmp_path):
    folder = golden_folder(tmp_path, "timm_token")
    config = json.loads((folder / "config.json").read_text())
    for value in NESTED[part][key]:
        (folder / "config.json").write_text(
            json.dumps(config | {part: config[part] | {key: value}})
        )
        assert "timm_token" in refusal(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"image_mean": 3}', '{"image_std": [0, 0, 0]}', '{"image_mean": ["a", 1, 2]}'],
)
def test_a_damaged_preprocessor_is_named(text, tmp_path):
    folder = golden_folder(tmp_path, "hf_vit")
    (folder / "preprocessor_config.json").write_text(text)
    assert "hf_vit" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map": {"a": "b.safetensors"}}', '{"weight_map": {"a": 3}}', "{}"]
)
def test_a_damaged_index_is_named(text, tmp_path):
    folder = golden_folder(tmp_path, "hf_vit")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    assert "hf_vit" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", ".."]
)
def test_an_index_does_not_lead_out_of_its_folder(name, tmp_path):
    folder = golden_folder(tmp_path, "hf_vit")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict(a=name))))
    assert "which is not beside it" in refusal(folder)


def test_more_than_the_memory_of_the_machine_is_not_read(tmp_path, monkeypatch):
    """A machine of 16 KiB stands in for an archive of hundreds of GiB of zeros, which is small on
    disk.
    """
    monkeypatch.setattr(runtime, "free_memory", lambda: 4 * 4096)
    np.savez_compressed(
        tmp_path / "bomb.npz", **{"embedding/kernel": np.zeros((32, 32, 3, 192), np.float32)}
    )
    assert "bomb.npz declares 0.0 GiB of arrays, more than" in refusal(tmp_path / "bomb.npz")


BROKEN = {"text": b"not weights", "PyTorch": of_pytorch(), "pickled arrays": pickled_arrays()}


@pytest.mark.parametrize("kind", BROKEN)
def test_commands_end_with_one_line_and_exit_2(kind, tiny, tmp_path, capsys):
    path = tmp_path / "w.npz"
    path.write_bytes(BROKEN[kind])
    assert convert.main([str(path), str(tmp_path / "out")]) == 2
    assert "w.npz" in last_error(capsys) and not (tmp_path / "out").exists()
    assert (
        train.main([f"--config={tiny}", f"--workdir={tmp_path}/run", f"--config.init_from={path}"])
        == 2
    )
    assert "w.npz" in last_error(capsys)


def test_a_renamed_parameter_ends_the_commands_too(tiny, tmp_path, capsys):
    path = golden_file(tmp_path, "vit_token_rep", change=renamed(QUERY, QUERY + "s"))
    assert convert.main([str(path), str(tmp_path / "out")]) == 2
    assert f"vit_token_rep.npz: the weights lack {QUERY}" in last_error(capsys)


def test_a_disk_that_does_not_give_the_weights_is_no_fault_of_theirs():
    """The memory of this process is such a file: at its start nothing is mapped."""
    with pytest.raises(
        Unavailable, match=r"/proc/self/mem can't be read \(Input/output error\): ch"
    ):
        vit_jax.from_pretrained("/proc/self/mem")
