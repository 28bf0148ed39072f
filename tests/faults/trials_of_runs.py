"""Trials with kills, SIGTERM, dead processes, full disks and missing folders: after each, the run
must end as if nothing had happened.
"""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

from conftest import TINY, metric_lines
from processes_at_hand import (
    HANG_S,
    LIGHT,
    ROOT,
    LightJob,
    check,
    environment,
    error_lines,
    expect,
    server,
    truth,
)
from test_train import final_params, same_bits


def expect_start(job: LightJob, committed: list[int], text: str) -> None:
    """The run that was just started must continue from the newest committed step."""
    begin = job.since_start()[0]
    expect(
        begin["first"] == (committed or [0])[-1],
        f"steps {committed} are committed, but it starts from {begin['first']}",
    )
    expect("can't be used" not in text, text)


def kills(rng: random.Random, folder: pathlib.Path, count: int, inside: bool) -> dict:
    """Kills one run `count` times, then lets it end; with `inside`, it is killed during a save."""
    job = LightJob(folder / "run", every=5 if inside else 20)
    done = 0
    hits = 0  # kills during a save
    committed = []
    expected = truth(str(folder.parent), 1, job.steps)
    while done < count:
        job.start()
        is_running = job.wait_for_steps(1 if inside else rng.randrange(1, 25))
        if job.since_start():
            expect_start(job, committed, "")
        if inside and is_running:
            job.wait_for(job.is_saving)
        time.sleep(rng.uniform(0, 0.03 if inside else 0.3))
        server(0).kill()
        ((code, text),) = job.finish()
        expect(code in (0, -signal.SIGKILL), text)
        committed = job.committed()
        if code == 0:
            check(job, expected)
            shutil.rmtree(job.folder)
            committed = []
            continue
        done += 1
        hits += job.is_saving()
    job.start()
    ((code, text),) = job.finish()
    expect(code == 0, text)
    expect_start(job, committed, text)
    check(job, expected)
    return dict(tried=count, during_a_save=hits)


def preemptions(rng: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """SIGTERM to one process of several: all save the same step, exit with 75, and lose at most one
    step.
    """
    job = LightJob(folder / "run", processes, steps=400 * count + 40, every=10**6)
    expected = truth(str(folder.parent), processes, job.steps)
    longest = 0.0
    for _ in range(count):
        job.start()
        expect(job.wait_for_steps(rng.randrange(1, 30)), "it ended before it was stopped")
        last_step = job.lines(0)[-1]["step"]
        start = time.monotonic()
        server(rng.randrange(processes)).kill(signal.SIGTERM)
        ended = job.finish(timeout=30)
        longest = max(longest, time.monotonic() - start)
        expect([code for code, _ in ended] == [75] * processes, ended)
        ends = {job.lines(i)[-1]["last"] for i in range(processes)}
        expect(
            len(ends) == 1 and job.committed()[-1] in ends,
            f"stopped at {ends}, saved {job.committed()}",
        )
        lost = last_step - job.committed()[-1]
        expect(lost <= 1, f"step {last_step} was done, but {job.committed()} are saved")
    job.start()
    expect([code for code, _ in job.finish()] == [0] * processes, "it failed")
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def killed_peers(rng: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """One process is killed, without a launcher: the others end within a minute, and the next start
    continues from what is saved.
    """
    job = LightJob(folder / "run", processes, steps=30 * count + 30)
    expected = truth(str(folder.parent), processes, job.steps)
    longest = 0.0
    for _ in range(count):
        job.start()
        expect(job.wait_for_steps(rng.randrange(6, 20)), "it ended before it was killed")
        victim = rng.randrange(processes)
        start = time.monotonic()
        server(victim).kill()
        ended = job.finish(timeout=60)
        longest = max(longest, time.monotonic() - start)
        for i, (code, text) in enumerate(ended):
            expect(code == -signal.SIGKILL if i == victim else code != 0, (i, code, text[-500:]))
            if i != victim and victim != 0:  # if process 0 dies, JAX ends the others
                message = " ".join(error_lines(text))
                if not message:  # JAX's own message names the process on the next line
                    message = re.sub(r".*sending heartbeats.*\n", "process ", text)
                expect(f"process {victim}" in message and "Traceback" not in text, (i, text[:3000]))
        committed = job.committed()
    job.start()
    ended = job.finish()
    expect([code for code, _ in ended] == [0] * processes, ended)
    expect_start(job, committed, "")
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def launched_peers(rng: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """The same under the local launcher, which says which process it was."""
    job = LightJob(folder / "run", processes, steps=30 * count + 60)
    longest = 0.0
    expected = truth(str(folder.parent), processes, job.steps)
    arguments = json.dumps([str(job.folder), job.steps, job.every, job.pause])
    command = [sys.executable, "-m", "launch.local", f"--num_processes={processes}", "--devices=1"]
    command += ["--", sys.executable, str(LIGHT), arguments]
    for number in range(count + 1):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes)
        before = len(job.lines(0))
        start = time.monotonic()
        if number < count:
            while len(job.lines(0)) < before + rng.randrange(8, 20) and launcher.poll() is None:
                expect(time.monotonic() - start < HANG_S, "hung at the start")
                time.sleep(0.005)
            children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            start = time.monotonic()
            os.kill(int(rng.choice(children.read_text().split())), signal.SIGKILL)
        out, _ = launcher.communicate(timeout=HANG_S)
        if number < count:
            longest = max(longest, time.monotonic() - start)
            expect(
                launcher.returncode not in (0, 75) and "ended first, with exit code 137" in out,
                out[-900:],
            )
    expect(launcher.returncode == 0, out[-900:])
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def full_disks(rng: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """For a while no file of one process may be larger than some KiB, as if its disk were full:
    training goes on.
    """
    failures = 0
    for number in range(count):
        job = LightJob(folder / f"run_{number}", processes, 150, pause=0.01, more=(1000,))
        job.whole_end = processes == 1
        job.start()
        job.wait_for_steps(rng.randrange(1, 40))
        victim = server(rng.randrange(processes))
        limit = rng.randrange(20_000, 200_000)  # bytes
        if victim.is_running():
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        job.wait_for_steps(rng.randrange(60, 110))
        if victim.is_running():
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for code, text in job.finish():
            expect(code == 0 and "Traceback" not in text, text[-900:])
            failed = text.count("can't be saved (")
            expect(failed == job.lines(0)[-1]["failures"], text)
        check(job, truth(str(folder.parent), processes, job.steps))
        expect(job.committed()[-1] == job.steps, job.committed())
        failures += failed
    expect(failures, "no save failed: nothing was tested")
    return dict(tried=count, failed_saves=failures)


def lost_stores(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """The folder of the checkpoints is missing for a while, or for good."""
    failures = 0
    for number in range(count):
        for_good = number % 2 == 1
        max_failures = 3 if for_good else 1000
        job = LightJob(folder / f"run_{number}", steps=150, pause=0.01, more=(max_failures,))
        job.whole_end = True
        job.start()
        job.wait_for_steps(rng.randrange(8, 40))
        home = job.folder / "checkpoints"
        away = job.folder / "away"
        home.rename(away)
        home.write_text("")
        job.wait_for_steps(rng.randrange(60, 90))
        if not for_good:
            home.unlink()
            away.rename(home)
        ((code, text),) = job.finish()
        expect("Traceback" not in text, text[-900:])
        if for_good:
            expect(
                code == 2 and len(error_lines(text)) == 1 and "3 in a row" in error_lines(text)[0],
                (code, text),
            )
            home.unlink()
            away.rename(home)
            failures += 3
            committed = job.committed()
            job.start()
            ((code, text),) = job.finish()
            expect_start(job, committed, "")
        else:
            failures += job.lines(0)[-1]["failures"]
        expect(code == 0, text)
        check(job, truth(str(folder.parent), 1, job.steps))
    expect(failures, "no save failed: nothing was tested")
    return dict(tried=count, failed_saves=failures)


# Of the runs of `vit_jax.train`.
WHOLE = ["--config.total_steps=240", "--config.checkpoint.every=6", "--config.evals.val.every=0"]


def whole_command(folder: pathlib.Path, workdir: str) -> subprocess.Popen:
    files = [f"--config={folder}/tiny.py", f"--workdir={folder}/{workdir}"]
    command = [sys.executable, "-m", "vit_jax.train", *files, *WHOLE]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)


def wait_for_step(job: subprocess.Popen, workdir: pathlib.Path, number: int, starts: int) -> None:
    """Until this start, which is the one of that number, has logged the step, or has ended."""
    log = workdir / "log.txt"
    metrics = workdir / "metrics.jsonl"
    since = time.monotonic()
    while job.poll() is None:
        begun = log.exists() and log.read_text().count("training from step") == starts
        if begun and metrics.exists() and f'"step": {number},' in metrics.read_text():
            return
        expect(time.monotonic() - since < HANG_S, "hung")
        time.sleep(0.01)


def check_goodput(workdir: pathlib.Path, begun: float, kills: int, repeated: int) -> None:
    """The account of a killed run against our clock, and the steps that were logged twice.

    Args:
      begun: Unix time, in seconds, just before the first start.
    """
    path = workdir / "goodput.json"
    account = json.loads(path.read_text())
    total = sum(account["parts"].values())
    # After the account is written, the interpreter ends, which takes up to a second.
    wall_s = path.stat().st_mtime - begun
    print(f"wall time {wall_s:.2f} s: {account}", flush=True)
    expect(abs(total - wall_s) < 0.01 * wall_s, f"{total} s in all parts, but {wall_s} s in all")
    expect(account["starts"] == kills + 1, account)
    # Between a step and its line, or the line and the account, there is time for a kill.
    expect(abs(account["steps_repeated"] - repeated) <= kills, (account, repeated))


def whole_kills(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Kills `vit_jax.train`, every other time during a save; metrics and parameters must be those
    of an uninterrupted run.
    """
    (folder / "tiny.py").write_text(TINY)
    straight = whole_command(folder, "straight")
    expect(
        straight.communicate(timeout=HANG_S) and straight.returncode == 0,
        "the uninterrupted run fails",
    )
    workdir = folder / "run"
    path = workdir / "metrics.jsonl"
    done = 0
    hits = 0  # kills during a save
    repeated = 0
    begun = time.time()
    while True:
        logged = path.read_text().count("\n") if path.exists() else 0
        job = whole_command(folder, "run")
        names = [path.name for path in (workdir / "checkpoints").glob("*")]
        first = max([int(name) for name in names if name.isdigit()], default=0)
        if done < count:
            wait_for_step(job, workdir, first + rng.randrange(1, 12), starts=done + 1)
            while (
                done % 2 and job.poll() is None and not any((workdir / "checkpoints").glob("*tmp*"))
            ):
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            job.kill()
        _, err = job.communicate(timeout=HANG_S)
        expect(f"training from step {first}" in err, (first, err[-600:]))
        repeated += logged - first
        if done == count:
            break
        hits += any((workdir / "checkpoints").glob("*tmp*"))
        done += 1
    expect(job.returncode == 0, err[-600:])
    check_goodput(workdir, begun, count, repeated)
    for key in ("step", "train/loss", "train/grad_norm", "train/lr"):
        one = [line[key] for line in metric_lines(folder / "straight")]
        two = [line[key] for line in metric_lines(workdir)]
        expect(one == two, f"{key} differs from the uninterrupted run")
    expect(same_bits(final_params(folder / "straight"), final_params(workdir)), "parameters differ")
    return dict(tried=count, during_a_save=hits)
