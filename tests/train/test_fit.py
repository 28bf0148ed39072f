"""Runs from Python are those of the commands, and leave signals and the process alone."""

import concurrent.futures
import json
import logging
import pathlib
import signal

import jax
import pytest
from conftest import TINY, metric_lines
from etils import epath
from test_train import final_params, same_bits

import vit_jax
from vit_jax.checkpoints import read as checkpoint
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train
from vit_jax.train import loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(config file, workdir) of one run of the command."""
    folder = tmp_path_factory.mktemp("done")
    config = folder / "tiny.py"
    config.write_text(TINY)
    assert train.main([f"--config={config}", f"--workdir={folder}/run"]) == 0
    return str(config), folder / "run"


def test_fit_is_the_command_train(done, tmp_path):
    config, workdir = done
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    log = logging.getLogger("vit_jax")
    handlers = log.handlers[:]
    metrics = vit_jax.fit(config, tmp_path / "run")
    assert same_bits(final_params(tmp_path / "run"), final_params(workdir))
    assert metrics["step"] == 12 and metrics["train/lr"] == metric_lines(workdir)[-1]["train/lr"]
    for key in ("train/loss", "eval/val/top1"):
        assert metrics[key] == metric_lines(workdir)[-1][key]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert log.handlers == handlers
    again = vit_jax.fit(config, tmp_path / "run")  # it is done already
    assert again == metrics


def test_score_is_the_command_evaluate(done, tmp_path):
    _, workdir = done
    out = tmp_path / "out.json"
    arguments = ["--config=configs/evaluate.py:digits,val", f"--config.init_from={workdir}"]
    assert evaluate.main([*arguments, f"--json={out}"]) == 0
    overrides = {"init_from": str(workdir)}
    assert vit_jax.score("configs/evaluate.py:digits,val", overrides) == json.loads(out.read_text())
    with pytest.raises(UserError, match="init_from is empty"):
        vit_jax.score("configs/evaluate.py:digits,val")


def test_an_interrupted_cell_is_continued_with_the_same_bits(done, tmp_path, monkeypatch):
    config, workdir = done
    report = loop.Loop.report

    def interrupted(self, number, step_metrics):
        if number == 7:
            signal.raise_signal(signal.SIGINT)
        return report(self, number, step_metrics)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "report", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vit_jax.fit(config, tmp_path / "run")
    assert not (tmp_path / "run/lock.json").exists()
    assert checkpoint.steps(epath.Path(tmp_path / "run/checkpoints")) == [4]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # any thread may train
        pool.submit(vit_jax.fit, config, tmp_path / "run").result()
    assert same_bits(final_params(tmp_path / "run"), final_params(workdir))
    steps = [line["step"] for line in metric_lines(tmp_path / "run")]
    assert steps == list(range(1, 13))


def test_errors_are_raised_in_one_line(done, tmp_path, monkeypatch):
    config, workdir = done
    with pytest.raises(UserError, match=r"has a run of another config \(seed: 0 -> 1\)"):
        vit_jax.fit(config, workdir, {"seed": 1})
    pathlib.Path(tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file or a broken link"):
        vit_jax.fit(config, tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr(loop, "train", full)
    with pytest.raises(UserError, match="no space is left on the device: /disk/file: fix it"):
        vit_jax.fit(config, tmp_path / "run")

    def out_of_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(loop, "train", out_of_memory)
    with pytest.raises(NegativeResult, match="there is not enough memory"):
        vit_jax.fit(config, tmp_path / "run")

    def mistake_of_ours(*_):
        raise KeyError("x")

    monkeypatch.setattr(loop, "train", mistake_of_ours)
    with pytest.raises(KeyError):
        vit_jax.fit(config, tmp_path / "run")
