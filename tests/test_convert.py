"""Every format into every other: proven by logits, refused by the feature's name, and never
half-written.
"""

import dataclasses
import errno
import json
import os
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN, TINY, golden_file, golden_folder, last_error
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import config as configs
from vit_jax import convert
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train
from vit_jax.weights import load as pretrained
from vit_jax.weights import scan_layout
from vit_jax.weights.formats import npz, safetensors_folder
from vit_jax.weights.formats.weights import POSEMB

SUFFIX = {"published": ".npz", "big_vision": ".npz"}
# source: what a format can't represent, or "differ" if the logits would; all others must succeed.
MATRIX = {
    "vit_token_norep": {},
    "vit_token_rep": dict(timm="pre_logits", hf="pre_logits"),
    "bv_tok_learn": {},
    "bv_map_learn": dict(published="map pooling", hf="map pooling"),
    "bv_gap_sincos2d_rep": dict(published="posemb=sincos2d", timm="pre_logits", hf="mean pooling"),
    "hybrid_rti_nostage": dict(
        big_vision="a ResNet stem", timm="a ResNet stem", hf="a ResNet stem"
    ),
    "mixer_p8": dict(timm="the architecture mixer", hf="the architecture mixer"),
    "timm_token": dict(published="exact (erf) GELU", big_vision="exact (erf) GELU"),
    "timm_layer_scale": dict(published="LayerScale", big_vision="LayerScale", hf="LayerScale"),
    "timm_gap": dict(published="fc_norm", big_vision="fc_norm", hf="mean pooling"),
    "timm_deit_distilled": dict(
        published="a distillation token", big_vision="a distillation token"
    ),
    "hf_vit": dict(published="exact (erf) GELU", big_vision="exact (erf) GELU", timm="differ"),
}


def source_of(folder, name: str) -> pathlib.Path:
    return GOLDEN / name if (GOLDEN / name).is_dir() else golden_file(folder, name)


def settings_of(name: str) -> dict:
    """hybrid_rti_nostage has 2 x 3 tokens, which its file can't tell."""
    return dict(grid=(2, 3)) if name.startswith("hybrid") else {}


@pytest.fixture
def known_grid(monkeypatch):
    """Reads every source with its grid, which the command does not ask for."""
    read = pretrained.read

    def with_grid(path, **settings):
        return read(path, **(settings_of(pathlib.Path(path).stem) | settings))

    monkeypatch.setattr(pretrained, "read", with_grid)


def run(source, destination, *arguments) -> int:
    return convert.main([str(source), str(destination), *arguments])


def assert_holds(path, weights, target: str, **settings) -> None:
    """Every parameter came through bit for bit; big_vision adds the class token's position to the
    token.
    """
    found = pretrained.read(path, **settings)
    wanted = dict(weights.params)
    if target == "big_vision" and "cls" in wanted and POSEMB in wanted:
        wanted["cls"] = wanted["cls"] + wanted[POSEMB][:, :1]
        wanted[POSEMB] = np.concatenate(
            [np.zeros_like(wanted["cls"]), wanted[POSEMB][:, 1:]], axis=1
        )
    assert found.params.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found.params[name], value, err_msg=name)
    image_size = (
        "image_size" if POSEMB in wanted or target in ("ours", "timm", "hf") else "architecture"
    )
    assert found.fields[image_size] == weights.fields[image_size] and found.format in (
        target,
        "published",
    )


@pytest.mark.parametrize("target", convert.FORMATS)
@pytest.mark.parametrize("name", MATRIX)
def test_every_format_into_every_other(name, target, tmp_path, capsys, known_grid):
    source = source_of(tmp_path, name)
    destination = tmp_path / f"out{SUFFIX.get(target, '')}"
    code = run(source, destination, f"--format={target}", f"--json={tmp_path}/result.json")
    obstacle = MATRIX[name].get(target)
    assert code == (0 if obstacle is None else 1 if obstacle == "differ" else 2)
    assert not list(tmp_path.glob(".converting_*"))
    if obstacle:
        assert obstacle in last_error(capsys) and not destination.exists()
        assert not (tmp_path / "result.json").exists()
        return
    result = json.loads((tmp_path / "result.json").read_text())
    weights = pretrained.read(source, **settings_of(name))
    assert result.keys() == {"source_format", "target_format", "max_abs_diff", "tolerance"}
    assert (result["source_format"], result["target_format"]) == (weights.format, target)
    assert 0 <= result["max_abs_diff"] <= result["tolerance"] <= 1e-3
    assert (
        f"largest difference of the logits {result['max_abs_diff']:.3g}" in capsys.readouterr().out
    )
    assert_holds(destination, weights, target, **settings_of(name))


def test_what_the_logits_show_is_refused_with_its_cause(tmp_path, capsys):
    assert run(GOLDEN / "hf_vit", tmp_path / "out", "--format=timm") == 1
    line = last_error(capsys)
    assert "ln_eps=1e-12 becomes 1e-06" in line and "nothing is written" in line
    assert not os.listdir(tmp_path)


def test_a_head_of_zeros_hides_no_difference(tmp_path, capsys):
    folder = golden_folder(tmp_path, "hf_vit")
    arrays = load_file(folder / "model.safetensors")
    zeros = {
        name: np.zeros_like(value)
        for name, value in arrays.items()
        if name.startswith("classifier")
    }
    save_file(arrays | zeros, folder / "model.safetensors")
    assert len(zeros) == 2 and run(folder, tmp_path / "out", "--format=timm") == 1
    assert "differ by" in last_error(capsys) and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_converted(tmp_path, capsys):
    def spoil(flat):
        return flat | {"cls": np.full_like(flat["cls"], np.nan)}

    assert run(golden_file(tmp_path, "vit_token_norep", change=spoil), tmp_path / "out") == 1
    assert "differ by nan" in last_error(capsys) and os.listdir(tmp_path) == ["vit_token_norep.npz"]


@pytest.mark.parametrize("target", ["published", "big_vision", "timm"])
def test_bfloat16_comes_out_as_float32(target, tmp_path):
    def half(flat):
        return {name: value.astype(ml_dtypes.bfloat16) for name, value in flat.items()}

    source, out = (
        golden_file(tmp_path, "vit_token_norep", change=half),
        tmp_path / f"out{SUFFIX.get(target, '')}",
    )
    assert run(source, out, f"--format={target}") == 0
    arrays = np.load(out) if target in SUFFIX else load_file(out / "model.safetensors")
    assert {str(arrays[name].dtype) for name in arrays} == {"float32"}


def test_class_names_and_preprocessing_go_along(tmp_path):
    folder = golden_folder(tmp_path, "timm_token")
    config = json.loads((folder / "config.json").read_text())
    cfg = config["pretrained_cfg"] | dict(
        mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4], interpolation="bicubic", crop_pct=0.8
    )
    names = [f"animal {i}" for i in range(7)]
    (folder / "config.json").write_text(
        json.dumps(config | dict(pretrained_cfg=cfg, label_names=names))
    )
    wanted = vit_jax.from_pretrained(folder)[0].preprocess
    assert wanted["mean"] == (0.4, 0.5, 0.6) and wanted["crop"] == 0.8
    for target in ("ours", "hf", "timm"):
        assert run(folder, tmp_path / target, f"--format={target}") == 0
        assert pretrained.read(tmp_path / target).class_names == tuple(names)
        found = vit_jax.from_pretrained(tmp_path / target)[0].preprocess
        assert found.pop("crop") == pytest.approx(0.8) and found == {
            key: wanted[key] for key in found
        }


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    source = golden_file(tmp_path, "vit_gap_rep")
    (tmp_path / "file.npz").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("precious")
    (tmp_path / "folder.npz").mkdir()
    for destination, *arguments in [
        ("file.npz",),
        ("full",),
        ("full", "--format=timm"),
        ("folder.npz",),
        (source.name,),
    ]:
        assert run(source, tmp_path / destination, *arguments) == 2
        assert f"{destination} exists and is not overwritten" in last_error(capsys)
    assert (
        (tmp_path / "file.npz").read_text()
        == (tmp_path / "full/notes.txt").read_text()
        == "precious"
    )
    (tmp_path / "empty").mkdir()
    assert run(source, tmp_path / "empty") == 0 and (tmp_path / "empty/state").exists()


@pytest.mark.parametrize(
    ("destination", "arguments", "message"),
    [
        ("out", ["--format=published"], "give a name that ends in .npz"),
        ("out.bin", ["--format=big_vision"], "give a name that ends in .npz"),
        ("out.npz", ["--format=hf"], "hf weights are a folder"),
        ("out.safetensors", ["--format=timm"], "timm weights are a folder"),
        ("out.npz", ["--format=ours"], "ours weights are a folder"),
        ("absent/out.npz", [], "the folder of DST .* does not exist"),
        ("vit_gap_rep.npz/out", [], "the folder of DST .* does not exist"),
        (
            "out.npz",
            ["--json=/no/where.json"],
            "the folder of --json=/no/where.json does not exist",
        ),
    ],
)
def test_a_wrong_destination_is_named(destination, arguments, message, tmp_path, capsys):
    source = golden_file(tmp_path, "vit_gap_rep")
    assert run(source, tmp_path / destination, *arguments) == 2
    assert re.search(message, last_error(capsys)) and os.listdir(tmp_path) == [source.name]


def test_a_wrong_command_line_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        convert.main(["only_one"])
    assert error.value.code == 2 and "DST" in last_error(capsys)
    with pytest.raises(SystemExit) as error:
        convert.main(["a", "b", "--format=onnx"])
    assert error.value.code == 2 and "'onnx'" in last_error(capsys)
    assert run(tmp_path / "absent.npz", tmp_path / "out.npz") == 2
    assert "absent.npz does not exist" in last_error(capsys)


WRITERS = {
    "published": (npz, "write"),
    "timm": (safetensors_folder, "write"),
    "ours": (checkpoint, "write_params"),
    "big_vision": (convert, "move"),
}


@pytest.mark.parametrize("target", WRITERS)
def test_a_full_disk_leaves_nothing(target, tmp_path, capsys, monkeypatch):
    source = golden_file(tmp_path, "vit_gap_norep")
    module, function = WRITERS[target]
    write = getattr(module, function)

    def failing(path, *arguments, **settings):
        if function != "move":
            write(path, *arguments, **settings)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, function, failing)
    destination = tmp_path / f"out{SUFFIX.get(target, '')}"
    assert run(source, destination, f"--format={target}") == 2
    assert f"DST {destination} can't be written (no space is left on the device)" in last_error(
        capsys
    )
    assert os.listdir(tmp_path) == [source.name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    def failing(*arguments, **settings):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    source = golden_file(tmp_path, "vit_gap_norep")
    monkeypatch.setattr(convert.tempfile, "mkdtemp", failing)
    assert run(source, tmp_path / "out.npz") == 2
    assert "read-only" in last_error(capsys) and os.listdir(tmp_path) == [source.name]


def test_an_error_of_ours_is_no_storage_problem(tmp_path, monkeypatch):
    def failing(*arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(npz, "write", failing)
    with pytest.raises(ZeroDivisionError):
        run(golden_file(tmp_path, "vit_gap_norep"), tmp_path / "out.npz")
    assert os.listdir(tmp_path) == ["vit_gap_norep.npz"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Workdirs of one update: `scan` has its layers stacked, and `loop` is the same with one entry
    per layer.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.py").write_text(re.sub("config.evals = .*", "", TINY))
    flags = [
        "--config.total_steps=1",
        "--config.optim.warmup_steps=0",
        "--config.data.batch_size=8",
    ]
    command = [
        f"--config={folder}/tiny.py",
        f"--workdir={folder}/scan",
        *flags,
        "--config.model.scan=True",
    ]
    assert train.main(command) == 0
    saved = checkpoint.find(folder / "scan")
    meta, params = (
        checkpoint.read_meta(saved),
        scan_layout.unstack_blocks(checkpoint.read_params(saved)),
    )
    meta["model"]["scan"] = False
    with Checkpointer(folder / "loop/checkpoints", configs.defaults().checkpoint) as checkpointer:
        checkpointer.save(1, dict(params=params, ema_params={}), meta, {})
        checkpointer.wait()
    return folder


def test_a_run_goes_out_and_comes_back(runs, tmp_path):
    """ours -> each format -> ours; the run saved its layers in a loop, or stacked."""
    weights = pretrained.read(runs / "loop")
    for target in ("published", "big_vision", "timm", "ours"):
        out = tmp_path / f"{target}{SUFFIX.get(target, '')}"
        assert run(runs / "scan", out, f"--format={target}") == 0
        assert_holds(out, weights, target)
    assert run(tmp_path / "timm", tmp_path / "again", "--format=ours") == 0
    assert_holds(tmp_path / "again", weights, "ours")
    assert pretrained.read(tmp_path / "ours").class_names == tuple(str(i) for i in range(10))


def test_an_export_of_ours_evaluates_like_its_run(runs, tmp_path):
    assert run(runs / "scan", tmp_path / "ours") == 0
    assert dataclasses.asdict(pretrained.read(tmp_path / "ours"))["loss"] == "softmax_xent"
    results = []
    for weights in (runs / "scan", tmp_path / "ours"):
        config = GOLDEN.parents[1] / "configs/evaluate.py"
        command = [
            f"--config={config}:digits,val",
            f"--config.init_from={weights}",
            f"--json={tmp_path}/result.json",
        ]
        assert evaluate.main(command) == 0
        results.append(json.loads((tmp_path / "result.json").read_text()))
    assert results[0] == results[1] and any(key.endswith("/top1") for key in results[0])
    model, params = vit_jax.from_pretrained(tmp_path / "ours")
    assert model.image_size == (8, 8) and len(scan_layout.flatten(params)) > 30
