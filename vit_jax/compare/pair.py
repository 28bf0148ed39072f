"""Two runs held against each other: whether they are the same, where they part, and why."""

import dataclasses

import numpy as np

from vit_jax.compare import causes, departure
from vit_jax.compare.departure import Departure
from vit_jax.errors import UserError
from vit_jax.report import reference
from vit_jax.report.reference import Reference
from vit_jax.report.run import Run


@dataclasses.dataclass(frozen=True)
class Pair:
    a: Run
    b: Run
    tolerance: float  # relative
    departure: Departure | None  # beyond the tolerance
    by_rounding: list[str]  # why the runs may differ by rounding
    beyond_rounding: Departure | None  # by more than that in one step
    outside: dict[str, tuple[float, float, float]]  # metric -> (value, low, high) of the reference
    causes: list[str]

    @property
    def within_interval(self) -> bool:
        """Whether `a` is a reference that was computed otherwise, and `b` ended as it should."""
        is_expected = isinstance(self.a, Reference) and self.a.intervals and self.by_rounding
        return bool(is_expected) and not self.outside

    @property
    def same(self) -> bool:
        return self.departure is None or self.within_interval

    def to_json(self) -> dict:
        found = self.departure
        return dict(
            a=self.a.label,
            b=self.b.label,
            same=self.same,
            first_step=found and found.step,
            quantity=found and found.quantity,
            values=found and list(found.values),
            last_same_step=found and found.last_same,
            beyond_rounding_step=self.beyond_rounding and self.beyond_rounding.step,
            tolerance=self.tolerance,
            outside_interval={key: list(values) for key, values in self.outside.items()},
            config=causes.config_differences(self.a, self.b),
            data=causes.one_difference(self.a, self.b, "data_fingerprint"),
            code=causes.one_difference(self.a, self.b, "code"),
            commit=causes.one_difference(self.a, self.b, "commit"),
            versions=causes.record_differences(self.a, self.b, "versions"),
            devices=causes.record_differences(self.a, self.b, "devices"),
            causes=self.causes,
        )


def compare(a: Run, b: Run, tolerance: float = 0.0) -> Pair:
    """
    Args:
      tolerance: relative to the larger value.

    Raises:
      UserError: they have no step in common.
    """
    if not departure.compared(a.series, b.series):
        raise UserError(
            f"{a.label} and {b.label} have no metric at the same step: compare runs that have "
            "begun, with the same log_every"
        )
    found = departure.first(a.series, b.series, tolerance)
    return Pair(
        a=a,
        b=b,
        tolerance=tolerance,
        departure=found,
        by_rounding=causes.sums_differently(a, b),
        beyond_rounding=departure.first(a.series, b.series, causes.rounding(a, b)),
        outside=outside(a, b),
        causes=causes.causes(a, b, found) if found else [],
    )


def outside(a: Run, b: Run) -> dict[str, tuple[float, float, float]]:
    """Metric -> (value of b, low, high) of what is not within an interval of the reference a."""
    if not isinstance(a, Reference):
        return {}
    found = reference.outcome(b)
    checked = {key: (found.get(key, np.nan), *ends) for key, ends in a.intervals.items()}
    return {key: all_three for key, all_three in checked.items() if not is_between(*all_three)}


def is_between(value: float, low: float, high: float) -> bool:
    return low <= value <= high
