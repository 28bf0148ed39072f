"""What a run shows on the terminal: a progress bar, and how it went."""

import contextlib
import logging
import re

import jax
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vit_jax.cli.spool import Files
from vit_jax.cli.terminal import Console
from vit_jax.train import goodput, metrics

log = logging.getLogger(__name__)

ACCURACY = re.compile(r"eval/.*/(?!(loss|count|l2)$)[^/]+")


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
        text = (
            f"loss {scalars['train/loss']:.4f}  {speed:.0f} images/s  "
            f"data wait {scalars['perf/data_wait']:.0%}"
        )
        self.bar.update(self.task, description=text)
        if not self.live:
            log.info("step %d/%d  %s  ETA %s", step, self.total, text, duration(left))

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self.bar.stop()


def evaluations(files: Files) -> list[tuple[str, str]]:
    """For every accuracy that the run has measured, earlier starts included: the evaluation, and
    the last and the best value.
    """
    path = files.path("metrics.jsonl")
    lines = metrics.read_lines(path) if path.exists() else []
    keys = {key for line in lines for key in line}
    rows = []
    for key in sorted(filter(ACCURACY.fullmatch, keys)):
        measured = [line for line in lines if key in line]
        best = max(measured, key=lambda line: line[key])
        name, _, what = key.rpartition("/")
        last = f"{what} {measured[-1][key]:.4f} at step {measured[-1]['step']:,}"
        rows.append((name, f"{last}, best {best[key]:.4f} at step {best['step']:,}"))
    return rows


# Row of the summary -> its text, and the metrics of `StepTimer.totals` in it.
ROWS = {
    "images/s": (
        "{:,.0f}, {:,.1f} per chip",
        "perf/images_per_sec",
        "perf/images_per_sec_per_chip",
    ),
    "MFU": ("{:.1%}", "perf/mfu"),
    "step ms": ("median {:,.1f}, p95 {:,.1f}", "perf/step_ms_p50", "perf/step_ms_p95"),
    "data wait": ("{:.1%} of the time of the steps", "perf/data_wait"),
    "compilation": ("{:.1f} s", "perf/compile_s"),
    "device memory": ("peak {:.2f} GiB", "perf/hbm_gib"),
}


def summary_rows(totals: dict[str, float]) -> list[tuple[str, str]]:
    """Names and values of what `StepTimer.totals` measured; what is unknown is left out."""
    rows = [("steps", f"{totals['steps']:,} in {duration(totals['seconds'])}")]
    for name, (text, *keys) in ROWS.items():
        if all(key in totals for key in keys):
            rows.append((name, text.format(*(totals[key] for key in keys))))
    return rows + [(name, duration(seconds)) for name, seconds in totals["paused"].items()]


def goodput_rows(account: dict) -> list[tuple[str, str]]:
    """Names and values of `goodput.totals`; parts that took no time are left out."""
    if not account:
        return []
    starts = "1 start" if account["starts"] == 1 else f"{account['starts']:,} starts"
    head = f"{account['goodput']:.1%} of {duration(account['wall_s'])} in {starts}"
    if account["steps_repeated"]:
        head += f", {account['steps_repeated']:,} steps done again"
    rows = [("goodput", head)]
    for name, seconds in account["parts"].items():
        if round(seconds):
            share = seconds / account["wall_s"]
            rows.append((f"  {goodput.PARTS[name]}", f"{duration(seconds)}, {share:.1%}"))
    return rows


def show_summary(files: Files, totals: dict, account: dict) -> None:
    """Shows how the run went: a table on a terminal, lines of the log elsewhere and in log.txt.

    Args:
      files: of the workdir.
      totals: `StepTimer.totals`; without a step there is no summary.
      account: `goodput.totals` of all starts, or {}.
    """
    if not totals["steps"]:
        return
    rows = summary_rows(totals) + evaluations(files) + goodput_rows(account)
    console = Console(stderr=True)
    live = console.is_terminal and jax.process_index() == 0
    if live:
        table = Table("this run", "", show_lines=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, text in rows:
        log.info("%-23s %s", name, text, extra=dict(file_only=live))


def duration(seconds: float) -> str:
    """ "1:02:03" for 3723 seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
