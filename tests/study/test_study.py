"""Studies: what their runs are, what they cost, and what is made of workdirs."""

import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, TINY, last_error
from report.workdirs import START, make_lines, make_run
from scipy import stats

from vit_jax import config as configs
from vit_jax.errors import NegativeResult, UserError
from vit_jax.study import __main__ as study
from vit_jax.study import cost, definition, devices, execution, outcome, results

STUDY = """
def get_config(arg=""):
    sizes = {str(size): [f"data.split=train[:{size}]"] for size in (100, 1000)}
    return dict(
        title="Sizes",
        recipe="RECIPE",
        axes=dict(
            width={"narrow": ["model.width=32"], "wide": ["model.width=64"]},
            images=sizes,
            seed={seed: [f"seed={seed}"] for seed in "012"},
        ),
        overrides=["total_steps=12"],
        figure=dict(x="images", line="width", over="seed", metric="eval/val/top1"),
    )
"""


@pytest.fixture
def sizes(tmp_path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    path = tmp_path / "sizes.py"
    path.write_text(STUDY.replace("RECIPE", str(tmp_path / "tiny.py")))
    return str(path)


def test_every_combination_is_a_run(sizes):
    runs = definition.read(sizes).runs
    assert len(runs) == 12 and len({run.name for run in runs}) == 12
    assert runs[4].name == "narrow_1000_1"
    config = runs[4].config()
    assert (config.model.width, config.data.split, config.seed) == (32, "train[:1000]", 1)
    assert all(run.config().total_steps == 12 for run in runs)


def test_a_value_may_have_another_recipe(tmp_path):
    path = tmp_path / "table8.py"
    path.write_text(
        "def get_config():\n"
        '    other = ["recipe=configs/pretrain.py:R50+L/32,jft300m", "total_epochs=3"]\n'
        '    axes = dict(model={"B/16": [], "R50+L/32": other})\n'
        '    return dict(recipe="configs/pretrain.py:B/16,jft300m", axes=axes)\n'
    )
    runs = definition.read(str(path)).runs
    assert [run.name for run in runs] == ["B-16", "R50+L-32"]
    loaded = [run.config() for run in runs]
    assert [config.model.variant for config in loaded] == ["B/16", "R50+L/32"]
    assert [(config.total_epochs, config.optim.lr) for config in loaded] == [(7, 8e-4), (3, 2e-4)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("axes=dict(", "axis=dict("), "it has axis instead of axes"),
        (('"seed={seed}"', '"seed"'), "write a list of KEY=VALUE"),
        (('["model.width=32"]', '"model.width=32"'), "write a list of KEY=VALUE"),
        (("images=sizes", "images=list(sizes)"), "write a dict of dicts"),
        (('title="Sizes"', "title=1 / 0"), "get_config fails: ZeroDivisionError"),
        (('x="images"', 'x="size"'), "names size, which is no axis"),
        (('line="width"', 'line="exaFLOPs"'), "names exaFLOPs, which is no axis"),
        (('metric="eval', 'metrics="eval'), "it needs x and metric"),
        (('over="seed"', 'over="seed", groups=["wide"]'), "write a dict of lists"),
        (
            ('over="seed"', 'over="seed", groups={"all": ["broad"]}'),
            "have broad, which is no value",
        ),
        (('over="seed", ', ""), "does not say what the axis seed is"),
        (("val/top1", "va/top1"), "'eval/va/top1' of the figure is not a metric of evals"),
        (("tiny.py", "none.py"), "none.py does not exist"),
        (("model.width=64", "model.widht=64"), "wide_100_0 of the study: config key model.widht"),
        (('"wide"', '"narr ow"'), "two runs with the name narr-ow_100_0"),
        (('"wide"', '"Narrow"'), "two runs with the name narrow_100_0"),
        (("def get_config", "def config"), "has no function get_config"),
    ],
)
def test_faults_of_a_study(sizes, tmp_path, capsys, change, text):
    path = tmp_path / "sizes.py"
    path.write_text(path.read_text().replace(*change))
    if "narr-ow" in text:
        path.write_text(path.read_text().replace('"narrow"', '"narr-ow"'))
    assert study.main([f"--config={sizes}", f"--workdir={tmp_path / 'w'}"]) == 2
    assert text in last_error(capsys)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--part=0/2", "--part=0/2 is not a part"),
        ("--part=3/2", "--part=3/2 is not a part"),
        ("--jobs=0", "--jobs=0 is too few"),
        ("--jobs=4096", "--jobs=4096 does not fit"),
        ("--workdir=gs://bucket/study", "is not a local folder"),
        ("--topology=v5e:8x8", "add --dry_run"),
    ],
)
def test_faults_of_the_command(sizes, tmp_path, capsys, flag, text):
    assert study.main([f"--config={sizes}", f"--workdir={tmp_path / 'w'}", flag]) == 2
    assert text in last_error(capsys)


def test_parts_share_all_runs(sizes):
    runs = definition.read(sizes).runs
    parts = [study.chosen(runs, f"{i}/5") for i in range(1, 6)]
    assert sorted(run.name for part in parts for run in part) == sorted(run.name for run in runs)


def test_dry_run_counts_flops(sizes, tmp_path, capsys):
    out = tmp_path / "cost.json"
    assert study.main([f"--config={sizes}", "--dry_run", f"--json={out}"]) == 0
    found = json.loads(out.read_text())
    model = definition.read(sizes).runs[0].config()
    from vit_jax.train.experiment import Experiment

    flops = Experiment.declared(model).objective.train_flops
    assert found["runs"][0]["exaflops"] == pytest.approx(flops * 64 * 12 / 1e18)
    assert found["exaflops"] == pytest.approx(sum(run["exaflops"] for run in found["runs"]))
    assert "12 runs" in capsys.readouterr().out


def test_chip_days_by_plan(sizes, tmp_path, monkeypatch, capsys):
    """Each program is compiled once, and what does not fit is said and not in the sum."""
    compiled = []

    def plan(options: list[str]) -> dict:
        compiled.append(options)
        fits = "--config.model.width=32" in options
        return dict(fits=fits, num_chips=64, step_ms=dict(low=100.0, high=200.0) if fits else {})

    monkeypatch.setattr(cost.pods_page, "plan", plan)
    out = tmp_path / "cost.json"
    command = [f"--config={sizes}", "--dry_run", "--topology=v5e:8x8", f"--json={out}"]
    assert study.main(command) == 0
    assert len(compiled) == 2 and all("--topology=v5e:8x8" in options for options in compiled)
    days = [run["chip_days"] for run in json.loads(out.read_text())["runs"]]
    low = 64 * 0.1 * 12 / 86_400
    assert days == 6 * [pytest.approx([low, 2 * low])] + 6 * [None]
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "6 runs do not fit on v5e:8x8" in printed
    assert f"{6 * low:.3g} to {12 * low:.3g} chip days" in printed


# --- devices ---


def test_parts_of_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(devices, "own_cores", lambda: list(range(8)))
    monkeypatch.setattr(devices, "tpu_chips", lambda: [])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = devices.parts(3)
    assert [part.cores for part in found] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    visible = [part.environment["CUDA_VISIBLE_DEVICES"] for part in found]
    assert visible == ["4", "5", "6,7"]
    assert devices.parts(1) == [devices.Part()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not devices.nvidia_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not devices.nvidia_gpus()


def test_a_chip_for_each_run(monkeypatch):
    monkeypatch.setattr(devices, "tpu_chips", lambda: ["0", "1"])
    monkeypatch.setattr(devices, "own_cores", lambda: [0, 1])
    found = devices.parts(2)
    assert [part.environment["TPU_VISIBLE_CHIPS"] for part in found] == ["0", "1"]


# --- outcomes ---


def lines_with(top1: float) -> list[dict]:
    lines = make_lines(24, every=1)
    for line in lines:
        line |= {"eval/val/top1": top1} if "eval/val/top1" in line else {}
    return lines[:12]


@pytest.fixture
def finished(sizes, tmp_path):
    """A study of which all runs but one are done; narrow models have 50, 51, 52 %."""
    runs = definition.read(sizes).runs
    folder = tmp_path / "w"
    for run in runs[:-1]:
        top1 = 0.5 + 0.01 * int(run.point["seed"]) + 0.2 * (run.point["width"] == "wide")
        record = dict(sizes=dict(total_steps=12, batch_size=64, num_examples=100))
        record["sizes"]["train_flops_per_image"] = 2e6
        made = make_run(folder / "runs" / run.name, run.config(), lines_with(top1), **record)
        shutil.rmtree(f"{made}/checkpoints")
        start = dict(records=[START | dict(last_step=12)])
        pathlib.Path(made, "goodput.json").write_text(json.dumps(start))
    return definition.read(sizes), folder


def test_results_have_means_and_intervals(finished, tmp_path):
    found, folder = finished
    outcomes = study.outcomes_of(folder, found)
    assert [one.status for one in outcomes] == ["done"] * 11 + ["waiting"]
    assert outcomes[0].exaflops == pytest.approx(64 * 12 * 2e6 / 1e18)
    assert (outcomes[0].images, outcomes[0].epochs) == (768, 7.68)
    written = results.write(found, outcomes, folder)
    assert json.loads((folder / "results.json").read_text()) == written
    half = 100 * stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    page = (folder / "results.md").read_text()
    assert f"| 100 | 51.0 ± {half:.1f} (3) | 71.0 ± {half:.1f} (3) |" in page
    assert "71.0" not in page.split("| 1000 |")[1].split("\n")[0] and "70.5 ± " in page
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_against_compute_with_groups(finished, sizes, tmp_path):
    """Means are over seeds, not over models of the same exaFLOPs."""
    _, folder = finished
    path = tmp_path / "sizes.py"
    groups = '{"all": ["narrow", "wide"], "narrow": ["narrow"]}'
    text = path.read_text().replace('x="images"', f'x="exaFLOPs", groups={groups}')
    path.write_text(text)
    found = definition.read(sizes)
    outcomes = study.outcomes_of(folder, found)
    half = 100 * stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    page = results.page(found, outcomes)
    assert "| run | all | narrow |" in page
    assert f"| narrow, 100 | 51.0 ± {half:.1f} (3) | 51.0 ± {half:.1f} (3) |" in page
    assert f"| wide, 100 | 71.0 ± {half:.1f} (3) |  |" in page
    places = results.positions(found, outcomes)
    assert set(places) == {"narrow, 100", "narrow, 1000", "wide, 100", "wide, 1000"}
    np.testing.assert_allclose(list(places.values()), outcomes[0].exaflops, rtol=1e-12)


BEST = TINY.replace("every=4", 'every=4, keep_best="eval/val/top1"')


def test_the_best_checkpoint_counts_if_they_are_ranked(sizes, tmp_path):
    """Step 7 is better, but has no checkpoint."""
    (tmp_path / "tiny.py").write_text(BEST)
    run = definition.read(sizes).runs[0]
    lines = lines_with(0.5)
    lines[3]["eval/val/top1"] = 0.9
    lines[6]["eval/val/top1"] = 0.95
    make_run(tmp_path / "w/runs" / run.name, run.config(), lines)
    found = outcome.read(tmp_path / "w", run)
    assert (found.step, found.metrics["eval/val/top1"]) == (4, 0.9)
    assert found.metrics["train/loss"] == lines[3]["train/loss"]


def test_an_evaluation_at_the_end_only(sizes, tmp_path):
    """With early stopping it is one of the best checkpoint."""
    late = 'config.evals.test = dict(data=dict(split="val"))'
    text = BEST.replace("    return config", f"    {late}\n    return config")
    (tmp_path / "tiny.py").write_text(text)
    path = tmp_path / "sizes.py"
    path.write_text(path.read_text().replace('=12"', '=12", "early_stopping=3"'))
    run = definition.read(sizes).runs[0]
    lines = lines_with(0.5)
    lines[3]["eval/val/top1"] = 0.9
    lines[-1]["eval/test/top1"] = 0.8
    make_run(tmp_path / "w/runs" / run.name, run.config(), lines)
    found = outcome.read(tmp_path / "w", run)
    assert found.step == 4 and found.metrics["eval/test/top1"] == 0.8


@pytest.mark.parametrize(("failure", "status"), [("", "stopped"), ("no space", "failed")])
def test_a_run_that_ended_in_its_last_evaluation_is_not_done(finished, failure, status):
    """All updates are done, as goodput.json says, but their line was not written."""
    found, folder = finished
    run = found.runs[0]
    path = folder / "runs" / run.name / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    if failure:
        (folder / "failed").mkdir()
        (folder / "failed" / f"{run.name}.txt").write_text(failure)
    seen = outcome.read(folder, run)
    assert (seen.status, seen.problem) == (status, failure)
    with pytest.raises(NegativeResult, match=failure or "are not done"):
        study.check_end([seen], folder)


def test_evaluations_that_were_made_up_complete_a_run(finished):
    """Their line has nothing of training."""
    found, folder = finished
    path = folder / "runs" / found.runs[0].name / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    made_up = {key: value for key, value in json.loads(last).items() if "train/" not in key}
    path.write_text("\n".join([*lines, json.dumps(made_up)]) + "\n")
    assert outcome.read(folder, found.runs[0]).status == "done"


def test_what_is_not_known_is_null(finished, tmp_path):
    found, folder = finished
    path = folder / "runs" / found.runs[0].name / "config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | dict(sizes=dict(total_steps=12, batch_size=64))))
    seen = outcome.read(folder, found.runs[0])
    assert seen.to_json()["exaflops"] is None and seen.to_json()["images"] == 768
    assert "| done | 12 | 768 |  |  |" in results.runs_table([seen])


def test_damaged_metrics_are_told(finished):
    found, folder = finished
    path = folder / "runs" / found.runs[0].name / "metrics.jsonl"
    path.write_text("damaged\n" + path.read_text())
    assert "has damaged lines: 1" in outcome.read(folder, found.runs[0]).problem


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('error: no data'); exit(2)", "no data"),
        ("exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, perhaps for lack of memory"),
    ],
)
def test_why_a_run_failed(sizes, tmp_path, code, problem):
    """The log has lines of an earlier start, too."""
    run = definition.read(sizes).runs[0]
    job = execution.Execution(tmp_path, [])
    log = job.log_of(run)
    log.write_text("step 50 of 100\n")
    with open(log, "ab") as file:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=file)
        process.wait()
    job.end(execution.Job(run, process, devices.Part(), log_start=15))
    assert outcome.failure_of(tmp_path, run) == problem


def test_runs_of_other_settings_are_told(finished, sizes, tmp_path, capsys):
    path = tmp_path / "sizes.py"
    path.write_text(path.read_text().replace("model.width=64", "model.width=128"))
    assert study.main([f"--config={sizes}", f"--workdir={tmp_path / 'w'}"]) == 2
    assert "wide_100_0 has a run with other settings (model.width" in last_error(capsys)
    assert configs.load(str(tmp_path / "tiny.py"), []).model.width == 32


@pytest.mark.parametrize(
    ("key", "is_other"),
    [("evals.val.data.split=test", True), ("evals.val.every=6", False), ("log_every=1", False)],
)
def test_another_evaluation_is_told(finished, sizes, tmp_path, key, is_other):
    path = tmp_path / "sizes.py"
    path.write_text(path.read_text().replace('"total_steps=12"', f'"total_steps=12", "{key}"'))
    run = definition.read(sizes).runs[0]
    problem = pytest.raises(UserError, match=key.partition("=")[0])
    with problem if is_other else contextlib.nullcontext():
        outcome.read(tmp_path / "w", run, "eval/val/top1")


def write_study(path, recipe: str, *overrides: str) -> definition.StudyRun:
    text = f"dict(recipe={recipe!r}, axes=dict(a=dict(b=[])), overrides={list(overrides)})"
    path.write_text(f"def get_config():\n    return {text}\n")
    return definition.read(str(path)).runs[0]


def test_what_an_objective_never_trains_is_no_other_setting(tmp_path):
    recipe = f"{ROOT}/configs/mae.py"
    run = write_study(tmp_path / "s.py", recipe)
    saved = outcome.declared(run.arguments)
    assert saved.optim.frozen and not run.config().optim.frozen
    make_run(tmp_path / "w/runs" / run.name, saved)
    assert outcome.read(tmp_path / "w", run).step
    run = write_study(tmp_path / "s.py", recipe, "optim.lr=0.5")
    with pytest.raises(UserError, match=r"settings \(optim.lr: [^;]*\): undo"):
        outcome.read(tmp_path / "w", run)


def test_what_a_model_has_from_its_weights_is_no_other_setting(tmp_path):
    recipe = f"{ROOT}/configs/finetune.py:B/16,cifar10"
    run = write_study(tmp_path / "s.py", recipe, "init_from=weights.npz")
    record = configs.to_json(run.config())
    open_keys = [key for key, value in record["model"].items() if value is None]
    assert "posemb" in open_keys
    record["model"] |= dict.fromkeys(open_keys, "of the weights")
    make_run(tmp_path / "w/runs" / run.name, run.config(), config=record)
    assert outcome.read(tmp_path / "w", run).step
    record["model"]["variant"] = "L/16"
    (tmp_path / "w/runs" / run.name / "config.json").write_text(json.dumps(dict(config=record)))
    with pytest.raises(UserError, match=r"model.variant"):
        outcome.read(tmp_path / "w", run)


# --- whole ---


@pytest.mark.slow
def test_a_study_survives_a_failure_and_a_kill_and_goes_on(tmp_path):
    """Two runs of four have less data than a batch; all are stopped once."""
    (tmp_path / "tiny.py").write_text(TINY)
    path = tmp_path / "s.py"
    text = STUDY.replace("RECIPE", str(tmp_path / "tiny.py")).replace('"012"', '"0"')
    text = text.replace('total_steps=12"', 'total_epochs=5", "total_steps=0"')
    path.write_text(text.replace("(100, 1000)", "(3, 1000)"))
    folder = tmp_path / "w"
    words = [f"--config={path}", f"--workdir={folder}", "--jobs=2"]
    command = [sys.executable, "-m", "vit_jax.study", *words]
    job = subprocess.Popen(command, start_new_session=True)
    while not list(folder.glob("runs/*/metrics.jsonl")):
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    assert job.wait() == 75
    assert not any("1000" in path.name for path in (folder / "failed").iterdir())
    job = subprocess.Popen(command)
    time.sleep(3)
    job.kill()
    job.wait()
    out = tmp_path / "found.json"
    assert study.main([*words, f"--json={out}"]) == 1
    found = {run["name"]: run for run in json.loads(out.read_text())["runs"]}
    for width in ("narrow", "wide"):
        assert found[f"{width}_1000_0"]["status"] == "done"
        assert found[f"{width}_1000_0"]["images"] == 78 * 64
        assert found[f"{width}_3_0"]["status"] == "failed"
        assert "less than one batch" in found[f"{width}_3_0"]["problem"]
    before = (folder / "runs/wide_1000_0/metrics.jsonl").read_bytes()
    assert study.main(words) == 1  # tries those again that failed, and nothing else
    assert (folder / "runs/wide_1000_0/metrics.jsonl").read_bytes() == before
