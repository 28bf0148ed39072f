"""Trials with Ctrl-C, SIGTERM and SIGHUP at any moment of the train command, once or twice."""

import pathlib
import random
import shutil
import signal
import subprocess
import time

from conftest import TINY, importing, metric_lines
from processes_at_hand import HANG_S, error_lines, expect
from test_train import final_params, same_bits
from trials_of_runs import wait_for_step, whole_command

from vit_jax.checkpoints import read as checkpoint

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


def signals(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """One line says what is saved, the exit code fits, and the same command continues: at the end
    all is as in an uninterrupted run.
    """
    (folder / "tiny.py").write_text(TINY)
    straight = whole_command(folder, "straight")
    expect(straight.communicate(timeout=HANG_S) and straight.returncode == 0, "it fails")
    run = folder / "run"
    saved = 0
    longest = 0.0
    for _ in range(count):
        steps = checkpoint.steps(run / "checkpoints")
        if steps and steps[-1] > 200:  # of 240
            shutil.rmtree(run)
        seconds, by_save = one_signal(rng, folder)
        longest = max(longest, seconds)
        saved += by_save
    job = whole_command(folder, "run")
    _, err = job.communicate(timeout=HANG_S)
    expect(job.returncode == 0, err[-600:])
    for key in ("step", "train/loss", "train/grad_norm"):
        one = [line[key] for line in metric_lines(folder / "straight")]
        two = [line[key] for line in metric_lines(run)]
        expect(one == two, f"{key} differs from the uninterrupted run")
    expect(same_bits(final_params(folder / "straight"), final_params(run)), "parameters differ")
    return dict(tried=count, saved=saved, longest_s=longest)


def one_signal(rng: random.Random, folder: pathlib.Path) -> tuple[float, bool]:
    """(seconds from the last signal to the end, whether the run was saved)."""
    run = folder / "run"
    number = rng.choice(list(NAMES))
    starts = (run / "log.txt").read_text().count("training from step") if run.exists() else 0
    steps = checkpoint.steps(run / "checkpoints")
    first = steps[-1] if steps else 0
    job = whole_command(folder, "run")
    in_loop = rng.random() < 0.6
    if in_loop:
        wait_for_step(job, run, first + rng.randrange(1, 15), starts + 1)
    else:
        wait_for_imports(job)
        time.sleep(rng.uniform(0, 3))
    job.send_signal(number)
    twice = rng.random() < 0.3
    if twice:
        time.sleep(rng.uniform(0, 0.02))
        job.send_signal(number)
    start = time.monotonic()
    _, err = job.communicate(timeout=60)
    seconds = time.monotonic() - start
    expect("Traceback" not in err, err[-2000:])
    check_end(job.returncode, number, twice, err, checkpoint.steps(run / "checkpoints"))
    return seconds, "saved, the same command continues" in err


def wait_for_imports(job: subprocess.Popen) -> None:
    """Until the package has taken over the signals."""
    status = pathlib.Path(f"/proc/{job.pid}/status")
    bit = 1 << (signal.SIGHUP - 1)
    while job.poll() is None:
        (caught,) = [line for line in status.read_text().splitlines() if "SigCgt" in line]
        if int(caught.split()[1], 16) & bit:
            return
        time.sleep(0.001)


def check_end(code: int, number: int, twice: bool, err: str, steps: list[int]) -> None:
    """The exit code and the line that ends a run after a signal."""
    last = err.strip().splitlines()[-1]
    where = f"continues from step {steps[-1]}" if steps else "begins again"
    name = NAMES[number]
    if f"stopped by {name} at step " in last:
        expect(code == 75 and last.endswith("saved, the same command continues"), (code, last))
        expect(steps[-1] == int(last.rpartition(" at step ")[2].split(":")[0]), (steps, last))
        return
    expect(len(error_lines(err)) == 1, err[-2000:])
    if f"ended by {name}" in last:
        expect(twice and code == 128 + number and where in last, (code, last, steps))
        return
    expect(f"stopped by {name}" in last, (code, last))
    expect(where in last or "run the same command again" in last, (last, steps))
    expect(code == (130 if number == signal.SIGINT else 75), (code, last))


COMMANDS = (
    "train",
    "finetune",
    "evaluate",
    "predict",
    "convert",
    "vtab",
    "data",
    "plan",
    "goodput",
)


def signals_in_imports(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Libraries that swallow exceptions while they are imported do not keep a command alive."""
    for number in range(count):
        where = rng.choice(("etils/__init__.py", "ml_collections.py"))
        job = importing(folder / f"libraries_{number}", where, rng.choice(COMMANDS))
        sent = rng.choice(list(NAMES))
        job.send_signal(sent)
        _, err = job.communicate(timeout=30)
        expect(err == f"error: stopped by {NAMES[sent]}: run the same command again\n", err)
        expect(job.returncode == (130 if sent == signal.SIGINT else 75), job.returncode)
    return dict(tried=count)
