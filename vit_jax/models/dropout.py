"""Dropout and stochastic depth. Their `noise` is a dict of a layer's `key` and `droppath` rate (or
None), or None in evaluation.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# The random masks of a layer, each with a key of its own.
ATTENTION, HIDDEN, MLP, ATTENTION_PATH, MLP_PATH = range(5)

# Rate of stochastic depth in a layer, from the `share` of the depth that precedes it.
DROPPATH_SHAPES = {
    "linear": lambda rate, share: rate * share,
    "constant": lambda rate, share: rate * jnp.ones_like(share),
}


def mixed(x, key):
    """uint32 -> uint32: a hash whose bits, most of all the high ones, depend on all bits of x and
    `key`. The multipliers are those of Chris Wellons' hash-prospector.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = x ^ key
    return (x ^ (x >> 15)) * np.uint32(0x735A2D97)


def bernoulli(key, probability: float, shape: tuple[int, ...]):
    """Random booleans [batch, ...], which are true with that probability.

    Those of threefry are `jax.random.bernoulli`'s. For other generators each is a hash of the key,
    the example and the position in it: the compiler computes it where a product needs it, so that
    it takes no memory, and on every mesh it is the same. (XLA does not split the draws of other
    generators, and keeps what they drew: 1.9 GiB for L/16 with 64 images, as bytes.)
    """
    if "threefry" in str(jax.random.key_impl(key)):
        return jax.random.bernoulli(key, probability, shape)
    words = jax.random.key_data(key)
    column = (shape[0],) + (1,) * (len(shape) - 1)
    example = mixed(jax.lax.broadcasted_iota(np.uint32, column, 0) ^ words[0], words[1])
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    position = sum(
        jax.lax.broadcasted_iota(np.uint32, (1, *shape[1:]), axis) * np.uint32(strides[axis])
        for axis in range(1, len(shape))
    )
    threshold = min(round(probability * 2**32), 2**32 - 1)
    return mixed(position ^ example, mixed(example, words[0])) < np.uint32(threshold)


def dropout(x, rate: float, noise: dict | None, index: int):
    """Dropout with one of the masks above (`index`): [batch, length, embed] -> the same."""
    if noise is None or rate == 0.0:
        return x
    key = jax.random.fold_in(noise["key"], index)
    mask = bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros_like(x))


def droppath(x, noise: dict | None, index: int):
    """Stochastic depth (arXiv 1603.09382): drops the whole residual branch per example.

    x: [batch, length, embed].
    """
    if noise is None or noise["droppath"] is None:
        return x
    keep = 1.0 - noise["droppath"]
    mask = jax.random.bernoulli(jax.random.fold_in(noise["key"], index), keep, (x.shape[0], 1, 1))
    return x * (mask / keep).astype(x.dtype)
