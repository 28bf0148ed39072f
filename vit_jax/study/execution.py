"""Runs what a study still lacks, each in a process of its own: one after another, or several at
once on parts of the devices.
"""

import contextlib
import dataclasses
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
from vit_jax.train import goodput

log = logging.getLogger("vit_jax.study")

POLL_S = 0.2
LOGS = "logs"
HINTS = {signal.SIGKILL: ", perhaps for lack of memory"}


@dataclasses.dataclass(frozen=True)
class Job:
    run: StudyRun
    process: subprocess.Popen
    part: Part
    log_start: int  # where its output begins in the log, which has that of earlier starts, too


class Execution:
    """Starts runs until all are over. A signal stops those that are running, which save, and a
    second one ends them.
    """

    def __init__(self, folder: pathlib.Path, parts: Sequence[Part]):
        """`folder`: of the study; `parts`: of the devices, one for each run at a time."""
        self.folder = folder
        self.free = list(parts)
        self.running: dict[str, Job] = {}  # by the name of the run
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
        environment = os.environ | part.environment
        environment.pop(goodput.REQUESTED_AT, None)  # the study waited in a queue, not each run
        with open(self.log_of(run), "ab") as file:
            process = subprocess.Popen(
                [*start, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,  # Ctrl-C in a terminal would be a second signal to it
            )
            self.running[run.name] = Job(run, process, part, file.tell())
        if self.stopping:  # the signal came meanwhile
            process.send_signal(signal.SIGTERM)

    def end_finished(self) -> list[str]:
        """The names of the runs that have ended since the last call; their parts are free again."""
        ended = [name for name, job in self.running.items() if job.process.poll() is not None]
        for name in ended:
            self.end(self.running.pop(name))
        return ended

    def end(self, job: Job) -> None:
        name = job.run.name
        code = job.process.returncode
        self.free.append(job.part)
        failure = self.folder / outcome.FAILED / f"{name}.txt"
        failure.unlink(missing_ok=True)
        if code == 0:
            log.info("%s: done", printable(name))
        elif code == Preempted.exit_code:
            log.info("%s: stopped, and saved", printable(name))
        elif self.stopping and code == -signal.SIGTERM:
            log.info("%s: stopped before it began to train", printable(name))
        else:
            line = self.problem_of(job)
            cli.replace_file(epath.Path(failure), f"{line}\n")
            log.warning("%s failed: %s", printable(name), printable(line))

    def stop(self, number: int, frame) -> None:
        what = "end at once" if self.stopping else "save and stop"
        log.warning("%s: the runs %s", errors.SIGNALS[number], what)
        self.stopping = True
        for job in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGTERM)

    def log_of(self, run: StudyRun) -> pathlib.Path:
        return self.folder / LOGS / f"{run.name}.txt"

    def problem_of(self, job: Job) -> str:
        """Why a run failed: the last line that it printed, or how it ended."""
        code = job.process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}{HINTS.get(-code, '')}"
        with open(self.log_of(job.run), "rb") as file:
            file.seek(job.log_start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
