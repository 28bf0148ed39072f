"""Norms, colours and similarity of tokens against scikit-learn and numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from vit_jax import figures
from vit_jax.figures import tokens


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def test_norms_are_lengths():
    x = drawn(3, 2, 5, 8)
    np.testing.assert_allclose(figures.token_norms(x), np.linalg.norm(x, axis=-1))
    half = jnp.full((2, 4096), 1.5, jnp.bfloat16)
    np.testing.assert_allclose(jax.jit(figures.token_norms)(half), 96)


def test_colors_are_the_components_of_all_images_together():
    x = drawn(3, 2, 5, 8) * np.arange(1, 9) + np.arange(3)[:, None, None, None]
    found = figures.principal_colors(x)
    parts = PCA(3, svd_solver="full").fit_transform(x.reshape(30, 8))
    wanted = (parts - parts.min(0)) / (parts.max(0) - parts.min(0))
    np.testing.assert_allclose(found.reshape(30, 3), wanted, atol=1e-8)
    moved = figures.principal_colors(np.roll(x, 1, axis=0))
    np.testing.assert_allclose(moved, np.roll(found, 1, axis=0), atol=1e-8)


def test_two_kinds_of_patches_have_two_colors_in_all_images():
    x = np.zeros((2, 2, 2, 4))
    x[0, 0, 0] = x[1, 1] = [0, 3, 0, 0]
    found = figures.principal_colors(x)
    assert {tuple(color) for color in found.reshape(-1, 3)} == {(0, 0.5, 0.5), (1, 0.5, 0.5)}
    np.testing.assert_array_equal(found[0, 0, 0], found[1, 1, 1])


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 2, 8), (2, 3, 3, 1), (2, 3, 3, 2)])
def test_components_that_are_missing_are_grey(shape):
    found = figures.principal_colors(drawn(*shape))
    known = min(3, np.prod(shape[:3]) - 1, shape[-1])
    assert found.shape == (*shape[:-1], 3)
    assert (found[..., known:] == 0.5).all()
    assert (found[..., :known].min((0, 1, 2)) == 0).all()
    assert (found[..., :known].max((0, 1, 2)) == 1).all()


@pytest.mark.parametrize("value", [0.0, 7.25, 1e30])
def test_features_that_are_all_the_same_are_grey(value):
    assert (figures.principal_colors(np.full((2, 3, 3, 5), value)) == 0.5).all()


def test_features_that_are_not_finite_are_refused():
    x = drawn(1, 2, 2, 3)
    x[0, 1, 1, 2] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        figures.principal_colors(x)
    with pytest.raises(ValueError, match="not finite"):
        figures.patch_similarity(x, [(0, 0)])


def test_similarity_of_patches_is_that_of_scikit_learn():
    x = drawn(2, 3, 4, 8)
    x[1, 2, 3] = 0
    queries = [(0, 0), (2, 3), (1, 2)]
    found = figures.patch_similarity(x, queries)
    assert found.shape == (2, 3, 3, 4)
    for i in range(2):
        wanted = cosine_similarity(x[i].reshape(12, 8))[[0, 11, 6]]
        np.testing.assert_allclose(found[i].reshape(3, 12), wanted, atol=1e-12)
    assert not found[1, 1].any()


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (2, 2), (14, 14), (37, 20)])
def test_queries_are_patches_of_the_grid(grid):
    found = tokens.spread_queries(grid)
    assert found[0] == (grid[0] // 2, grid[1] // 2) and len(set(found)) == len(found)
    assert all(0 <= y < grid[0] and 0 <= x < grid[1] for y, x in found)
    assert len(found) == {1: 1, 5: 3, 4: 4}.get(grid[0] * grid[1], 5)
