"""The metrics of a run as arrays: what each was at which step, how long that took, and a bounded
number of points of it that still has its extremes. Pure functions.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

STEP_MS = "perf/step_ms"


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric."""

    step: np.ndarray  # int64 [points], ascending
    hours: np.ndarray  # float64 [points], of training
    value: np.ndarray  # float64 [points], also NaN and infinity

    def take(self, chosen: np.ndarray) -> "Series":
        """`chosen`: int [n] indices."""
        return Series(self.step[chosen], self.hours[chosen], self.value[chosen])

    @property
    def finite(self) -> np.ndarray:
        """float64: the values that are finite."""
        return self.value[np.isfinite(self.value)]

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to draw but one value."""
        return len(np.unique(self.value)) <= 1


def or_none(value: float) -> float | None:
    """A number as JSON has it, which knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def from_lines(lines: Sequence[Mapping[str, float]], first_step: int = 0) -> dict[str, Series]:
    """The metrics in the lines of a metrics.jsonl.

    Args:
      first_step: updates that were done before the run began, as by the run that it branched from.
    """
    lines = sorted(lines, key=lambda line: line["step"])
    step = np.array([line["step"] for line in lines], np.int64)
    hours = training_hours(step, gather(lines, STEP_MS), first_step)
    found = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        if key != "step":
            present = np.flatnonzero([key in line for line in lines])
            value = np.array([lines[i][key] for i in present], np.float64)
            found[key] = Series(step[present], hours[present], value)
    return found


def gather(lines: Sequence[Mapping[str, float]], key: str) -> np.ndarray:
    """float64 [lines]: the value of one metric; NaN in lines without it."""
    return np.array([line.get(key, np.nan) for line in lines], np.float64)


def training_hours(step: np.ndarray, step_ms: np.ndarray, first_step: int = 0) -> np.ndarray:
    """float64 [lines]: hours that the steps until each line took, without evaluations, saves and
    the time between starts; NaN if no line says how long a step takes.

    Args:
      step: int [lines], ascending.
      step_ms: [lines], mean milliseconds of a step since the last line that has one, or NaN.
    """
    known = np.flatnonzero(np.isfinite(step_ms))
    if not len(known):
        return np.full(len(step), np.nan)
    following = np.searchsorted(known, np.arange(len(step)))  # the line that averages this one
    milliseconds = step_ms[known[np.minimum(following, len(known) - 1)]]
    steps = np.diff(step, prepend=min(first_step, step[0]))
    return np.cumsum(steps * milliseconds) / 3.6e6


def thin(value: np.ndarray, most: int) -> np.ndarray:
    """int [n] indices, ascending, n <= max(most, 8): the first and the last point, and of equally
    many points at a time the smallest, the largest and the first that is not finite.

    Args:
      value: float [points].
    """
    count = len(value)
    if count <= max(most, 8):
        return np.arange(count)
    buckets = max(2, (most - 2) // 3)
    edges = np.linspace(0, count, buckets + 1).astype(int)
    is_finite = np.isfinite(value)
    low = np.where(is_finite, value, np.inf)
    high = np.where(is_finite, value, -np.inf)
    chosen = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        chosen.add(start + int(np.argmin(low[start:stop])))
        chosen.add(start + int(np.argmax(high[start:stop])))
        chosen.add(start + int(np.argmin(is_finite[start:stop])))  # the first, if all are finite
    return np.array(sorted(chosen))
