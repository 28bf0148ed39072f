"""Whole runs in this process: what they write, how they continue, how they fine-tune, and how they
fail.
"""

import dataclasses
import errno
import json
import math
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY, below, golden, last_error, metric_lines
from PIL import Image

import vit_jax
from vit_jax import convert
from vit_jax.checkpoints import read as checkpoint
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train
from vit_jax.train import loop, metrics
from vit_jax.train.timer import ProfilerWindow
from vit_jax.weights import load as pretrained
from vit_jax.weights import scan_layout
from vit_jax.weights.formats.weights import POSEMB


def run(tiny: str, workdir, *arguments: str) -> int:
    return train.main([f"--config={tiny}", f"--workdir={workdir}", *arguments])


def final_params(workdir) -> dict[str, np.ndarray]:
    return scan_layout.flatten(checkpoint.read_params(checkpoint.find(workdir)))


def same_bits(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(config file, workdir) of one undisturbed run of 12 steps."""
    folder = tmp_path_factory.mktemp("done")
    config = folder / "tiny.py"
    config.write_text(TINY)
    assert run(str(config), folder / "run") == 0
    return str(config), folder / "run"


@pytest.mark.slow
def test_evaluations_that_a_kill_cut_off_are_made_up(done, tmp_path):
    """The last step was saved, but its line was not written."""
    config, workdir = done
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    *lines, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    assert run(config, tmp_path / "run") == 0
    found = metric_lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, 13))
    wanted = json.loads(last)
    measured = [key for key in wanted if key.startswith("eval/")]
    assert measured and all(found[-1][key] == wanted[key] for key in measured)
    assert run(config, tmp_path / "run") == 0
    assert metric_lines(tmp_path / "run") == found


def test_due_is_every_n_and_at_the_end():
    assert [n for n in range(1, 11) if loop.due(n, 4, 10)] == [4, 8, 10]
    assert [n for n in range(1, 11) if loop.due(n, 0, 10)] == [10]


def test_a_run_writes_what_the_interface_promises(done):
    _, workdir = done
    lines = metric_lines(workdir)
    assert [line["step"] for line in lines] == list(range(1, 13))
    keys = {"train/loss", "train/lr", "train/grad_norm", "train/skipped_steps", "data/skipped"}
    keys |= {"perf/images_per_sec", "perf/step_ms", "perf/data_wait"}
    assert all(keys <= set(line) for line in lines)
    assert [line["step"] for line in lines if "eval/val/top1" in line] == [6, 12]
    assert [line["step"] for line in lines if "checkpoint/stall_s" in line] == [5, 9], (
        "the line after the save"
    )
    assert lines[-1]["eval/val/count"] == 360
    assert abs(lines[0]["train/loss"] - math.log(10)) < 1e-6, "the head starts at zero"
    assert lines[0]["train/lr"] == 0.0 and lines[2]["train/lr"] == pytest.approx(1e-3)
    record = json.loads((workdir / "config.json").read_text())
    assert record["config"]["model"]["width"] == 32 and record["versions"]["jax"] == jax.__version__
    assert "done: 12 steps" in (workdir / "log.txt").read_text()
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["12", "8"]
    assert list(workdir.glob("events.out.tfevents.*"))
    account = json.loads((workdir / "goodput.json").read_text())
    parts = account["parts"]
    assert account["wall_s"] == pytest.approx(sum(parts.values())) and account["starts"] == 1
    assert {name for name, seconds in parts.items() if not seconds} <= {
        *("waiting", "compilation", "repeated_steps", "down")
    }


def test_a_finished_run_that_is_started_again_changes_nothing(done):
    tiny, workdir = done
    before = (workdir / "metrics.jsonl").read_text()
    assert run(tiny, workdir) == 0
    assert (workdir / "metrics.jsonl").read_text() == before
    account = json.loads((workdir / "goodput.json").read_text())
    assert (account["starts"], account["steps_repeated"]) == (2, 0)
    steps = [(record["first_step"], record["last_step"]) for record in account["records"]]
    assert steps == [(0, 12), (12, 12)]


# Before the first checkpoint, and while one is saved; tests/faults/ has more moments.
@pytest.mark.slow
@pytest.mark.parametrize("crash", [3, 8])
def test_a_crashed_run_continues_with_the_same_bits(crash, done, tmp_path, monkeypatch):
    tiny, workdir = done
    write = metrics.MetricWriter.write

    def broken(self, step, scalars):
        if step == crash:
            with self.path.open("a") as file:
                file.write('{"step": 99, "train/lo')  # a half line, as after a kill
            raise RuntimeError("killed")
        write(self, step, scalars)

    monkeypatch.setattr(metrics.MetricWriter, "write", broken)
    with pytest.raises(RuntimeError, match="killed"):
        run(tiny, tmp_path / "run")
    monkeypatch.undo()
    assert run(tiny, tmp_path / "run") == 0
    straight, resumed = metric_lines(workdir), metric_lines(tmp_path / "run")
    for key in ("step", "train/loss", "train/grad_norm", "train/lr", "eval/val/loss"):
        assert [line.get(key) for line in resumed] == [line.get(key) for line in straight], key
    assert same_bits(final_params(workdir), final_params(tmp_path / "run"))
    account = json.loads((tmp_path / "run/goodput.json").read_text())
    saved = 4 * (crash // 5)
    assert (account["starts"], account["steps_repeated"]) == (2, crash - saved)
    steps = [(record["first_step"], record["last_step"]) for record in account["records"]]
    assert steps == [(0, crash), (saved, 12)]


@pytest.mark.slow
def test_mesh_scan_remat_and_accumulation_may_change_between_resumes(done, tmp_path):
    tiny, workdir = done
    folder = tmp_path / "run"
    # The schedule is that of 12 steps: stop in the middle by a crash of the profiler window.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ProfilerWindow, "before_step", lambda self, step: 1 / 0 if step == 10 else None
        )
        with pytest.raises(ZeroDivisionError):
            run(tiny, folder, "--config.mesh.fsdp=2")
    changes = [
        "--config.mesh.tensor=2",
        "--config.mesh.fsdp=4",
        "--config.model.scan=true",
        "--config.model.remat=full",
    ]
    assert run(tiny, folder, *changes, "--config.accum_steps=2") == 0
    losses, truth = (
        [line["train/loss"] for line in metric_lines(path)] for path in (folder, workdir)
    )
    np.testing.assert_allclose(losses, truth, rtol=1e-4)
    _, params = vit_jax.from_pretrained(folder)
    truth = final_params(workdir)
    for key, value in scan_layout.flatten(params).items():
        np.testing.assert_allclose(
            value, truth[key], atol=2e-3 * max(np.abs(truth[key]).max(), 1e-2), err_msg=key
        )


@pytest.mark.slow
def test_best_and_periodic_checkpoints_are_kept(tiny, tmp_path):
    arguments = [
        "--config.checkpoint.every=1",
        "--config.checkpoint.keep_last=1",
        "--config.checkpoint.keep_every=5",
    ]
    assert (
        run(tiny, tmp_path / "run", *arguments, "--config.checkpoint.keep_best=eval/val/loss") == 0
    )
    lines = metric_lines(tmp_path / "run")
    assert all("eval/val/loss" in line for line in lines), "a ranked checkpoint has its metric"
    best = min(lines, key=lambda line: line["eval/val/loss"])["step"]
    kept = {int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()}
    assert kept == {5, 10, 12, best}


@pytest.mark.slow
def test_a_profile_is_written_on_request(tiny, tmp_path):
    """In a process of its own: JAX's profiler crashes one that has loaded the TPU compiler."""
    arguments = ["--config.profile.first_step=3", "--config.profile.num_steps=2"]
    arguments += ["--config.total_steps=5", "--config.checkpoint.every=0"]
    command = [sys.executable, "-m", "vit_jax.train", f"--config={tiny}"]
    subprocess.run([*command, f"--workdir={tmp_path}/run", *arguments], cwd=ROOT, check=True)
    traces = list((tmp_path / "run/profile").rglob("*.xplane.pb"))
    assert traces and traces[0].stat().st_size > 1000


def flip(path: pathlib.Path) -> None:
    """Flips one bit in each of 50 parts of a file: one alone may be of what is not read."""
    raw = bytearray(path.read_bytes())
    for part in range(50):
        raw[len(raw) * part // 50] ^= 1
    path.write_bytes(raw)


def arrays(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files that hold values: which of them Orbax leaves behind unread, as a copy, depends on
    its threads.
    """
    files = list((folder / "state").glob("**/d/*"))
    assert files, "the checkpoint has no arrays"
    return files


# tests/faults/ has more kinds, of single files.
DAMAGES = {
    "all files are empty": lambda folder: [
        path.write_bytes(b"") for path in folder.rglob("*") if path.is_file()
    ],
    "a bit of the arrays": lambda folder: [flip(path) for path in arrays(folder)],
    "a bit of the facts": lambda folder: flip(folder / "meta/metadata"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over(damage, done, tmp_path):
    tiny, workdir = done
    shutil.copytree(workdir, tmp_path / "run")
    DAMAGES[damage](tmp_path / "run/checkpoints/12")
    earlier = tmp_path / "run/checkpoints/damaged_12"
    earlier.mkdir()
    assert run(tiny, tmp_path / "run") == 0
    log = (tmp_path / "run/log.txt").read_text()
    assert "can't be used" in log
    assert "checkpoint 12 is passed over, and now called damaged_12_2" in log
    assert (tmp_path / "run/checkpoints/damaged_12_2/state").is_dir()
    assert not list(earlier.iterdir()), "what was set aside is never deleted"
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == list(range(1, 13))
    assert same_bits(final_params(workdir), final_params(tmp_path / "run"))


def test_a_checkpoint_that_may_not_be_entered_is_not_damaged(done, tmp_path, monkeypatch, capsys):
    tiny, workdir = done
    shutil.copytree(workdir, tmp_path / "run")
    listdir = os.listdir

    def denied(path="."):
        if "checkpoints/12" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", denied)
    before = sorted((tmp_path / "run/checkpoints").iterdir())
    assert run(tiny, tmp_path / "run") == 2
    text = last_error(capsys)
    assert (
        "checkpoints/12" in text and "Permission denied" in text and "nothing was changed" in text
    )
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == before


def test_damaged_weights_are_not_loaded(done, tmp_path):
    from vit_jax.errors import UserError

    _, workdir = done
    shutil.copytree(workdir / "checkpoints/12", tmp_path / "12")
    for path in arrays(tmp_path / "12"):
        flip(path)
    with pytest.raises(UserError, match=r"12/state can't be used"):
        vit_jax.from_pretrained(tmp_path / "12")


@pytest.mark.slow
def test_fine_tuning_at_a_higher_resolution(done, tmp_path):
    tiny, workdir = done
    still = ["--config.total_steps=1", "--config.optim.warmup_steps=0", "--config.optim.lr=1e-12"]
    arguments = [f"--config.init_from={workdir}", "--config.image_size=16", *still]
    assert run(tiny, tmp_path / "fine", *arguments) == 0
    assert metric_lines(tmp_path / "fine")[0]["train/loss"] == pytest.approx(math.log(10), abs=1e-6)
    before, after = final_params(workdir), final_params(tmp_path / "fine")
    posemb = pretrained.resample_posemb(before.pop(POSEMB), (4, 4), (2, 2), num_prefix=0)
    np.testing.assert_allclose(after.pop(POSEMB), posemb, atol=1e-6)
    for key in before:
        wanted = np.zeros_like(before[key]) if key.startswith("head/") else before[key]
        np.testing.assert_allclose(after[key], wanted, atol=1e-6, err_msg=key)


@pytest.mark.slow
def test_fine_tuning_evaluates_on_images_as_its_weights_expect(done, tmp_path, capsys):
    """A run that goes on without these weights, a branch, and an evaluation of the run do so, too."""
    tiny, workdir = done
    weights = pretrained.read(workdir)
    expected = dict(pixels_of="timm", interpolation="bicubic", crop=0.8, resize="shorter")
    expected |= dict(gelu="erf", ln_eps=1e-5)  # which the config leaves to the weights
    weights = dataclasses.replace(weights, fields=weights.fields | expected)
    model, _ = pretrained.build(weights)
    convert.write(weights, model, tmp_path / "weights", "ours")
    arguments = [f"--config.init_from={tmp_path}/weights", "--config.checkpoint.every=1"]
    arguments += ["--config.total_steps=2", "--config.optim.warmup_steps=0"]
    said = "images of evals.val: the shorter side resized to 10, bicubic as in timm, then the"
    last = []
    for _ in range(2):
        assert run(tiny, tmp_path / "fine", *arguments) == 0
        assert said in capsys.readouterr().err
        last.append(metric_lines(tmp_path / "fine")[-1]["eval/val/top1"])
        used = json.loads((tmp_path / "fine/config.json").read_text())["config"]["model"]
        assert (used["gelu"], used["ln_eps"], used["width"]) == ("erf", 1e-5, 32)
        shutil.rmtree(tmp_path / "weights", ignore_errors=True)
        shutil.rmtree(tmp_path / "fine/checkpoints/2")
    saved = f"{tmp_path}/fine/checkpoints/1"
    branch = [f"--config.branch_from={saved}", *arguments[1:]]
    branch += ["--config.model.gelu=erf", "--config.model.ln_eps=1e-5"]
    assert run(tiny, tmp_path / "branch", *branch) == 0
    assert said in capsys.readouterr().err
    config = f"--config={ROOT}/configs/evaluate.py:digits,val"
    saved = f"--config.init_from={saved}"
    assert evaluate.main([config, saved]) == 0
    assert said.replace(".val", ".test") in capsys.readouterr().err and last[0] == last[1]


@pytest.mark.slow
def test_fine_tuning_from_a_published_file(tmp_path, tiny):
    arrays, _ = golden("load_drophead_token_4to6")
    np.savez(tmp_path / "weights.npz", **below(arrays, "pretrained"))
    model = [
        "--config.model.variant=Ti/8",
        "--config.model.width=32",
        "--config.model.pool=tok",
        "--config.image_size=48",
    ]
    still = ["--config.total_steps=1", "--config.optim.warmup_steps=0", "--config.optim.lr=1e-12"]
    init = f"--config.init_from={tmp_path}/weights.npz"
    depth = len(
        {
            key.split("/")[2]
            for key in arrays
            if key.startswith("pretrained/Transformer/encoderblock_")
        }
    )
    assert run(tiny, tmp_path / "run", init, *model, *still, f"--config.model.depth={depth}") == 0
    posemb = final_params(tmp_path / "run")[POSEMB]
    np.testing.assert_allclose(posemb, arrays[f"result/{POSEMB}"], atol=1e-6)
    assert not any(key.startswith("pre_logits") for key in final_params(tmp_path / "run"))


def test_evaluate_gives_the_numbers_of_training(done, tmp_path, capsys):
    _, workdir = done
    config = ROOT / "configs/evaluate.py"
    arguments = [
        f"--config={config}:digits,val",
        f"--config.init_from={workdir}",
        f"--json={tmp_path}/out.json",
    ]
    assert evaluate.main(arguments) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    last = metric_lines(workdir)[-1]
    assert found["eval/test/count"] == 360
    assert found["eval/test/top1"] == last["eval/val/top1"]
    assert found["eval/test/loss"] == pytest.approx(last["eval/val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("batch_size", "mesh"), [(8, "data=8"), (56, "fsdp=8"), (360, "tensor=4"), (1024, "data=-1")]
)
def test_evaluation_counts_every_example_once_for_any_batch_and_mesh(
    batch_size, mesh, done, tmp_path
):
    _, workdir = done
    config = ROOT / "configs/evaluate.py"
    arguments = [
        f"--config={config}:digits,val",
        f"--config.init_from={workdir}",
        f"--json={tmp_path}/out.json",
    ]
    assert (
        evaluate.main(
            [*arguments, f"--config.data.batch_size={batch_size}", f"--config.mesh.{mesh}"]
        )
        == 0
    )
    found, last = json.loads((tmp_path / "out.json").read_text()), metric_lines(workdir)[-1]
    assert (found["eval/test/count"], found["eval/test/top1"]) == (360, last["eval/val/top1"])


def test_from_pretrained_reads_a_workdir_and_a_checkpoint(done):
    _, workdir = done
    model, params = vit_jax.from_pretrained(workdir)
    assert (model.width, model.image_size, model.num_classes) == (32, (8, 8), 10)
    assert same_bits(scan_layout.flatten(params), final_params(workdir))
    _, older = vit_jax.from_pretrained(workdir / "checkpoints" / "8")
    assert not same_bits(scan_layout.flatten(params), scan_layout.flatten(older))


def test_a_workdir_of_another_config_says_which_keys_differ(done, capsys):
    tiny, workdir = done
    before = final_params(workdir)
    assert run(tiny, workdir, "--config.optim.lr=0.5", "--config.seed=3") == 2
    line = last_error(capsys)
    assert "optim.lr: 0.001 -> 0.5" in line and "seed: 0 -> 3" in line
    assert same_bits(before, final_params(workdir))


def failing_folder(tmp_path) -> str:
    (tmp_path / "data/train/cat").mkdir(parents=True)
    (tmp_path / "data/train/dog").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "data/train/cat/1.png")
    return str(tmp_path / "data")


BAD = {
    "missing TFDS": (
        ["--config.data.name=no_such_set"],
        "'no_such_set' is neither known to TFDS nor prepared",
    ),
    "unprepared TFDS": (
        ["--config.data.name=cifar10"],
        "'cifar10' is not prepared in .*: run `python -m vit_jax",
    ),
    "missing folder": (["--config.data.name=folder:/no/where"], "/no/where does not exist"),
    "unknown split": (["--config.data.split=train2"], "split 'train2' does not exist in digits"),
    "batch": (["--config.data.batch_size=60"], "batch_size=60 is not divisible by the 8 devices"),
    "microbatch": (["--config.accum_steps=16"], "is not divisible by the 8 devices"),
    "mesh": (["--config.mesh.data=3"], "= 3 devices, but there are 8"),
    "tensor": (["--config.mesh.tensor=8"], "does not divide the model's num_heads=4"),
    "classes": (["--config.model.num_classes=3"], "num_classes=3 is less than the 10 classes"),
    "examples": (["--config.data.num_examples=7"], "num_examples=7, but digits train has 1077"),
    "length": (["--config.total_steps=0"], "total_steps and total_epochs are both 0"),
    "short": (["--config.total_epochs=0.01"], "less than one batch"),
    "variant": (["--config.model.variant=Q/4"], "unknown variant 'Q/4'"),
    "init_from": (["--config.init_from=/no/weights.npz"], "/no/weights.npz does not exist"),
    "small image": (["--config.image_size=2"], "smaller than one patch"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_line(case, tiny, tmp_path, capsys, monkeypatch):
    import re

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    arguments, message = BAD[case]
    extra = [] if case != "unprepared TFDS" else [f"--config.data.data_dir={tmp_path}/tfds"]
    assert run(tiny, tmp_path / "run", *arguments, *extra) == 2
    assert re.search(message, last_error(capsys))
    assert not (tmp_path / "run/config.json").exists(), "nothing half-written"


def test_an_empty_class_folder_is_named(tiny, tmp_path, capsys):
    name = failing_folder(tmp_path)
    assert run(tiny, tmp_path / "run", f"--config.data.name=folder:{name}") == 2
    assert f"class folder {name}/train/dog has no images" in last_error(capsys)


def test_weights_of_another_architecture_are_refused(done, tiny, tmp_path, capsys):
    _, workdir = done
    assert run(tiny, tmp_path / "a", f"--config.init_from={workdir}", "--config.model.depth=3") == 2
    assert "the weights lack Transformer/encoderblock_2" in last_error(capsys)
    assert (
        run(tiny, tmp_path / "b", f"--config.init_from={workdir}", "--config.model.mlp_dim=128")
        == 2
    )
    assert "is (64,), but the model has (128,)" in last_error(capsys)


@pytest.mark.slow
def test_a_corrupt_image_is_fatal_with_its_path_or_skipped_and_counted(tiny, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(
                tmp_path / f"data/{name}/{i}.png"
            )
    bad = tmp_path / "data/dog/3.png"
    bad.write_bytes(bad.read_bytes()[:60])
    arguments = [
        f"--config.data.name=folder:{tmp_path}/data",
        "--config.data.batch_size=8",
        "--config.total_steps=4",
    ]
    arguments += ["--config.evals.val.data.split=train[:50%]"]
    assert run(tiny, tmp_path / "a", *arguments) == 2
    line = last_error(capsys)
    assert str(bad) in line and "on_corrupt=skip" in line
    assert run(tiny, tmp_path / "b", *arguments, "--config.data.on_corrupt=skip") == 0
    assert metric_lines(tmp_path / "b")[-1]["data/skipped"] == 1
    assert (
        f"{bad} can't be read as an image and is skipped: " in (tmp_path / "b/log.txt").read_text()
    )


@pytest.mark.slow
def test_skipped_examples_are_listed_once_and_counted_on_after_a_stop(tiny, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(
                tmp_path / f"data/{name}/{i}.png"
            )
    bad = [tmp_path / "data/dog/3.png", tmp_path / "data/cat/0.png"]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(bad[1].read_bytes()[:60])
    arguments = [
        f"--config.data.name=folder:{tmp_path}/data",
        "--config.data.batch_size=8",
        "--config.total_steps=8",
    ]
    arguments += ["--config.evals.val.data.split=train[:50%]", "--config.data.on_corrupt=skip"]
    assert run(tiny, tmp_path / "run", *arguments) == 0
    listed = [
        json.loads(line) for line in (tmp_path / "run/skipped.jsonl").read_text().splitlines()
    ]
    assert sorted(line["name"] for line in listed if line["use"] == "train") == sorted(
        map(str, bad)
    )
    assert {line["use"] for line in listed} == {"train", "evals.val"}
    lines = len(listed)
    assert all(line["reason"] and isinstance(line["id"], int) for line in listed)
    shutil.rmtree(tmp_path / "run/checkpoints/8")
    assert run(tiny, tmp_path / "run", *arguments) == 0
    assert len((tmp_path / "run/skipped.jsonl").read_text().splitlines()) == lines
    assert [line["data/skipped"] for line in metric_lines(tmp_path / "run")][4:] == [2] * 4


def test_a_workdir_that_cannot_be_written_is_named(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert run(tiny, tmp_path / "file/run") == 2
    assert "can't be written" in last_error(capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("\udcff", r"\xff is a name that is not in UTF-8"),
        ("a[1]/run", "has the character ["),
        ("file", "is a file or a broken link"),
        ("broken", "is a file or a broken link"),
        ("loop", "is a file or a broken link"),
        ("n" * 300, "a name is too long for the file system"),
    ],
)
def test_a_workdir_whose_name_does_not_do_is_refused(tiny, tmp_path, capsys, name, message):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert run(tiny, tmp_path / name) == 2
    assert message in last_error(capsys)


@pytest.mark.parametrize("name", ["log.txt", "skipped.jsonl", "metrics.jsonl", "left_out.json"])
def test_a_folder_in_the_place_of_a_file_is_named_before_training(tiny, tmp_path, capsys, name):
    path = tmp_path / "run" / name
    path.mkdir(parents=True)
    assert run(tiny, tmp_path / "run") == 2
    assert f"a folder is in the place of a file: {path}" in last_error(capsys)


def test_too_few_open_files_are_told_at_the_start(tiny, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        assert run(tiny, tmp_path / "run") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "may open 100 files, fewer than the 256" in last_error(capsys)
    assert not (tmp_path / "run").exists()


def test_a_wrong_command_line_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--workdir=x"])
    assert stop.value.code == 2 and "required: --config" in last_error(capsys)


def test_a_store_that_cannot_be_reached_is_named(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path / "run", "--config.init_from=nowhere://bucket/weights.npz") == 2
    assert "nowhere://bucket/weights.npz" in last_error(capsys)


def test_a_missing_workdir_argument_is_named(tiny, capsys):
    assert train.main([f"--config={tiny}"]) == 2
    assert "--workdir is missing" in last_error(capsys)


@pytest.mark.slow
def test_a_non_finite_loss_ends_the_run_and_keeps_the_checkpoints(tiny, tmp_path, capsys):
    arguments = [
        "--config.optim.name=sgd",
        "--config.optim.lr=1e6",
        "--config.optim.grad_clip_norm=0",
    ]
    arguments += [
        "--config.optim.warmup_steps=0",
        "--config.checkpoint.every=1",
        "--config.checkpoint.keep_last=20",
    ]
    assert run(tiny, tmp_path / "run", *arguments) == 1
    line = last_error(capsys)
    assert "not finite in 10 updates in a row, from step 3 on" in line and "lower optim.lr" in line
    report = json.loads((tmp_path / "run/nonfinite.json").read_text())
    assert list(report["example_ids"]) == [str(step) for step in range(3, 13)]
    assert all(np.isfinite(value).all() for value in final_params(tmp_path / "run").values())


@pytest.mark.slow
def test_paths_may_be_relative(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(tiny, "run", "--config.total_steps=4") == 0
    model, _ = vit_jax.from_pretrained("run")
    assert model.width == 32
    assert str(checkpoint.absolute("gs://bucket/run")) == "gs://bucket/run"


def class_folder(root: pathlib.Path, names: list[str]) -> str:
    """Images of one colour by class name, the same whichever classes are there."""
    colours = dict(cat=(250, 0, 0), dog=(0, 250, 0), eel=(0, 0, 250))
    rng = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(8):
            noise = rng.integers(0, 6, (9, 9, 3))
            Image.fromarray((noise + colours[name]).astype(np.uint8)).save(root / name / f"{i}.png")
    return f"folder:{root}"


@pytest.mark.slow
def test_classes_of_evaluation_data_are_matched_by_name_and_the_loss_is_that_of_training(
    tiny, tmp_path, capsys
):
    train_on = class_folder(tmp_path / "three", ["cat", "dog", "eel"])
    test_on = class_folder(tmp_path / "two", ["dog", "eel"])
    arguments = [
        f"--config.data.name={train_on}",
        "--config.data.batch_size=24",
        "--config.total_steps=40",
        "--config.checkpoint.every=0",
    ]
    arguments += [
        "--config.data.crop=resize",
        "--config.optim.lr=0.01",
        "--config.loss=sigmoid_xent",
    ]
    arguments += ["--config.evals.val.data.split=train", "--config.evals.val.every=0"]
    assert run(tiny, tmp_path / "run", *arguments) == 0
    last = metric_lines(tmp_path / "run")[-1]
    assert last["eval/val/top1"] == 1.0
    config = ROOT / "configs/evaluate.py"
    for name, out in ((train_on, "three.json"), (test_on, "two.json")):
        arguments = [
            f"--config={config}:{name},train",
            f"--config.init_from={tmp_path}/run",
            f"--json={tmp_path}/{out}",
        ]
        assert evaluate.main(arguments) == 0
    three, two = (json.loads((tmp_path / out).read_text()) for out in ("three.json", "two.json"))
    assert three["eval/test/loss"] == pytest.approx(last["eval/val/loss"], rel=1e-4)
    assert (two["eval/test/top1"], two["eval/test/count"]) == (1.0, 16.0)
    (tmp_path / "two/dog").rename(tmp_path / "two/fox")
    assert (
        evaluate.main([f"--config={config}:{test_on},train", f"--config.init_from={tmp_path}/run"])
        == 2
    )
    assert "evals.test has the class 'fox', which the model does not have" in last_error(capsys)


def test_evaluate_refuses_what_would_have_no_effect(done, tmp_path, capsys):
    _, workdir = done
    config = ROOT / "configs/evaluate.py"
    arguments = [f"--config={config}:digits,val", f"--config.init_from={workdir}"]
    assert evaluate.main([*arguments, "--config.model.pool=map"]) == 2
    assert "model.pool has no effect in evaluate" in last_error(capsys)
    assert evaluate.main([*arguments, f"--json={tmp_path}/no/out.json"]) == 2
    assert "the folder of --json=" in last_error(capsys)


@pytest.mark.parametrize("text", ["[]", '{"config": 3}', "{", "\x00"])
def test_a_damaged_config_json_is_named(text, tiny, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(text)
    assert run(tiny, tmp_path / "run") == 2
    assert "config.json can't be read" in last_error(capsys)


def test_without_config_json_that_of_the_checkpoint_counts(done, tmp_path, capsys):
    tiny, workdir = done
    shutil.copytree(workdir, tmp_path / "run")
    (tmp_path / "run/config.json").unlink()
    assert run(tiny, tmp_path / "run", "--config.optim.lr=0.5", "--config.seed=7") == 2
    text = last_error(capsys)
    assert "has a run of another config (optim.lr: 0.001 -> 0.5; seed: 0 -> 7)" in text
    assert "branch_from" not in text
    assert run(tiny, tmp_path / "run", "--config.total_steps=20") == 2
    branch = f"--config.branch_from={tmp_path}/run/checkpoints/12"
    assert f"to train longer, add {branch} to the other --workdir" in last_error(capsys)
    assert run(tiny, tmp_path / "run") == 0
    assert (tmp_path / "run/config.json").exists()


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"model": {"width": 0}, "class_names": [], "config": {}}']
)
def test_damaged_facts_of_a_checkpoint_are_named(text, done, tmp_path):
    from vit_jax.errors import UserError

    _, workdir = done
    shutil.copytree(workdir / "checkpoints/12", tmp_path / "12")
    (tmp_path / "12/meta/metadata").write_text(text)
    with pytest.raises(UserError, match="12/meta"):
        vit_jax.from_pretrained(tmp_path / "12")


def test_a_workdir_that_could_not_be_read_back_is_refused(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path / "run[1]") == 2
    assert "can't be read back" in last_error(capsys)


def test_dry_run_needs_no_devices(capsys):
    recipe = ROOT / "configs/pretrain.py:B/16,imagenet2012"
    assert (
        train.main(
            [f"--config={recipe}", "--dry_run", "--config.mesh.fsdp=64", "--config.mesh.data=4"]
        )
        == 0
    )
    assert "'fsdp'" in capsys.readouterr().out
    assert train.main([f"--config={recipe}", "--dry_run", "--config.mesh.fsdp=3"]) == 2
    assert "not divisible by the 3 devices" in last_error(capsys)
