"""Rollout and distance of attention against loops in numpy, and by what must be true of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import vit_jax
from vit_jax import figures


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Attention weights, float64."""
    scores = np.random.default_rng(seed).normal(0, 2, shape)
    return scipy.special.softmax(scores, axis=-1)


def rollout_by_hand(weights: np.ndarray) -> np.ndarray:
    found = []
    for image in range(weights.shape[1]):
        flow = np.eye(weights.shape[-1])
        for layer in range(weights.shape[0]):
            heads = sum(weights[layer, image, h] for h in range(weights.shape[2]))
            flow = np.dot(0.5 * heads / weights.shape[2] + 0.5 * np.eye(len(flow)), flow)
        found.append(flow)
    return np.array(found)


SHAPES = [(3, 2, 4, 7, 7), (1, 1, 1, 1, 1), (12, 1, 1, 5, 5), (2, 3, 1, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rollout_equals_a_loop(shape):
    weights = drawn(*shape)
    wanted = rollout_by_hand(weights)
    np.testing.assert_allclose(figures.rollout(weights), wanted, atol=1e-12)
    np.testing.assert_allclose(figures.rollout(weights.tolist()), wanted, atol=1e-6)
    found = jax.jit(figures.rollout)(weights.astype(np.float32))
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_rollout_of_equal_weights_is_known():
    """Of each token 2^-layers stays where it is, the rest is spread evenly."""
    found = figures.rollout(np.full((5, 1, 2, 8, 8), 1 / 8))
    np.testing.assert_allclose(found[0], 31 / 32 / 8 + np.eye(8) / 32, atol=1e-12)


def test_later_layers_come_from_the_left():
    """Token 0 attends to 1 in the first layer; in the second, 1 attends to 2."""
    weights = np.tile(np.eye(3), (2, 1, 1, 1, 1))
    weights[0, 0, 0, 0] = [0, 1, 0]
    weights[1, 0, 0, 1] = [0, 0, 1]
    np.testing.assert_allclose(figures.rollout(weights)[0, 0], [0.5, 0.5, 0])
    np.testing.assert_allclose(figures.rollout(weights[::-1])[0, 0], [0.5, 0.25, 0.25])


def test_rows_of_a_rollout_sum_to_one_and_nan_stays_in_its_image():
    weights = drawn(12, 2, 3, 50, 50)
    half = jnp.asarray(weights, jnp.bfloat16)
    np.testing.assert_allclose(figures.rollout(half).sum(-1), 1, atol=1e-5)
    weights[3, 1, 0, 4, 4] = np.nan
    found = figures.rollout(weights)
    np.testing.assert_allclose(found[0].sum(-1), 1)
    assert np.isnan(found[1]).any()


def distance_by_hand(weights, grid, patch_size, prefix) -> np.ndarray:
    height, width = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
    places = [(y * height, x * width) for y in range(grid[0]) for x in range(grid[1])]
    found = np.zeros(weights.shape[::2][:2])
    for layer, head in np.ndindex(*found.shape):
        of_queries = []
        for image, query in itertools.product(range(weights.shape[1]), range(len(places))):
            row = weights[layer, image, head, prefix + query, prefix:]
            away = [np.hypot(*np.subtract(places[query], place)) for place in places]
            of_queries.append(np.dot(row / row.sum(), away))
        found[layer, head] = np.mean(of_queries)
    return found


GRIDS = [((4, 4), 16, 1), ((2, 5), (8, 12), 2), ((3, 2), 1, 0), ((3, 3), 14, 5), ((1, 1), 16, 1)]


@pytest.mark.parametrize(("grid", "patch_size", "prefix"), GRIDS, ids=str)
def test_distance_equals_a_loop(grid, patch_size, prefix):
    length = prefix + grid[0] * grid[1]
    weights = drawn(3, 2, 4, length, length)
    wanted = distance_by_hand(weights, grid, patch_size, prefix)
    found = figures.mean_distance(weights, grid, patch_size, prefix)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    measured = jax.jit(figures.mean_distance, static_argnums=(1, 2, 3))
    found = measured(weights.astype(np.float32), grid, patch_size, prefix)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_distances_that_are_known():
    """A patch that looks at itself, to the right, and everywhere; the class token does not count,
    and integers are weights, too.
    """
    to_right = np.roll(np.eye(4, dtype=int), 1, axis=1)
    for patches, wanted in [(np.eye(4), 0), (to_right, 1.5 * 10), (np.ones((4, 4)) / 8, 1.25 * 10)]:
        weights = np.zeros((1, 1, 1, 5, 5), patches.dtype)
        weights[..., 1:, 1:] = patches
        weights[..., 0, 2] = 1  # a query that is dropped
        weights[..., 1:, 0] = 1 - patches.sum(-1)
        found = figures.mean_distance(weights, (1, 4), 10)
        np.testing.assert_allclose(found, [[wanted]])


def test_queries_without_weight_on_patches_do_not_count():
    weights = drawn(1, 2, 3, 5, 5)
    weights[:, :, 1] = [1, 0, 0, 0, 0]
    weights[0, 0, 2, 1:] = [1, 0, 0, 0, 0]
    found = figures.mean_distance(weights, (2, 2), 8)
    assert found.shape == (1, 3) and np.isnan(found[0, 1])
    wanted = distance_by_hand(weights[:, :, :1], (2, 2), 8, 1)
    np.testing.assert_allclose(found[0, 0], wanted[0, 0])
    wanted = distance_by_hand(weights[:, 1:, 2:], (2, 2), 8, 1)
    np.testing.assert_allclose(found[0, 2], wanted[0, 0])
    weights[0, 1, 0, 3, 3] = np.nan
    found = figures.mean_distance(weights, (2, 2), 8)
    assert np.isnan(found).tolist() == [[True, True, False]]


def test_a_grid_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"num_prefix 2 and grid \(2, 2\): .* must be 6"):
        figures.mean_distance(drawn(1, 1, 1, 5, 5), (2, 2), 16, num_prefix=2)


TOKENS = dict(num_classes=2, image_size=(4, 6), width=8, depth=2, mlp_dim=8, num_heads=2)
# Fields of the model -> rows that the head reads, of 1 x 3 patches; None: all patches.
READ = [
    (dict(), [0]),
    (dict(distilled=True, registers=1), [0, 1]),
    (dict(pool="tok_gap", registers=2), [0]),
    (dict(pool="gap"), None),
    (dict(pool="gap", class_token=True), None),
    (dict(pool="0", registers=1), [1]),
    (dict(pool="unpooled"), None),
]


@pytest.mark.parametrize(("fields", "rows"), READ, ids=str)
def test_maps_are_of_what_the_head_reads(fields, rows):
    model = vit_jax.create_model(patch_size=(4, 2), **TOKENS | fields)
    prefix = model.num_prefix
    length = prefix + 3
    weights = drawn(2, 4, 2, length, length)
    found = dict(attention=weights, grid=(1, 3), num_prefix=prefix)
    rows = list(range(prefix, length)) if rows is None else rows
    wanted = figures.rollout(weights)[:, rows, prefix:].mean(1)
    np.testing.assert_allclose(figures.attention_map(model, found), wanted[:, None])
    wanted = weights[-1][:, :, rows, prefix:].mean(2)
    np.testing.assert_allclose(figures.head_maps(model, found), wanted[:, :, None])


def test_maps_of_attention_pooling():
    model = vit_jax.create_model(patch_size=(4, 2), **TOKENS, pool="map", registers=1)
    weights = drawn(2, 4, 2, 4, 4)
    pooling = drawn(4, 2, 1, 3, seed=1)
    found = dict(attention=weights, pooling_attention=pooling, grid=(3, 1), num_prefix=1)
    np.testing.assert_allclose(figures.head_maps(model, found), pooling.reshape(4, 2, 3, 1))
    flow = figures.rollout(weights)
    wanted = [pooling[i, :, 0].mean(0) @ flow[i, 1:, 1:] for i in range(4)]
    np.testing.assert_allclose(figures.attention_map(model, found)[..., 0], wanted)
