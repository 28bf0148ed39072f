"""Dropout and stochastic depth. Their `noise` is a dict of a layer's `key` and `droppath` rate (or
None), or None in evaluation.
"""

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding

# Rate of stochastic depth in a layer, from the `share` of the depth that precedes it.
DROPPATH_SHAPES = {
    "linear": lambda rate, share: rate * share,
    "constant": lambda rate, share: rate * jnp.ones_like(share),
}


def dropout(x, rate: float, noise: dict | None, index: int, last: str = "embed"):
    """Dropout with the `index`-th mask of the layer's key.

    x: [batch, length, embed], or another logical axis as the `last`.
    """
    if noise is None or rate == 0.0:
        return x
    key = jax.random.fold_in(noise["key"], index)
    mask, probability = sharding.bernoulli(key, 1.0 - rate, x.shape, "batch", "length", last)
    return jnp.where(mask, x / probability, jnp.zeros_like(x))


def droppath(x, noise: dict | None, index: int):
    """Stochastic depth (arXiv 1603.09382): drops the whole residual branch per example.

    x: [batch, length, embed].
    """
    if noise is None or noise["droppath"] is None:
        return x
    keep = 1.0 - noise["droppath"]
    mask = jax.random.bernoulli(jax.random.fold_in(noise["key"], index), keep, (x.shape[0], 1, 1))
    return x * (mask / keep).astype(x.dtype)
