"""Runs what a study still lacks, each in a process of its own: one after another, or several at
once on parts of the devices.
"""

import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from etils import epath

from vit_jax import cli, errors
from vit_jax.errors import Preempted, printable
from vit_jax.study import outcome
from vit_jax.study.definition import StudyRun
from vit_jax.study.devices import Part

log = logging.getLogger("vit_jax.study")

POLL_S = 0.2
LOGS = "logs"


class Execution:
    """Starts runs until all are over. A signal stops those that are running, which save."""

    def __init__(self, folder: pathlib.Path, parts: Sequence[Part]):
        """`folder`: of the study; `parts`: of the devices, one for each run at a time."""
        self.folder = folder
        self.free = list(parts)
        self.running: dict[str, tuple[StudyRun, subprocess.Popen, Part]] = {}  # by name
        self.stopping = False
        for name in (LOGS, outcome.FAILED):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self, runs: Sequence[StudyRun], after_each: Callable[[], None]) -> None:
        """Runs all of them; `after_each` is called when one is over.

        Raises:
          Preempted: a signal came; the same command continues.
        """
        waiting = list(runs)
        with errors.handling(errors.SIGNALS, self.stop):
            while self.running or (waiting and not self.stopping):
                if self.free and not self.stopping:
                    self.start_next(waiting)
                if self.end_finished():
                    after_each()
                time.sleep(POLL_S)
        if self.stopping:
            raise Preempted

    def start_next(self, waiting: list[StudyRun]) -> None:
        """Starts the first run that no other process has."""
        for run in waiting:
            if not outcome.is_used_here(self.folder, run):
                waiting.remove(run)
                return self.start(run, len(waiting))

    def start(self, run: StudyRun, left: int) -> None:
        part = self.free.pop(0)
        workdir = outcome.folder_of(self.folder, run)
        cores = ",".join(map(str, part.cores)) or "all"
        start = [sys.executable, "-m", "vit_jax.study.start", str(os.getpid()), cores]
        words = ["-m", "vit_jax.train", *run.arguments, f"--workdir={workdir}"]
        log.info("%s: begins, %d after it", printable(run.name), left)
        with open(self.log_of(run), "ab") as file:
            job = subprocess.Popen(
                [*start, *words],
                env=os.environ | part.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.running[run.name] = (run, job, part)

    def end_finished(self) -> list[str]:
        """The names of the runs that have ended since the last call; their parts are free again."""
        ended = [name for name, (_, job, _) in self.running.items() if job.poll() is not None]
        for name in ended:
            self.end(name)
        return ended

    def end(self, name: str) -> None:
        run, job, part = self.running.pop(name)
        self.free.append(part)
        failure = self.folder / outcome.FAILED / f"{name}.txt"
        failure.unlink(missing_ok=True)
        if job.returncode == 0:
            log.info("%s: done", printable(name))
        elif job.returncode == Preempted.exit_code:
            log.info("%s: stopped, and saved", printable(name))
        else:
            line = self.last_line(run) or f"exit code {job.returncode}"
            cli.replace_file(epath.Path(failure), f"{line}\n")
            log.warning("%s failed: %s", printable(name), printable(line))

    def stop(self, number: int, frame) -> None:
        if self.stopping:
            return
        self.stopping = True
        log.warning("%s: the runs save and stop", errors.SIGNALS[number])
        for _, job, _ in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(signal.SIGTERM)

    def log_of(self, run: StudyRun) -> pathlib.Path:
        return self.folder / LOGS / f"{run.name}.txt"

    def last_line(self, run: StudyRun) -> str:
        lines = self.log_of(run).read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else ""
