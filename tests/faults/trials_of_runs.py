"""Kills, SIGTERM, dead peers, full disks and lost stores: after each, the run must be as if nothing
had happened.
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
    """The run that was just started must go on from the newest committed step, with the bits that
    were saved.
    """
    begin = job.since_start()[0]
    expect(
        begin["first"] == (committed or [0])[-1],
        f"{committed} are committed, but it starts from {begin['first']}",
    )
    expect("can't be used" not in text, text)


def kills(chance: random.Random, folder: pathlib.Path, count: int, inside: bool) -> dict:
    """Kills one run again and again, and lets it end; with `inside`, when it is inside a save."""
    job = LightJob(folder / "run", every=5 if inside else 20)
    done, hits, committed = 0, 0, []
    expected = truth(str(folder.parent), 1, job.steps)
    while done < count:
        job.start()
        at_work = job.wait_for_steps(1 if inside else chance.randrange(1, 25))
        if job.since_start():
            expect_start(job, committed, "")
        if inside and at_work:
            job.wait_for(job.is_saving)
        time.sleep(chance.uniform(0, 0.03 if inside else 0.3))
        server(0).kill()
        ((code, text),) = job.finish()
        expect(code in (0, -signal.SIGKILL), text)
        committed = job.committed()
        if code == 0:
            check(job, expected)
            shutil.rmtree(job.folder)
            committed = []
            continue
        done, hits = done + 1, hits + job.is_saving()
    job.start()
    ((code, text),) = job.finish()
    expect(code == 0, text)
    expect_start(job, committed, text)
    check(job, expected)
    return dict(tried=count, inside_a_save=hits)


def preemptions(chance: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """SIGTERM to one process of several: all save one step, exit 75, and lose at most a step."""
    job = LightJob(folder / "run", processes, steps=400 * count + 40, every=10**6)
    expected = truth(str(folder.parent), processes, job.steps)
    lost = longest = 0
    for _ in range(count):
        job.start()
        expect(job.wait_for_steps(chance.randrange(1, 30)), "it ended before it was stopped")
        seen, begun = job.lines(0)[-1]["step"], time.monotonic()
        server(chance.randrange(processes)).kill(signal.SIGTERM)
        found = job.finish(timeout=30)
        longest = max(longest, time.monotonic() - begun)
        expect([code for code, _ in found] == [75] * processes, found)
        ends = {job.lines(i)[-1]["last"] for i in range(processes)}
        expect(
            len(ends) == 1 and job.committed()[-1] in ends,
            f"stopped at {ends}, saved {job.committed()}",
        )
        lost = max(lost, seen - job.committed()[-1])
        expect(lost <= 1, f"step {seen} was done, and {job.committed()} saved")
    job.start()
    expect([code for code, _ in job.finish()] == [0] * processes, "it did not end well")
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def killed_peers(chance: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """A process is killed, without a launcher: the others end within a minute, and all go on from
    what is saved.
    """
    job = LightJob(folder / "run", processes, steps=30 * count + 30)
    expected, longest = truth(str(folder.parent), processes, job.steps), 0
    for _ in range(count):
        job.start()
        expect(job.wait_for_steps(chance.randrange(6, 20)), "it ended before it was killed")
        victim, begun = chance.randrange(processes), time.monotonic()
        server(victim).kill()
        found = job.finish(timeout=60)
        longest = max(longest, time.monotonic() - begun)
        for i, (code, text) in enumerate(found):
            expect(code == -signal.SIGKILL if i == victim else code != 0, (i, code, text[-500:]))
            if i != victim and victim != 0:  # without process 0 nothing of ours runs any more
                said = " ".join(error_lines(text)) or re.sub(
                    r".*sending heartbeats.*\n", "process ", text
                )  # of JAX
                expect(f"process {victim}" in said and "Traceback" not in text, (i, text[:3000]))
        committed = job.committed()
    job.start()
    found = job.finish()
    expect([code for code, _ in found] == [0] * processes, found)
    expect_start(job, committed, "")
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def launched_peers(chance: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """The same below the local launcher, which says who it was."""
    job, longest = LightJob(folder / "run", processes, steps=30 * count + 60), 0
    expected = truth(str(folder.parent), processes, job.steps)
    arguments = json.dumps([str(job.folder), job.steps, job.every, job.pause])
    command = [
        sys.executable,
        "-m",
        "launch.local",
        f"--num_processes={processes}",
        "--devices=1",
        "--",
    ]
    command += [sys.executable, str(LIGHT), arguments]
    for number in range(count + 1):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes)
        before, begun = len(job.lines(0)), time.monotonic()
        if number < count:
            while len(job.lines(0)) < before + chance.randrange(8, 20) and launcher.poll() is None:
                expect(time.monotonic() - begun < HANG_S, "hung at the start")
                time.sleep(0.005)
            below = (
                pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
                .read_text()
                .split()
            )
            begun = time.monotonic()
            os.kill(int(chance.choice(below)), signal.SIGKILL)
        out, _ = launcher.communicate(timeout=HANG_S)
        if number < count:
            longest = max(longest, time.monotonic() - begun)
            expect(
                launcher.returncode not in (0, 75) and "ended first, with exit code 137" in out,
                out[-900:],
            )
    expect(launcher.returncode == 0, out[-900:])
    check(job, expected)
    return dict(tried=count, longest_s=longest)


def full_disks(chance: random.Random, folder: pathlib.Path, count: int, processes: int) -> dict:
    """For a while no file of one process may be larger than some KiB, as where its disk is full:
    training goes on.
    """
    failures = 0
    for number in range(count):
        job = LightJob(folder / f"run_{number}", processes, 150, pause=0.01, more=(1000,))
        job.start()
        job.wait_for_steps(chance.randrange(1, 40))
        victim, most = server(chance.randrange(processes)), chance.randrange(20_000, 200_000)
        if victim.is_running():
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        job.wait_for_steps(chance.randrange(60, 110))
        if victim.is_running():
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        for code, text in job.finish():
            expect(code == 0 and "Traceback" not in text, text[-900:])
            told = text.count("can't be saved (")
            expect(told == job.lines(0)[-1]["failures"], text)
        check(job, truth(str(folder.parent), processes, job.steps))
        expect(job.committed()[-1] == job.steps, job.committed())
        failures += told
    expect(failures, "no save failed: nothing was tried")
    return dict(tried=count, failed_saves=failures)


def lost_stores(chance: random.Random, folder: pathlib.Path, count: int) -> dict:
    """The folder of the checkpoints is gone for a while, or for ever."""
    failures = 0
    for number in range(count):
        for_ever = number % 2 == 1
        job = LightJob(
            folder / f"run_{number}", steps=150, pause=0.01, more=(3 if for_ever else 1000,)
        )
        job.start()
        job.wait_for_steps(chance.randrange(8, 40))
        home, away = job.folder / "checkpoints", job.folder / "away"
        home.rename(away)
        home.write_text("")
        job.wait_for_steps(chance.randrange(60, 90))
        if not for_ever:
            home.unlink()
            away.rename(home)
        ((code, text),) = job.finish()
        expect("Traceback" not in text, text[-900:])
        if for_ever:
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
    expect(failures, "no save failed: nothing was tried")
    return dict(tried=count, failed_saves=failures)


WHOLE = ["--config.total_steps=240", "--config.checkpoint.every=6", "--config.evals.val.every=0"]


def whole_command(folder: pathlib.Path, workdir: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "vit_jax.train",
        f"--config={folder}/tiny.py",
        f"--workdir={folder}/{workdir}",
    ]
    return subprocess.Popen(
        [*command, *WHOLE], env=environment(), stderr=subprocess.PIPE, text=True
    )


def whole_kills(chance: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Kills `vit_jax.train`, every other time inside a save; curve and parameters are those of an
    undisturbed run.
    """
    (folder / "tiny.py").write_text(TINY)
    straight = whole_command(folder, "straight")
    expect(
        straight.communicate(timeout=HANG_S) and straight.returncode == 0,
        "the undisturbed run fails",
    )
    workdir, done, hits = folder / "run", 0, 0
    path = workdir / "metrics.jsonl"
    while True:
        job = whole_command(folder, "run")
        saved = sorted(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())
        first, begun = (saved or [0])[-1], time.monotonic()
        if done < count:
            goal = first + chance.randrange(1, 12)
            while job.poll() is None and not (
                path.exists() and f'"step": {goal},' in path.read_text()
            ):
                expect(time.monotonic() - begun < HANG_S, "hung")
                time.sleep(0.01)
            while (
                done % 2 and job.poll() is None and not any((workdir / "checkpoints").glob("*tmp*"))
            ):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.02))
            job.kill()
        _, err = job.communicate(timeout=HANG_S)
        expect(
            f"training from step {first}" in err or (first == 0 and done < count),
            (first, err[-600:]),
        )
        if done == count:
            break
        hits += any((workdir / "checkpoints").glob("*tmp*"))
        done += 1
    expect(job.returncode == 0, err[-600:])
    for key in ("step", "train/loss", "train/grad_norm", "train/lr"):
        one, two = (
            [line[key] for line in metric_lines(folder / name)] for name in ("straight", "run")
        )
        expect(one == two, f"{key} differs from the undisturbed run")
    expect(same_bits(final_params(folder / "straight"), final_params(workdir)), "parameters differ")
    return dict(tried=count, inside_a_save=hits)
