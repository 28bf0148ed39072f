"""Early stopping: when a run ends, that a stop in between changes nothing, and what it delivers."""

import json
import math
import signal
import types

import ml_collections
import pytest
from conftest import last_error, metric_lines

from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import KeepBest
from vit_jax.errors import UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate import classification, suite
from vit_jax.train import __main__ as train
from vit_jax.train.early_stopping import EarlyStopping

FLAGS = [
    "--config.early_stopping=2",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=1",
    "--config.checkpoint.keep_best=eval/val/top1",
    "--config.evals.val.every=0",
]
# By checkpoint, from step 2 on. The best is that of step 6: two others are not better, so the run
# ends at step 10 of 12.
TOP1 = [0.2, 0.1, 0.5, 0.5, 0.4, 0.9]


@pytest.mark.parametrize(
    "metric, scores, ends",
    [
        ("eval/val/top1", [0.2, 0.1, 0.5, 0.5, 0.4, 0.9], 10),  # as good is not better
        ("eval/val/loss", [0.5, 0.4, 0.6, 0.5, 0.1], 8),
        ("eval/val/top1", [0.1, 0.2, 0.3, 0.4], None),
        ("eval/val/loss", [math.nan, math.nan, math.nan], None),
        ("eval/val/loss", [math.nan, 0.5, math.nan, math.nan], 8),
    ],
)
def test_it_counts_the_checkpoints_since_the_best(metric, scores, ends):
    """Also if another process takes over in the middle, which knows the checkpoints only."""
    optional = dict(early_stopping=2, checkpoint=dict(every=2))
    config = ml_collections.ConfigDict(optional)
    experiment = types.SimpleNamespace(
        config=config, total_steps=13, model=types.SimpleNamespace(scan=False)
    )
    known = KeepBest(metric)
    for step, score in zip(range(2, 14, 2), scores, strict=False):
        stopping = EarlyStopping(experiment, types.SimpleNamespace(best=known))
        stopping.decide(step - 1)
        assert not stopping.over, step
        with pytest.raises(UserError, match=r"keep_best='eval/val/\w+' .*there are eval/val/x"):
            stopping.check({"eval/val/x": 1.0})
        stopping.check({"eval/test/x": 1.0})
        stopping.add(step, {metric: score, "eval/val/other": 0.5})
        if stopping.over:
            break
    assert (step if stopping.over else None) == ends
    assert [step for step in range(1, 14) if stopping.ranks(step)] == [2, 4, 6, 8, 10, 12, 13]


def run(tiny, workdir, *arguments) -> int:
    return train.main([f"--config={tiny}", f"--workdir={workdir}", *FLAGS, *arguments])


@pytest.fixture
def scores(monkeypatch):
    """Replaces the accuracies of evaluations; the list has those that are still to come."""
    left = list(TOP1)
    real = classification.evaluate

    def scored(eval_step, params, batches):
        return real(eval_step, params, batches) | dict(top1=left.pop(0))

    monkeypatch.setitem(suite.ON_BATCHES, "classification", scored)
    return left


@pytest.mark.slow
def test_the_run_ends_and_delivers_the_best(tiny, tmp_path, scores):
    assert run(tiny, tmp_path / "run") == 0
    lines = metric_lines(tmp_path / "run")
    since_best = {line["step"]: line.get("checkpoint/since_best") for line in lines}
    assert {step: count for step, count in since_best.items() if count is not None} == {
        **{2: 0, 4: 1, 6: 0, 8: 1, 10: 2}
    }
    assert lines[-1]["step"] == 10
    log = (tmp_path / "run/log.txt").read_text()
    assert "eval/val/top1 was best at step 6 and not better in the 2 checkpoints since" in log
    assert "done: 10 steps" in log
    assert checkpoint.steps(tmp_path / "run/checkpoints") == [6, 10]
    assert checkpoint.find(tmp_path / "run").name == "6"
    assert checkpoint.find(tmp_path / "run/checkpoints/10").name == "10"

    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert run(tiny, tmp_path / "run") == 0, "it is done: a second start does nothing"
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    scores[:] = [0.1]  # a branch goes on, and counts afresh
    branch = f"--config.branch_from={tmp_path / 'run/checkpoints/10'}"
    assert run(tiny, tmp_path / "branch", branch) == 0
    assert [line["step"] for line in metric_lines(tmp_path / "branch")] == [11, 12]


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [5, 6, 10])
def test_a_stop_in_between_changes_nothing(tiny, tmp_path, scores, monkeypatch, stop_at):
    real = train.loop.Loop.report

    def report(loop, number, step_metrics):
        if number == stop_at and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            signal.raise_signal(signal.SIGTERM)
        return real(loop, number, step_metrics)

    monkeypatch.setattr(train.loop.Loop, "report", report)
    first = run(tiny, tmp_path / "run")
    assert first == (0 if stop_at == 10 else 75)
    assert run(tiny, tmp_path / "run") == 0
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 11))
    found = [line["eval/val/top1"] for line in lines if "eval/val/top1" in line]
    assert found == TOP1[:5] and lines[-1]["checkpoint/since_best"] == 2
    assert checkpoint.find(tmp_path / "run").name == "6"


@pytest.mark.slow
def test_what_is_evaluated_at_the_end_is_the_best(tiny, tmp_path, capsys):
    """With a learning rate that ruins the model, the best checkpoint is the first."""
    text = (tmp_path / "tiny.py").read_text()
    extra = '    config.evals.end = dict(data=dict(split="test"))\n    return config'
    (tmp_path / "tiny.py").write_text(text.replace("    return config", extra))
    flags = ["--config.optim.lr=100.0", "--config.optim.schedule=constant"]
    flags += ["--config.checkpoint.keep_best=eval/val/loss", "--config.optim.warmup_steps=4"]
    assert run(tiny, tmp_path / "run", *flags) == 0
    lines = metric_lines(tmp_path / "run")
    losses = {line["step"]: line["eval/val/loss"] for line in lines if "eval/val/loss" in line}
    best = min(losses, key=losses.get)
    assert best < lines[-1]["step"] < 12
    assert [line["step"] for line in lines if "eval/end/loss" in line] == [lines[-1]["step"]]
    config = tmp_path / "evaluate.py"
    config.write_text(
        "def get_config():\n    return dict(image_size=0, data=dict(name='digits', batch_size=64), "
        "evals=dict(end=dict(data=dict(split='test'))))\n"
    )
    out = tmp_path / "end.json"
    init_from = f"--config.init_from={tmp_path / 'run'}"
    assert evaluate.main([f"--config={config}", init_from, f"--json={out}"]) == 0
    assert json.loads(out.read_text())["eval/end/loss"] == lines[-1]["eval/end/loss"]


@pytest.mark.parametrize("flag", ["--config.checkpoint.keep_best=", "--config.checkpoint.every=0"])
def test_it_needs_checkpoints_and_a_metric(tiny, tmp_path, capsys, flag):
    assert run(tiny, tmp_path / "run", flag) == 2
    assert "early_stopping=2 needs checkpoint.keep_best" in last_error(capsys)
