"""What the workdir of a run says, as plain data. Whatever is missing or damaged is empty."""

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime

from vit_jax import config as configs
from vit_jax.cli import lock
from vit_jax.data import left_out
from vit_jax.report import series
from vit_jax.report.files import Folder, parse_lines
from vit_jax.report.series import Series
from vit_jax.train import goodput, metrics

METRICS = "metrics.jsonl"
FILES = ("config.json", METRICS, goodput.FILE)  # one of them makes a folder a workdir


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run, while it goes on or after its end."""

    folder: Folder
    label: str  # short, and no other run on the page has it
    record: Mapping  # config.json
    series: Mapping[str, Series]
    starts: list[dict]  # of goodput.json
    checkpoints: list[int]  # steps on disk
    holder: Mapping  # who uses the workdir, by lock.json
    left_out: list[dict]  # after loss spikes
    skipped: list[dict]  # examples that can't be read
    nonfinite: Mapping
    is_main: bool = True  # and not one of the trial runs of a fine-tuning

    @property
    def config(self) -> Mapping:
        return self.record.get("config", {})

    @property
    def command(self) -> list[str]:
        """`sys.argv` of the last start."""
        return self.record.get("command", [])

    @property
    def flat(self) -> dict[str, object]:
        """The config by dotted keys."""
        return dict(configs.flatten(self.config))

    @property
    def last_step(self) -> int:
        steps = [int(one.step[-1]) for one in self.series.values()]
        steps += [int(start["last_step"]) for start in self.starts[-1:]]
        return max([*steps, *self.checkpoints], default=0)

    @property
    def hours(self) -> float:
        """Hours of training until the last line of metrics; NaN if they are not known."""
        return max((float(one.hours[-1]) for one in self.series.values()), default=math.nan)

    def size(self, name: str) -> float | None:
        """An entry of `Experiment.sizes`; runs of older versions have only what the config says."""
        found = self.record.get("sizes", {}).get(name)
        if found is None:
            key = dict(batch_size="data.batch_size", num_examples="data.num_examples").get(name)
            found = self.flat.get(key or name)
        is_known = isinstance(found, int | float) and 0 < found < math.inf
        return float(found) if is_known else None

    @property
    def begun(self) -> float | None:
        """Unix time in seconds."""
        return self.starts[0]["begun"] if self.starts else None

    @property
    def seen(self) -> float | None:
        """Unix time in seconds until which the run is known to have lived."""
        return goodput.end(self.starts[-1]) if self.starts else None

    @property
    def stopped_early(self) -> bool:
        """Whether `early_stopping` checkpoints in a row were not better."""
        since_best = self.series.get("checkpoint/since_best")
        patience = self.size("early_stopping")
        return bool(since_best and patience) and since_best.value[-1] >= patience

    @property
    def is_complete(self) -> bool:
        """Whether it has the line of metrics of its last step, which is written after its
        evaluations.
        """
        logged = max((one.step[-1] for one in self.series.values()), default=0)
        total = self.size("total_steps")
        return bool(total) and bool(logged >= total)

    @property
    def is_over(self) -> bool:
        """Whether it has done all that it was to do."""
        return self.is_complete or self.stopped_early

    @property
    def state(self) -> str:
        """Whether it runs, and how far it is."""
        total = self.size("total_steps")
        progress = f"step {self.last_step:,}" + (f" of {total:,.0f}" if total else "")
        if self.holder and not is_dead(self.holder):
            sign = self.holder.get("renewed")
            return f"running, {progress}" + (f"; last sign of life {sign}" if sign else "")
        if self.nonfinite:
            return f"ended at {progress}: loss or gradients were not finite"
        if self.is_complete:
            return f"done, {progress}"
        if self.stopped_early:
            return f"done by early stopping, {progress}"
        return f"stopped at {progress}; the same command continues"


def is_dead(holder: Mapping) -> bool:
    """Whether a process of this machine that held a workdir has ended."""
    is_here = holder.get("machine") and holder["machine"] == lock.machine()
    return bool(is_here) and lock.born(holder["pid"]) != holder["born"]


def is_workdir(names: list[str]) -> bool:
    """Whether a folder with these files is that of a run."""
    return any(name in names for name in FILES)


def read(folder: Folder, label: str, is_main: bool = True) -> Run:
    """Reads a workdir; `folder.problems` gets a line for each file that can't be read."""
    starts = folder.parsed(goodput.FILE, goodput.parse) or []
    first_step = int(starts[0]["first_step"]) if starts else 0
    names = folder.below("checkpoints").names()
    return Run(
        folder=folder,
        label=label,
        record=folder.parsed("config.json", parse_record) or {},
        series=read_metrics(folder, first_step),
        starts=starts,
        checkpoints=sorted(int(name) for name in names if name.isdecimal()),
        holder=lock.parse(folder.read(lock.FILE) or b""),
        left_out=folder.parsed(left_out.NAME, parse_left_out) or [],
        skipped=folder.parsed("skipped.jsonl", parse_lines) or [],
        nonfinite=folder.json("nonfinite.json"),
        is_main=is_main,
    )


def read_metrics(folder: Folder, first_step: int) -> dict[str, Series]:
    """See `series.from_lines`; lines that can't be read are left out, and noted."""
    parsed = folder.parsed(METRICS, lambda text: parse_metrics(text, first_step))
    found, damaged = parsed or ({}, [])
    if damaged:
        where = f"{len(damaged):,}, the first is line {damaged[0]:,}"
        folder.problems.append(f"{folder.path_of(METRICS)} has damaged lines: {where}")
    return found


def parse_metrics(text: str, first_step: int) -> tuple[dict[str, Series], list[int]]:
    """The metrics, and the numbers of damaged lines. The last line may be incomplete: it is being
    written, or the run was killed.
    """
    lines = [metrics.parse(line) for line in text.splitlines()]
    damaged = [number for number, line in enumerate(lines[:-1], 1) if line is None]
    complete = [line for line in lines if line is not None]
    return series.from_lines(complete, first_step) if complete else {}, damaged


def parse_record(text: str) -> dict:
    """The content of config.json.

    Raises:
      ValueError, TypeError, AttributeError: it is damaged.
    """
    record = json.loads(text)
    for key in ("config", "sizes", "versions", "devices"):
        dict(record.get(key, {}).items())
    command = record.setdefault("command", [])
    if not all(isinstance(word, str) for word in command):
        raise ValueError("its command is not a list of words")
    return record


def parse_left_out(text: str) -> list[dict]:
    return left_out.LeftOut.from_json(json.loads(text)).to_json()


def date(seconds: float | None) -> str:
    """A Unix time such as "2026-11-23 21:07 UTC"; "" for None and for what is not a date."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if seconds else ""
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return ""
