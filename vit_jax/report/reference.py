"""Runs as data: references/NAME.json has the curves, the evaluations and the records of a run, and
within which interval another run of its recipe should end. It stands in the place of a workdir.
"""

import dataclasses
import json
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
TAIL = 0.1  # share of the steps, the last ones, over which the loss is averaged


@dataclasses.dataclass(frozen=True, eq=False)
class Reference(Run):
    """A run that is kept as data."""

    intervals: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)


def is_reference(path: str) -> bool:
    return path.endswith(SUFFIX) and not os.path.isdir(path)


def outcome(run: Run) -> dict[str, float]:
    """What a run came to: the last value of each evaluation, the mean loss of its last steps."""
    found = {
        key: float(one.value[-1]) for key, one in run.series.items() if key.startswith("eval/")
    }
    loss = run.series.get(LOSS)
    if loss is not None:
        late = loss.step > (1 - TAIL) * run.last_step
        found[LOSS] = float(loss.value[late].mean()) if late.any() else float(loss.value[-1])
    return found


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


def write(runs: Sequence[Run], path: str) -> None:
    """Keeps the first run; all of them, which differ in their seed, give the intervals.

    Raises:
      UserError: a run is of another recipe, or has no metrics.
    """
    for run in runs:
        if not run.series or not run.config:
            raise UserError(f"{run.folder.path} has no metrics or no config: give a complete run")
        changed = settings.between([runs[0].flat, run.flat])
        others = [key for key, _ in changed if key != "seed"]
        if others:
            raise UserError(
                f"{run.folder.path} differs from {runs[0].folder.path} in {', '.join(others)}: "
                "give runs that differ in their seed only"
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
    content = dict(command=command, record=record, seeds=[run.flat["seed"] for run in runs])
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
