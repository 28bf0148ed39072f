"""The choice of the learning rate: on what is held out, kept, and followed by a run on everything."""

import json
import math
import types

import jax
import numpy as np
import pytest
from conftest import TINY, last_error, metric_lines
from PIL import Image
from sklearn.datasets import load_digits

from vit_jax import config as configs
from vit_jax import finetune, predict
from vit_jax.checkpoints import read as checkpoint
from vit_jax.data.sources import open as sources
from vit_jax.distributed.mesh import AXES
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import of_weights
from vit_jax.train import __main__ as train
from vit_jax.train.experiment import Experiment, total_bytes
from vit_jax.train.recipe import measure, mistakes, prepare, report
from vit_jax.weights import load as pretrained


def run(tiny, workdir, *arguments) -> int:
    return finetune.main(
        [f"--config={tiny}", f"--workdir={workdir}", "--config.total_steps=4", *arguments]
    )


@pytest.mark.slow
def test_the_best_learning_rate_trains_on_everything_and_what_was_tried_is_kept(
    tiny, tmp_path, monkeypatch, capsys
):
    real, tries, out = finetune.run, [], tmp_path / "found.json"

    def run_once(config, folder):
        tries.append(folder.name)
        if len(tries) == 2:
            raise KeyboardInterrupt
        return real(config, folder)

    monkeypatch.setattr(finetune, "run", run_once)
    # Without clipping by sgd, the highest is not finite.
    flags = [
        "--lrs=0.01,900000,0.000001",
        "--held_out=20%",
        f"--json={out}",
        "--config.optim.name=sgd",
    ]
    flags += [
        "--config.optim.grad_clip_norm=0.0",
        "--config.max_skipped=1",
        "--config.optim.warmup_steps=0",
    ]
    assert run(tiny, tmp_path / "run", *flags) == 130
    assert run(tiny, tmp_path / "run", *flags) == 0
    assert tries == ["lr_1e-06", "lr_0.01", "lr_0.01", "lr_900000", "final"]
    found = json.loads(out.read_text())
    tried = {float(lr): top1 for lr, top1 in found["tried"].items()}
    assert tried.keys() == {1e-6, 0.01, 9e5} and tried.pop(9e5) is None
    assert found["lr"] == max(tried, key=tried.get)
    for lr, top1 in tried.items():
        folder = tmp_path / f"run/lr_{lr:g}"
        config = json.loads((folder / "config.json").read_text())["config"]
        assert config["data"]["subset"] == "80%" and config["optim"]["lr"] == lr
        assert json.loads((folder / "goodput.json").read_text())["records"][-1]["last_step"] == 4
        last = metric_lines(folder)[-1]
        assert last["eval/held_out/top1"] == top1 and last["eval/held_out/count"] == 215
    final = checkpoint.read_meta(checkpoint.find(tmp_path / "run/final"))["config"]
    assert (final["optim"]["lr"], final["data"]["subset"]) == (found["lr"], "")
    assert found["final"]["eval/val/count"] == 360
    assert f"{found['lr']:g}, all of train" in capsys.readouterr().out
    final = tmp_path / "run/final/checkpoints"
    assert checkpoint.find(tmp_path / "run").parent == final
    assert pretrained.read(tmp_path / "run").fields["image_size"] == (8, 8)
    assert run(tiny, tmp_path / "run", *flags, "--config.mixup=0.5") == 2
    assert "another config" in last_error(capsys)
    assert (
        run(tiny, tmp_path / "run", *flags, "--config.evals.val.data.split=val[:50%]") == 0
    )  # not of the tries
    assert run(tiny, tmp_path / "run", *flags, "--config.evals.val.data.crop=central") == 2
    assert "another config" in last_error(capsys)
    (tmp_path / "run/finetune.json").write_text("{")
    worse = min(tried, key=tried.get)
    assert run(tiny, tmp_path / "run", f"--lrs={worse}", *flags[1:]) == 2
    assert (
        f"was trained with the learning rate {found['lr']:g}, but {worse:g} is better"
        in last_error(capsys)
    )


def test_a_result_that_is_not_finite_is_not_the_best():
    assert finetune.best({0.003: math.nan, 0.01: 0.4, 0.03: None}) == 0.01


def test_trials_go_on_with_what_changes_no_result(tmp_path):
    assert not finetune.matters("evals.held_out.data.batch_size")
    assert finetune.matters("evals.held_out.data.crop") and finetune.matters("optim.wd")
    path = tmp_path / "finetune.json"
    path.write_text(json.dumps(dict(about={"optim.wd": 0.1, "seed": 1}, tried={"0.1": 0.5})))
    now = {"optim.wd": 0.1, "seed": 1, "data.decode": "exact"}
    assert finetune.load_trials(path, now) == {"0.1": 0.5}
    with pytest.raises(UserError, match="another config"):
        finetune.load_trials(path, now | {"data.decode": "fast"})


def test_a_trial_run_without_a_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "run", lambda config, folder: {"train/loss": 1.0})
    with pytest.raises(UserError, match="lr_1 has no eval/held_out/top1: delete this folder"):
        finetune.run_trial(None, tmp_path / "lr_1", "eval/held_out/top1")


def test_no_learning_rate_may_be_left():
    with pytest.raises(NegativeResult, match="with any of the learning rates"):
        finetune.best({0.1: None})


MISTAKES = {
    "--lrs=a,b must be positive numbers": ["--lrs=a,b"],
    "--lrs=0.1,-1 must be": ["--lrs=0.1,-1"],
    "--held_out=200% must be above 0% and below 100%": ["--held_out=200%"],
    "--held_out=5 must be above 0% and below 100%": ["--held_out=5"],
    "data.subset is needed to hold a part of the data out": ["--config.data.subset=10%"],
    "has no classification": ["--config.evals.val.type=knn"],
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_are_one_line(tiny, tmp_path, capsys, says):
    assert run(tiny, tmp_path / "new", *MISTAKES[says]) == 2
    assert says in last_error(capsys)
    assert not (tmp_path / "new").exists()


def write_photos(folder, counts: dict[str, int]) -> str:
    """Digits as PNGs of several sizes, a folder for each class."""
    digits = load_digits()
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        numbers = np.flatnonzero(digits.target == int(name[-1]))[:count]
        for i in numbers.tolist():
            pixels = (digits.images[i] * 15.9).astype(np.uint8)
            image = Image.fromarray(pixels).resize((16 + i % 5, 24 - i % 7))
            image.save(folder / name / f"{i}.png")
    return str(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """A tiny model for images of 8 x 8 pixels, in a workdir of ours."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "tiny.py").write_text(TINY)
    flags = ["--config.total_steps=1", "--config.evals.val.every=0"]
    assert train.main([f"--config={folder}/tiny.py", f"--workdir={folder}/run", *flags]) == 0
    return f"{folder}/run"


@pytest.mark.slow
def test_a_folder_needs_no_config(tmp_path, weights, monkeypatch, capsys):
    """From photos to predictions; a second start makes the same choices without measuring."""
    monkeypatch.chdir(tmp_path)
    photos = write_photos(tmp_path / "my photos", {"digit 0": 24, "digit 1": 6, "digit 7": 9})
    flags = [photos, f"--init_from={weights}", "--config.total_epochs=8", "--lrs=0.01,0.03"]
    flags.append(f"--json={tmp_path}/out")
    assert finetune.main(flags) == 0
    out = capsys.readouterr()
    assert "39 images of 3 classes" in out.err and "measuring the step" in out.err
    assert "trial run 2 of 2: learning rate 0.03" in out.err
    assert "final run: learning rate" in out.err
    assert "61.5% of the training images are digit 0" in out.out
    assert "--init_from='my photos-finetuned'" in out.out
    assert "of 8 held-out images" in out.out
    folder = tmp_path / "my photos-finetuned"
    record = json.loads((folder / "config.json").read_text())
    assert record["config"]["data"]["class_balance"] == 0.5, "24 images of one class, 6 of another"
    assert record["config"]["image_size"] == 8 and record["lrs"] == [0.01, 0.03]
    rows = {what: (chosen, why) for what, chosen, why in record["rows"]}
    assert rows["held out"][0] == "8 of 39 images"
    assert rows["length"][0] == "16 steps = 8.26 epochs"
    assert rows["length"][1].startswith("set on the command line; ends if the held-out loss")
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == ["final", "lr_0.01", "lr_0.03"]
    found = json.loads((tmp_path / "out").read_text())
    lowest = min(found["tried"], key=found["tried"].get)
    assert float(lowest) == found["lr"], "the loss decides: only 8 images are held out"
    best = checkpoint.read_meta(checkpoint.find(folder))
    loss = best["metrics"]["eval/held_out/loss"]
    lines = metric_lines(folder / "final")
    assert loss == min(x["eval/held_out/loss"] for x in lines if "eval/held_out/loss" in x)
    assert found["final"]["eval/held_out/loss"] == loss
    assert found["final"]["eval/held_out/count"] == 8
    summary = json.loads((folder / "final/evals/held_out/summary.json").read_text())
    for name in ("top1", "loss", "count"):
        assert summary[name] == pytest.approx(found["final"][f"eval/held_out/{name}"], rel=1e-5)
    assert summary["step"] == int(checkpoint.find(folder).name), "the checkpoint that is delivered"
    assert summary["class_names"] == ["digit 0", "digit 1", "digit 7"]

    monkeypatch.setattr(prepare, "make", None)  # choices are read, not made
    assert finetune.main(flags) == 0
    assert json.loads((tmp_path / "out").read_text()) == found
    assert "as chosen before" in capsys.readouterr().err
    assert finetune.main([*flags, "--config.data.flip=False"]) == 2
    assert "--config.data.flip: (unset) -> False" in last_error(capsys)
    assert finetune.main([weights, *flags[1:], f"--workdir={folder}"]) == 2
    assert "has a fine-tuning of" in last_error(capsys)
    assert predict.main([f"--init_from={folder}", photos, "--out=classes.csv"]) == 0
    assert "digit 7" in (tmp_path / "classes.csv").read_text()


def test_a_fine_tuning_does_not_fail_if_its_mistakes_can_not_be_described(
    tiny, tmp_path, monkeypatch, caplog
):
    config = configs.load(tiny)
    found = mistakes.config_of(config, tmp_path)
    assert found.init_from == str(tmp_path) and list(found.evals) == ["val"]
    assert mistakes.describe(config, tmp_path) == []
    assert "can't be described" in caplog.text and "neither a checkpoint" in caplog.text
    scalars = {"eval/val/count": 31.0, "eval/val/top1": 29 / 31}
    monkeypatch.setattr(of_weights, "evaluate", lambda config, out: scalars)
    line = f"2 of 31 images of val, {tmp_path}/evals/val/mistakes.jpg"
    assert mistakes.describe(config, tmp_path) == [line]
    held_out = {f"eval/held_out/{key}": value for key, value in (("count", 8.0), ("top1", 1.0))}
    assert mistakes.line("held_out", held_out, tmp_path) == "none of 8 held-out images"


def test_a_model_that_only_guesses_is_named():
    largest = ("cups", 0.48)
    good = {"eval/held_out/top1": 0.75, "eval/held_out/count": 100}  # 66 to 82 %
    line = "48.0% of the training images are cups"
    assert report.against_one_answer(good, largest) == line
    few = good | {"eval/held_out/count": 8}  # 41 to 93 %
    assert report.against_one_answer(few, largest).startswith(
        f"{line}, and the model is not clearly"
    )
    assert report.against_one_answer({"eval/test/top1": 0.75}, largest) == ""
    assert report.against_one_answer(good, ("", 0.0)) == ""


FOLDER_MISTAKES = {
    "--init_from is missing": ["photos"],
    "there is nothing to fine-tune on": [],
    "is neither a folder of images": ["./nothing", "--init_from=x"],
    "images of one class only (digit 0)": ["photos", "--init_from=x"],
    "--workdir=photos/run is inside": ["photos", "--init_from=x", "--workdir=photos/run"],
    "--workdir=photos is inside the folder of images photos": [
        "--config=configs/finetune.py:B/16,folder:photos",
        "--init_from=x",
        "--workdir=photos",
    ],
    "--held_out=0% must be above": ["photos", "--init_from=x", "--held_out=0%"],
    "data.subset is needed to hold": ["photos", "--init_from=x", "--config.data.subset=10%"],
    "config key optim.learning is unknown": [
        "photos",
        "--init_from=x",
        "--config.optim.learning=1",
    ],
}


@pytest.mark.parametrize("says", FOLDER_MISTAKES)
def test_mistakes_with_a_folder_are_one_line_and_write_nothing(tmp_path, monkeypatch, capsys, says):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", {"digit 0": 3})
    assert finetune.main(FOLDER_MISTAKES[says]) == 2
    assert says in last_error(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_microbatches_make_a_step_fit_the_memory(tiny):
    config = configs.load(tiny, ["--config.data.batch_size=4096", "--config.model.depth=1"])
    source = sources.open_training(config.data)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1, 1), AXES)

    def compiled(limit: int | None):
        step, experiment, _ = measure.compile_to_fit(config, source, {}, limit, mesh)
        return experiment.config.accum_steps, total_bytes(step)

    with jax.set_mesh(mesh):
        accum_steps, most = compiled(None)
        assert accum_steps == 1
        accum_steps, less = compiled(most - 1)
        assert accum_steps == 2 and less < most


def test_what_does_not_fit_with_one_image_at_a_time(tiny):
    config = configs.load(tiny, ["--config.data.batch_size=1", "--config.model.depth=1"])
    source = sources.open_training(config.data)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1, 1), AXES)
    with jax.set_mesh(mesh), pytest.raises(NegativeResult, match="one image at a time does not"):
        measure.compile_to_fit(config, source, {}, 1000, mesh)


def test_frozen_parameters_have_no_backward_pass(tiny):
    """The head alone takes a third of the FLOPs, those of the forward pass."""
    flops = {}
    for pattern in ("", "(?!head).*"):
        config = configs.load(tiny, [f"--config.optim.frozen={pattern}"])
        experiment = Experiment.on_devices(config, jax.devices()[:1])
        with jax.set_mesh(experiment.mesh):
            lowered = experiment.train_step.lower(
                experiment.abstract_state, experiment.abstract_batch
            )
        flops[pattern] = lowered.compile().cost_analysis()["flops"]
    assert flops["(?!head).*"] < 0.45 * flops[""]


def test_only_process_0_reports(tmp_path, monkeypatch, capsys):
    args = types.SimpleNamespace(json=str(tmp_path / "out"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    finetune.end(args, tmp_path, report.Outcome({}, "", 0.1, {}, "all"))
    assert capsys.readouterr().out == "" and not (tmp_path / "out").exists()
