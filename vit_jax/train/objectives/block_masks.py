"""Blocks of patches that iBOT (arXiv 2111.07832) hides from the student, drawn on the device.

The choice is that of DINOv2's published code: rectangles, one after the other, of 4 patches or more
and at most as many as are still wanted, with an aspect ratio from 0.3 to 1 / 0.3. Theirs end when
enough patches are hidden or ten rectangles in a row do not fit. Here 32 are tried, so that devices
need not wait for each other: about one image in a thousand would need more.
"""

import math

import jax
import jax.numpy as jnp

SHARE = (0.1, 0.5)  # of the patches of an image
MIN_AREA = 4.0  # patches
LOG_ASPECT = -math.log(0.3)  # of the largest; the smallest is its inverse
TRIES = 32


def most(patches: int) -> int:
    """The largest number of hidden patches of an image."""
    return int(patches * SHARE[1])


def rectangle(key, grid: tuple[int, int], largest):
    """A random rectangle: bool [h, w], all False if it does not fit into the grid.

    Args:
      largest: patches, float [].
    """
    of_area, of_aspect, of_top, of_left = jax.random.uniform(key, (4,))
    area = MIN_AREA + (largest - MIN_AREA) * of_area
    aspect = jnp.exp((2 * of_aspect - 1) * LOG_ASPECT)
    height = jnp.round(jnp.sqrt(area * aspect))
    width = jnp.round(jnp.sqrt(area / aspect))
    y = jnp.arange(grid[0])[:, None] - jnp.floor(of_top * (grid[0] - height + 1))
    x = jnp.arange(grid[1]) - jnp.floor(of_left * (grid[1] - width + 1))
    fits = (height < grid[0]) & (width < grid[1])
    return fits & (y >= 0) & (y < height) & (x >= 0) & (x < width)


def blocks(key, grid: tuple[int, int], wanted):
    """Hidden patches of one image, bool [h, w]: at most `wanted`, int []."""

    def add(number, hidden):
        missing = wanted - hidden.sum()
        block = rectangle(jax.random.fold_in(key, number), grid, missing.astype(jnp.float32))
        added = (block & ~hidden).sum()
        return hidden | (block & (added <= missing))

    return jax.lax.fori_loop(0, TRIES, add, jnp.zeros(grid, bool))


def draw(key, grid: tuple[int, int]):
    """Hides patches of one of the two global views of an example, so that half of all are masked.

    Returns:
      hidden: bool [2, patches].
      index: int32 [most], the hidden ones among the 2 * patches, and then some that are not.
      weight: float32 [most], the share of each in the loss: their sum is 1, or 0 if none is hidden;
        0 for those that are not.
    """
    patches = math.prod(grid)
    choice_key, block_key = jax.random.split(key)
    of_share, of_view = jax.random.uniform(choice_key, (2,))
    share = SHARE[0] + (SHARE[1] - SHARE[0]) * of_share
    wanted = (patches * share).astype(jnp.int32)
    mask = blocks(block_key, grid, wanted).reshape(patches)
    order = jnp.argsort(~mask, stable=True)[: most(patches)]
    weight = mask[order] / jnp.maximum(mask.sum(), 1)
    view = (of_view < 0.5).astype(jnp.int32)
    hidden = mask & (jnp.arange(2) == view)[:, None]
    return hidden, order + view * patches, weight
