"""The first step at which the metrics of two runs differ. Pure functions."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax.report.curves import importance
from vit_jax.report.series import Series

COMPARED = ("train/", "eval/")  # beginnings of metrics; the others are about time


@dataclasses.dataclass(frozen=True)
class Departure:
    step: int
    quantity: str
    values: tuple[float, float]
    last_same: int | None  # the last step before it that both logged; None if there is none


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 [points]: differences relative to the larger of two values; infinite if one of them
    is not finite and they are not the same.
    """
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        found = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    found = np.where(np.isfinite(a) & np.isfinite(b), found, np.inf)
    return np.where(same, 0.0, found)


def common(a: Series, b: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64 steps that both have, the values of a, those of b)."""
    steps, in_a, in_b = np.intersect1d(a.step, b.step, return_indices=True)
    return steps, a.value[in_a], b.value[in_b]


def compared(a: Mapping[str, Series], b: Mapping[str, Series]) -> list[str]:
    """The metrics that both runs have at some step, the most important first."""
    keys = [key for key in a if key in b and key.startswith(COMPARED)]
    return sorted((key for key in keys if len(common(a[key], b[key])[0])), key=importance)


def first(a: Mapping[str, Series], b: Mapping[str, Series], tolerance: float) -> Departure | None:
    """The first step at which a metric differs by more than `tolerance`, relative to the larger
    value; None if there is none.
    """
    found = None
    all_steps = set()
    for key in compared(a, b):
        steps, of_a, of_b = common(a[key], b[key])
        all_steps.update(steps.tolist())
        differs = relative(of_a, of_b) > tolerance
        index = int(np.argmax(differs))
        if differs.any() and (found is None or steps[index] < found.step):
            values = (float(of_a[index]), float(of_b[index]))
            found = Departure(int(steps[index]), key, values, None)
    if found is None:
        return None
    before = [step for step in all_steps if step < found.step]
    return dataclasses.replace(found, last_same=max(before, default=None))
