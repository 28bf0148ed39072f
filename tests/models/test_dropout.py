"""Random masks of dropout: against their definition in NumPy, and as random as draws."""

import itertools

import jax
import numpy as np
import pytest

from vit_jax.models.dropout import bernoulli

SHAPE = (64, 40, 256)
KEEP = 0.9


@pytest.fixture(scope="module")
def masks():
    """Those of four layers of two steps, as the encoder derives their keys."""
    root = jax.random.key(0, impl="rbg")
    keys = [jax.random.split(jax.random.fold_in(root, step), 4) for step in (7, 8)]
    draw = jax.jit(lambda key: bernoulli(key, KEEP, SHAPE))
    return [np.asarray(draw(jax.random.fold_in(key, 1))) for step in keys for key in step]


def mixed(x, key):
    """The hash in Python's integers."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32 ^ key
    return (x ^ (x >> 15)) * 0x735A2D97 % 2**32


def test_a_mask_is_a_hash_of_key_example_and_position():
    key = jax.random.fold_in(jax.random.key(3, impl="rbg"), 5)
    first, second = (int(word) for word in jax.random.key_data(key)[:2])
    shape = (3, 5, 7)
    found = np.asarray(bernoulli(key, 0.25, shape))
    for example, row, column in itertools.product(*map(range, shape)):
        own = mixed(example ^ first, second)
        value = mixed((row * 7 + column) ^ own, mixed(own, first))
        assert found[example, row, column] == (value < 2**30)


def test_the_limits_of_a_probability():
    key = jax.random.key(0, impl="rbg")
    assert bernoulli(key, 1.0, SHAPE).all()
    assert not bernoulli(key, 0.0, SHAPE).any()


def test_as_many_are_true_in_each_example_row_and_column_as_draws_have(masks):
    """The counts along each axis have the mean and the variance of a binomial distribution, within
    5 standard deviations of each.
    """
    for mask, axes in itertools.product(masks, [(1, 2), (0, 2), (0, 1)]):
        counts = mask.sum(axes)
        trials = mask.size // counts.size
        variance = trials * KEEP * (1 - KEEP)
        assert abs(counts.mean() - trials * KEEP) < 5 * (variance / counts.size) ** 0.5
        ratio = counts.var(ddof=1) / variance
        assert abs(ratio - 1) < 5 * (2 / (counts.size - 1)) ** 0.5


@pytest.mark.parametrize("shift", [1, 2, 3, 16, 32])
def test_neighbours_are_independent(masks, shift):
    """The correlation with the mask shifted along each axis, within 5 standard deviations of 0."""
    for mask, axis in itertools.product(masks, range(3)):
        other = np.roll(mask, shift, axis)
        found = np.corrcoef(mask.ravel(), other.ravel())[0, 1]
        assert abs(found) < 5 / mask.size**0.5


def test_layers_and_steps_are_independent(masks):
    for mask, other in itertools.combinations(masks, 2):
        assert abs(np.corrcoef(mask.ravel(), other.ravel())[0, 1]) < 5 / mask.size**0.5
        # Nor is one example's mask that of another layer.
        same = (mask[:, None] == other[None]).mean((2, 3))
        expected = KEEP**2 + (1 - KEEP) ** 2
        assert abs(same - expected).max() < 6 * (expected * (1 - expected) / mask[0].size) ** 0.5
