"""Waits that take long say so, hear SIGTERM, and end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, metric_lines

from vit_jax.distributed import waits
from vit_jax.errors import Unavailable


def test_a_wait_returns_what_comes_and_raises_what_fails():
    assert waits.call("the sum", sum, [1, 2]) == 3
    assert list(waits.each("numbers", range(3))) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        waits.call("a number", lambda: 1 / 0)
    assert waits.ongoing.current is None


def test_a_wait_ends_on_request_or_after_a_time(monkeypatch):
    for_ever = threading.Event()
    monkeypatch.setattr(waits.ongoing, "was_abandoned", False)
    with pytest.raises(waits.Interrupted):
        waits.call("rain", for_ever.wait, should_stop=lambda: True)
    monkeypatch.setenv("VIT_JAX_STALL_TIMEOUT", "1")
    with pytest.raises(
        Unavailable, match=r"waiting for rain after .*VIT_JAX_STALL_TIMEOUT=SECONDS"
    ):
        waits.call("rain", for_ever.wait)
    assert waits.ongoing.was_abandoned
    for_ever.set()


def test_a_long_wait_says_what_and_since_when_ever_less_often(monkeypatch):
    spoken = []
    clock = itertools.count(0, 5)
    now = next(clock)
    monkeypatch.setattr(waits.time, "monotonic", lambda: now)
    monkeypatch.setattr(
        waits.log, "warning", lambda text, *values: spoken.append((now, text % values))
    )
    with waits.waiting("a batch of cifar10") as wait:
        for now in itertools.islice(clock, 32):  # noqa: B007 - the clock
            wait.speak()
    waited = [at for at, text in spoken if text.startswith("waiting for a batch of")]
    assert waited == [20, 40, 80, 160]
    assert spoken[0][1].endswith(f"since {wait.begun_at}, for 20 s; the run gives up after 2400 s")


# The batches after that of STEP never come: the thread that reads them waits for ever.
STALLED = """
import sys, time
from vit_jax.data import pipeline
from vit_jax.distributed import waits
from vit_jax.train.__main__ import main

waits.SPEAK_S = 1
step = int(sys.argv.pop(1))
batches = pipeline.Pipeline.batches

def stalled(self, start=0):
    for number, batch in enumerate(batches(self, start), start + 1):
        if number > step and self.steps == 12:
            print("no more batches", file=sys.stderr, flush=True)
            time.sleep(3600)
        yield batch

pipeline.Pipeline.batches = stalled
sys.exit(main(sys.argv[1:]))
"""


def start(step: int, config: str, workdir, **environment) -> subprocess.Popen:
    words = [f"--config={config}", f"--workdir={workdir}", "--config.data.prefetch=1"]
    return subprocess.Popen(
        [sys.executable, "-c", STALLED, str(step), *words],
        cwd=ROOT,
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_run_without_data_says_so_hears_sigterm_and_gives_up(tiny, tmp_path):
    run = start(6, tiny, tmp_path / "run")
    assert "no more batches\n" in run.stderr  # a busy machine may wait for the first one, too
    said = next(line for line in run.stderr if "waiting for a batch of digits since" in line)
    assert "the run gives up after 2400 s" in said
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 75
    assert "stopped by SIGTERM at step 6: saved" in err
    assert (tmp_path / "run/checkpoints/6").exists()

    run = start(9, tiny, tmp_path / "run", VIT_JAX_STALL_TIMEOUT="2")
    _, err = run.communicate(timeout=120)
    assert run.returncode == 69
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: gave up waiting for a batch of digits after 2 s: ")

    run = start(12, tiny, tmp_path / "run")
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == list(range(1, 13))
    assert json.loads((tmp_path / "run/config.json").read_text())["config"]["total_steps"] == 12
