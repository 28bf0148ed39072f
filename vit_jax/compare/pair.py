"""Two runs compared: whether they are the same, where they begin to differ, and why."""

import dataclasses

from vit_jax.compare import causes, departure
from vit_jax.compare.departure import Departure
from vit_jax.errors import UserError
from vit_jax.report import reference
from vit_jax.report.reference import Reference
from vit_jax.report.run import Run
from vit_jax.report.series import or_none


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
    other_recipe: list[str]  # what differs in the recipe or the data

    @property
    def within_interval(self) -> bool:
        """Whether `a` is a reference that was computed otherwise, and `b`, of the same recipe and
        data, ended as it should.
        """
        is_as_expected = self.b.is_over and not self.outside and not self.other_recipe
        return bool(self.has_intervals and self.by_rounding) and is_as_expected

    @property
    def has_intervals(self) -> bool:
        return isinstance(self.a, Reference) and bool(self.a.intervals)

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
            values=found and [or_none(value) for value in found.values],
            last_same_step=found and found.last_same,
            beyond_rounding_step=self.beyond_rounding and self.beyond_rounding.step,
            tolerance=self.tolerance,
            outside_interval={key: list(values) for key, values in self.outside.items()},
            other_recipe=self.other_recipe,
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
        other_recipe=causes.of_the_recipe(a, b),
    )


def outside(a: Run, b: Run) -> dict[str, tuple[float | None, float, float]]:
    """Metric -> (value of b, low, high) of what is not within an interval of the reference a; None
    for a value that is not there, or not finite.
    """
    if not isinstance(a, Reference) or not b.is_over:
        return {}
    found = reference.outcome(b)
    checked = {key: (found.get(key), *ends) for key, ends in a.intervals.items()}
    return {key: all_three for key, all_three in checked.items() if not is_between(*all_three)}


def is_between(value: float | None, low: float, high: float) -> bool:
    return value is not None and low <= value <= high
