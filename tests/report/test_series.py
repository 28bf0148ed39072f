"""Metrics as arrays, against plain loops."""

import numpy as np
import pytest

from vit_jax.report import series


def random_values(seed: int, count: int, share_bad: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.cumsum(rng.standard_normal(count))
    values[rng.integers(0, count, count // 50)] *= 100  # spikes
    bad = rng.random(count) < share_bad
    values[bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    return values


def peaks(values: np.ndarray, reach: int) -> set[int]:
    """Finite values that are the largest among their `reach` neighbours on each side."""
    values = np.where(np.isfinite(values), values, -np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(values, 2 * reach + 1)
    centre = windows[:, reach]
    return set(np.flatnonzero((centre == windows.max(1)) & np.isfinite(centre)) + reach)


@pytest.mark.parametrize("share_bad", [0, 0.01, 0.9, 1])
@pytest.mark.parametrize("most", [20, 100, 999])
def test_thinning_keeps_extremes_ends_and_gaps(most, share_bad):
    for seed in range(3):
        values = random_values(seed, 5_000, share_bad)
        chosen = series.thin(values, most)
        assert len(chosen) <= most and (np.diff(chosen) > 0).all()
        assert chosen[0] == 0 and chosen[-1] == len(values) - 1
        reach = len(values) // max(2, (most - 2) // 3) + 1  # at least the points of a bucket
        assert peaks(values, reach) | peaks(-values, reach) <= set(chosen)
        assert np.isfinite(values[chosen]).all() == np.isfinite(values).all()
        finite = values[np.isfinite(values)]
        if len(finite):
            assert {finite.min(), finite.max()} <= set(values[chosen])


def test_few_points_are_all_kept():
    for count in (0, 1, 2, 8, 30):
        np.testing.assert_array_equal(series.thin(np.zeros(count), 30), np.arange(count))


def test_every_gap_between_two_kept_points_stays_one():
    """A stretch without a finite value is not bridged by a line."""
    values = np.sin(np.arange(10_000) / 100)
    values[4_000:6_000] = np.nan
    shown = values[series.thin(values, 100)]
    bad = np.flatnonzero(np.isnan(shown))
    assert (
        len(bad) and np.isfinite(shown[: bad[0]]).all() and np.isfinite(shown[bad[-1] + 1 :]).all()
    )


def test_hours_are_those_of_the_steps():
    step = np.array([10, 20, 25, 30, 40])
    step_ms = np.array([100, 200, np.nan, 400, np.nan])  # a line of an evaluation alone has none
    seconds = np.array([1, 3, 5, 7, 11])
    np.testing.assert_allclose(series.training_hours(step, step_ms) * 3600, seconds)
    branched = series.training_hours(step, step_ms, first_step=5)
    np.testing.assert_allclose(branched * 3600, seconds - 0.5)
    assert np.isnan(series.training_hours(step, np.full(5, np.nan))).all()


def test_a_metric_has_the_lines_that_name_it():
    lines = [
        {"step": 30, "loss": 1.0},
        {"step": 10, "loss": float("nan"), "top1": 0.5, "perf/step_ms": 3.6e6},
        {"step": 20, "top1": 0.75},
    ]
    found = series.from_lines(lines)
    assert found.keys() == {"loss", "top1", "perf/step_ms"}
    np.testing.assert_array_equal(found["loss"].step, [10, 30])
    np.testing.assert_array_equal(found["loss"].value, [np.nan, 1.0])
    np.testing.assert_array_equal(found["loss"].finite, [1.0])
    np.testing.assert_array_equal(found["top1"].hours, [10, 20])
    assert found["perf/step_ms"].is_constant and not found["top1"].is_constant
