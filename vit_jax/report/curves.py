"""Which metrics of runs a page draws, with how many points, and over which horizontal axes."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.report import series
from vit_jax.report.run import Run
from vit_jax.report.series import Series

MOST_POINTS = 1_000  # of a curve, twice the pixels of a chart
ALL_POINTS = 80_000  # of a page: 12 bytes each
MOST_CHARTS = 36  # of a page; a browser needs about 60 ms for each,
MOST_CURVES = 240  # and 15 ms for each curve
WIDE = ("loss", "norm", "_ms")  # in names of metrics that may span orders of magnitude
LOGARITHMIC_FROM = 100  # largest by smallest value

# Beginning of a metric -> heading; "" has the others.
GROUPS = {"train": "Training", "eval": "Evaluations", "perf": "Speed", "": "Other"}
FIRST = ("train/loss", "train/grad_norm", "train/lr")
# One is always in proportion to another metric, one has a value per start.
NOT_DRAWN = ("perf/images_per_sec_per_chip", "perf/compile_s")

COMPUTE_UNITS = {1e21: "ZFLOPs", 1e18: "EFLOPs", 1e15: "PFLOPs", 1e12: "TFLOPs", 1e9: "GFLOPs"}
TIME_UNITS = {1.0: "hours", 1 / 60: "minutes", 1 / 3600: "seconds"}


@dataclasses.dataclass(frozen=True)
class Axis:
    """A horizontal axis to choose."""

    name: str  # of the column
    title: str
    label: str
    column: str  # from which it is computed
    factors: tuple[float, ...]  # of the runs

    @property
    def tooltip(self) -> str:
        """One line of HTML for each curve below the mouse; Bokeh escapes what it fills in."""
        return f"<div><b>$name</b> @value, {self.label} @{self.name}{{0,0.[000]}}</div>"


@dataclasses.dataclass(frozen=True)
class Chart:
    """The curves of one metric."""

    key: str
    curves: dict[int, Series]  # index of the run -> what is drawn
    notes: list[str]

    @property
    def group(self) -> str:
        name = self.key.partition("/")[0]
        return GROUPS.get(name, GROUPS[""])

    @property
    def is_logarithmic(self) -> bool:
        """Whether a loss, norm or time spans orders of magnitude."""
        name = self.key.rpartition("/")[2]
        values = np.concatenate([one.finite for one in self.curves.values()])
        if not len(values) or not any(word in name for word in WIDE):
            return False
        return 0 < values.min() * LOGARITHMIC_FROM < values.max()


def importance(key: str) -> tuple:
    """Sorts metrics: the loss first."""
    names = list(GROUPS)
    group = key.partition("/")[0]
    rank = names.index(group) if group in names else len(names)
    return (rank, FIRST.index(key) if key in FIRST else len(FIRST), key)


def is_drawn(key: str, found: Sequence[Series]) -> bool:
    """Whether a metric is more than one value."""
    return key not in NOT_DRAWN and any(not one.is_constant for one in found)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a page draws."""

    charts: list[Chart]
    points: int  # of a curve, at most
    constant: list[tuple[str, str]]  # (metric, value) of those that have one value
    too_many: list[str]  # metrics that are left out


def choose(runs: Sequence[Run]) -> Choice:
    """Charts of the metrics of all runs, the most important first."""
    keys = sorted({key for run in runs for key in run.series}, key=importance)
    drawn = []
    constant = []
    for key in keys:
        found = [run.series[key] for run in runs if key in run.series]
        if is_drawn(key, found):
            drawn.append(key)
        elif key not in NOT_DRAWN:
            values = sorted({f"{one.value[0]:.6g}" for one in found})
            constant.append((key, " and ".join(values[:3])))
    most = min(MOST_CHARTS, max(4, MOST_CURVES // len(runs)))
    curves = sum(key in run.series for run in runs for key in drawn[:most])
    points = min(MOST_POINTS, ALL_POINTS // max(curves, 1))
    charts = [make_chart(key, runs, points) for key in drawn[:most]]
    return Choice(charts, points, constant, drawn[most:])


def make_chart(key: str, runs: Sequence[Run], points: int) -> Chart:
    curves = {}
    notes = []
    for i, run in enumerate(runs):
        one = run.series.get(key)
        if one is None:
            continue
        bad = ~np.isfinite(one.value)
        if bad.any():
            where = f"{run.label}: " if len(runs) > 1 else ""
            first = one.step[np.argmax(bad)]
            share = f"{bad.sum():,} of {len(bad):,} values"
            notes.append(f"{where}not finite: {share}, the first at step {first:,}")
        curves[i] = one.take(series.thin(one.value, points))
    return Chart(key, curves, notes)


def axes_of(runs: Sequence[Run]) -> list[Axis]:
    """The horizontal axes for which at least one run says what is needed."""
    images = sizes(runs, "batch_size")
    compute = images * sizes(runs, "train_flops_per_image")
    last = np.array([run.last_step for run in runs], float)
    hours = np.array([run.hours for run in runs])
    flops_unit = unit(compute * last, COMPUTE_UNITS)
    time_unit = unit(hours, TIME_UNITS)
    per_hour = np.where(np.isnan(hours), np.nan, 1 / time_unit)
    time = f"training time, {TIME_UNITS[time_unit]}"
    flops = f"training compute, {COMPUTE_UNITS[flops_unit]}"
    found = [
        Axis("step", "steps", "step", "step", (1.0,) * len(runs)),
        Axis("epoch", "epochs", "epoch", "step", tuple(images / sizes(runs, "num_examples"))),
        Axis("image", "images", "images", "step", tuple(images)),
        Axis("time", "time", time, "hours", tuple(per_hour)),
        Axis("compute", "FLOPs", flops, "step", tuple(compute / flops_unit)),
    ]
    return [axis for axis in found if np.isfinite(axis.factors).any()]


def sizes(runs: Sequence[Run], name: str) -> np.ndarray:
    """float64 [runs]: `Run.size`; NaN if it is not known."""
    return np.array([run.size(name) or np.nan for run in runs], float)


def unit(values: np.ndarray, units: dict[float, str]) -> float:
    """The largest unit of which the largest value has at least one."""
    values = values[np.isfinite(values)]
    largest = values.max() if len(values) else 0
    return next((one for one in units if largest >= one), list(units)[-1])
