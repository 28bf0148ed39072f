"""Runs as data: references/NAME.json has the curves, the evaluations and the records of a run, and
within which interval another run of its recipe should end. It stands in the place of a workdir.
"""

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath
from scipy import stats

from vit_jax import cli
from vit_jax.cli import regular
from vit_jax.errors import UserError, one_line
from vit_jax.report import settings
from vit_jax.report.files import Folder
from vit_jax.report.run import Run, parse_record
from vit_jax.report.series import Series

SUFFIX = ".json"
LEVEL = 0.99  # probability that a run with another seed ends within an interval
KEPT = ("train/", "eval/", "data/")  # beginnings of metrics; the others are about time
LOSS = "train/loss"
SAME = ("code", "data_fingerprint", "teacher_fingerprint")  # records that runs have in common
TAIL = 0.1  # share of the steps, the last ones, over which the loss is averaged


@dataclasses.dataclass(frozen=True, eq=False)
class Reference(Run):
    """A run that is kept as data."""

    intervals: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


def is_reference(path: str) -> bool:
    return path.endswith(SUFFIX) and not os.path.isdir(path)


def outcome(run: Run) -> dict[str, float]:
    """What a run came to, if it is finite: the last value of each evaluation, but not the penalty
    that a linear probe chose, and the mean loss of its last steps.
    """
    found = {
        key: float(one.value[-1])
        for key, one in run.series.items()
        if key.startswith("eval/") and not key.endswith("/l2")
    }
    loss = run.series.get(LOSS)
    if loss is not None:
        late = loss.step > (1 - TAIL) * run.last_step
        found[LOSS] = float(loss.value[late].mean()) if late.any() else float(loss.value[-1])
    return {key: value for key, value in found.items() if math.isfinite(value)}


def intervals(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Metric -> [low, high] of `outcome`: prediction intervals of one more run, by Student's t,
    from runs with different seeds; {} of a single run.
    """
    if len(runs) < 2:
        return {}
    found = {}
    for key in outcome(runs[0]):
        values = np.array([outcome(run)[key] for run in runs])
        factor = stats.t.ppf((1 + LEVEL) / 2, len(runs) - 1) * np.sqrt(1 + 1 / len(runs))
        half = factor * values.std(ddof=1)
        found[key] = [float(values.mean() - half), float(values.mean() + half)]
    return found


def check(run: Run, first: Run) -> None:
    """
    Raises:
      UserError: a run is not complete, or is of another recipe, code or data than the first.
    """
    path = run.folder.path
    if not run.series or not run.config:
        raise UserError(f"{path} has no metrics or no config: give a complete run")
    if not run.is_over:
        raise UserError(f"{path} is not a complete run ({run.state}): run it to its end")
    changed = [key for key, _ in settings.between([first.flat, run.flat]) if key != "seed"]
    records = [[one.record.get(part) for one in (first, run)] for part in SAME]
    changed += [part for part, (a, b) in zip(SAME, records, strict=True) if a != b]
    if changed:
        raise UserError(
            f"{path} differs from {first.folder.path} in {', '.join(changed)}: give runs that "
            "differ in their seed only"
        )
    only_one = sorted(outcome(run).keys() ^ outcome(first).keys())
    if only_one:
        raise UserError(
            f"{path} and {first.folder.path} do not both have {only_one[0]}, or it is not finite: "
            "give runs that measure the same"
        )


def write(runs: Sequence[Run], path: str) -> None:
    """Keeps the first run; all of them, which differ in their seed, give the intervals.

    Raises:
      UserError: they are not complete runs of one recipe.
    """
    if not path.endswith(SUFFIX):
        raise UserError(f"--save={path} is read as a workdir afterwards: give a name with {SUFFIX}")
    for run in runs:
        check(run, runs[0])
    seeds = [run.flat["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"the runs have the seeds {', '.join(map(str, seeds))}: give runs with different ones"
        )
    first = runs[0]
    series = {
        key: dict(step=one.step.tolist(), value=one.value.tolist())
        for key, one in first.series.items()
        if key.startswith(KEPT)
    }
    record = {key: value for key, value in first.record.items() if key != "command"}
    words = settings.command_of(first.command)
    command = shlex.join(word for word in words if not word.startswith("--workdir"))
    content = dict(command=command, record=record, seeds=seeds)
    content |= dict(intervals=intervals(runs), series=series)
    cli.replace_file(epath.Path(path), json.dumps(content) + "\n")


def read(path: str, label: str) -> Reference:
    """
    Raises:
      UserError: it can't be read, or is not such a file.
    """
    try:
        content = json.loads(regular.read_text(path))
        words = command_words(content["command"])
        record = parse_record(json.dumps(content["record"] | dict(command=words)))
        series = {key: parse_series(one) for key, one in content["series"].items()}
        bounds = {
            key: (float(low), float(high)) for key, (low, high) in content["intervals"].items()
        }
    except regular.NotRegular:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a reference run ({one_line(error)[:160]}): give a file that "
            "vit_jax.compare --save has written, or a workdir"
        ) from error
    return Reference(
        folder=Folder(path),
        label=label,
        record=record,
        series=series,
        starts=[],
        checkpoints=[],
        holder={},
        left_out=[],
        skipped=[],
        nonfinite={},
        intervals=bounds,
    )


def command_words(command: str) -> list[str]:
    """`sys.argv` of `vit_jax NAME` for the command `python -m vit_jax.NAME`; [] of "".

    Raises:
      ValueError: it is damaged.
    """
    if not isinstance(command, str):
        raise ValueError("its command is not a string")
    module, *arguments = shlex.split(command)[2:] or [""]
    package, _, name = module.partition(".")
    return [package, name, *arguments] if name else []


def parse_series(found: Mapping) -> Series:
    """
    Raises:
      ValueError, TypeError, KeyError: it is damaged.
    """
    step = np.array(found["step"], np.int64)
    value = np.array(found["value"], np.float64)
    if step.ndim != 1 or step.shape != value.shape or not len(step) or (np.diff(step) <= 0).any():
        raise ValueError("a metric has no value for each of its steps")
    return Series(step, np.full(len(step), np.nan), value)
