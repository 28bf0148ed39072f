"""What a run tells: metrics.jsonl, TensorBoard events by clu, log.txt, and a progress bar."""

import json
import logging
import math
import os
import re
from collections.abc import Callable

import jax
import numpy as np
from etils import epath
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vit_jax import cli
from vit_jax.errors import one_line, storage_problem

log = logging.getLogger(__name__)


def read_lines(path: epath.Path) -> list[dict]:
    """The whole lines of a metrics.jsonl; a half line at the end (a kill while writing) is left
    out.
    """
    lines = []
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(line)
    return lines


def rewind(path: epath.Path, step: int) -> None:
    """Drops a half line and the lines after `step`, so that a resumed run writes each step once."""
    if not path.exists():
        return
    kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step]
    cli.replace_file(path, "".join(kept))


def fetch(step_metrics: dict) -> dict[str, float]:
    """Waits for the metrics of a step."""
    return {name: np.asarray(value).item() for name, value in jax.device_get(step_metrics).items()}


class MetricWriter:
    """Writes scalars of a step to all places; only the leading process writes.

    Where the disk is full, training goes on: lines of metrics.jsonl are kept until they can be
      written.
    """

    def __init__(self, workdir: epath.Path, resumed_step: int):
        self.path = workdir / "metrics.jsonl"
        self.leads = jax.process_index() == 0
        self.tensorboard = None
        self.waiting = []  # lines that could not be written yet
        self.next = {}  # scalars that belong to the next line
        if self.leads:
            from clu import metric_writers  # imports TensorFlow

            rewind(self.path, resumed_step)
            self.tensorboard = metric_writers.create_default_writer(
                str(workdir), just_logging=False
            )

    def add(self, scalars: dict[str, float]) -> None:
        """Keeps scalars for the next line."""
        self.next |= scalars

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One line per step: call once, with everything that the step measured."""
        scalars = scalars | self.next
        self.next = {}
        if not self.leads:
            return
        self.waiting.append(json.dumps({"step": step, **scalars}) + "\n")
        self.write_waiting()
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        self.to_tensorboard(lambda writer: writer.write_scalars(step, finite))

    def to_tensorboard(self, use: Callable) -> None:
        """Where it can't be written, TensorBoard goes without the rest of this run: metrics.jsonl
        has it all.
        """
        try:
            if self.tensorboard is not None:
                use(self.tensorboard)
        except Exception as error:  # of TensorFlow and clu
            self.tensorboard = None
            log.warning("TensorBoard's events can't be written any more: %s", one_line(error)[:160])

    def write_waiting(self) -> None:
        size = self.path.stat().length if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self.waiting))
        except Exception as error:  # every store has errors of its own
            if self.path.exists() and self.path.stat().length > size:  # a part was written
                os.truncate(self.path, size)
            if len(self.waiting) == 1:
                problem = storage_problem(error) or one_line(error)[:160]
                log.warning(
                    "%s can't be written (%s): its lines wait in memory", self.path, problem
                )
            return
        self.waiting.clear()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.waiting:
            self.write_waiting()
        self.to_tensorboard(lambda writer: writer.close())


class ProgressBar:
    """Steps done, loss, speed, data wait and remaining time; a bar on a terminal, log lines
    elsewhere.
    """

    def __init__(self, total_steps: int, step: int):
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and jax.process_index() == 0
        columns = (
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task("compiling", total=total_steps, completed=step)
        self.total = total_steps
        self.bar.start()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def report(self, step: int, scalars: dict[str, float]) -> None:
        """Shows the newest metrics."""
        speed = scalars["perf/images_per_sec"]
        left = (self.total - step) * scalars["perf/step_ms"] / 1e3
        text = f"loss {scalars['train/loss']:.4f}  {speed:.0f} images/s  data wait {scalars['perf/data_wait']:.0%}"
        self.bar.update(self.task, description=text)
        if not self.live:
            log.info("step %d/%d  %s  ETA %s", step, self.total, text, duration(left))

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.bar.stop()


def evaluations(workdir: epath.Path) -> list[tuple[str, str]]:
    """For every evaluation of the run, also before it was continued: name, and its last and best
    accuracy.
    """
    path = workdir / "metrics.jsonl"
    lines = read_lines(path) if path.exists() else []
    rows = []
    for key in sorted({key for line in lines for key in line if re.fullmatch("eval/.*/top1", key)}):
        last = [line for line in lines if key in line][-1]
        best = max((line for line in lines if key in line), key=lambda line: line[key])
        text = f"top1 {last[key]:.4f} at step {last['step']:,}, best {best[key]:.4f} at step {best['step']:,}"
        rows.append((key.removesuffix("/top1"), text))
    return rows


def summary_rows(totals: dict[str, float]) -> list[tuple[str, str]]:
    """Names and values of what `perf.StepTimer.totals` found; what is not known is left out."""

    def row(name, text, *keys):
        return (
            [(name, text.format(*(totals[key] for key in keys)))]
            if all(key in totals for key in keys)
            else []
        )

    rows = [("steps", f"{totals['steps']:,} in {duration(totals['seconds'])}")]
    rows += row(
        "images/s",
        "{:,.0f}, {:,.1f} per chip",
        "perf/images_per_sec",
        "perf/images_per_sec_per_chip",
    )
    rows += row("MFU", "{:.1%}", "perf/mfu")
    rows += row(
        "step ms", "{:,.1f} in the middle, p95 {:,.1f}", "perf/step_ms_p50", "perf/step_ms_p95"
    )
    rows += row("data wait", "{:.1%} of the time of the steps", "perf/data_wait")
    rows += row("compilation", "{:.1f} s", "perf/compile_s")
    rows += row("device memory", "{:.2f} GiB at the peak", "perf/hbm_gib")
    return rows + [(name, duration(seconds)) for name, seconds in totals["paused"].items()]


def show_summary(workdir: epath.Path, totals: dict) -> None:
    """Tells how the run went: a table on a terminal, lines of the log elsewhere and in log.txt.

    `totals`: of `perf.StepTimer.totals`. A run that did no step has no summary.
    """
    if not totals["steps"]:
        return
    rows, console = summary_rows(totals) + evaluations(workdir), Console(stderr=True)
    live = console.is_terminal and jax.process_index() == 0
    if live:
        table = Table("this run", "", show_lines=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, text in rows:
        log.info("%-16s %s", name, text, extra=dict(file_only=live))


def duration(seconds: float) -> str:
    """ "1:02:03" for 3723 seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
