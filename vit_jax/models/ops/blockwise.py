"""Attention that never stores the weights [batch, heads, length, length]: its memory grows linearly
with the tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.models.ops.scaling import scaled

# Keys per step of `blockwise`: more take more memory for their scores, and fewer steps.
KEY_BLOCK = 512


def blocks_of(length: int, largest: int) -> tuple[int, int]:
    """(count, size) of equal blocks, as few as `largest` allows, with less than one row of padding
    per block.
    """
    count = math.ceil(length / largest)
    return count, math.ceil(length / count)


def key_blocks(key, value):
    """Blocks of keys and values, two [count, batch, size, heads, kv], and a bool [count, size] that
    is false for padding.
    """
    length = key.shape[1]
    count, size = blocks_of(length, KEY_BLOCK)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    return cut(key), cut(value), (jnp.arange(count * size) < length).reshape(count, size)


def block_scores(query, key, exists, dtype):
    """Scores of all scaled queries and one block of keys, -infinity for padding: [batch, heads,
    length, size].
    """
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key, preferred_element_type=dtype)
    return jnp.where(exists, scores, -jnp.inf)


def sum_dtype(x) -> jnp.dtype:
    """The dtype of softmax and sums: float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def forward(query, key, value):
    """The output, and the residuals: the inputs, the output, and the log of every softmax's sum."""
    dtype = sum_dtype(query)
    scaled_query = scaled(query)
    batch, length, heads, _ = query.shape

    def add(carry, block):
        largest, total, output = carry
        key, value, exists = block
        scores = block_scores(scaled_query, key, exists, dtype)
        new = jnp.maximum(largest, scores.max(-1))  # finite: no block is all padding
        weights = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(largest - new)
        part = jnp.einsum(
            "bhqv,bvhk->bhqk", weights.astype(value.dtype), value, preferred_element_type=dtype
        )
        return (new, total * shrink + weights.sum(-1), output * shrink[..., None] + part), None

    largest = jnp.full((batch, heads, length), -jnp.inf, dtype)
    total = jnp.zeros((batch, heads, length), dtype)
    output = jnp.zeros((batch, heads, length, value.shape[-1]), dtype)
    carry, _ = jax.lax.scan(add, (largest, total, output), key_blocks(key, value))
    largest, total, output = carry
    output = (output / total[..., None]).astype(query.dtype).swapaxes(1, 2)
    return output, (query, key, value, output, largest + jnp.log(total))


def backward(residuals, gradient):
    """Gradients of query, key and value; the weights are computed again block by block (arXiv
    2205.14135, B.4).
    """
    query, key, value, output, log_total = residuals
    dtype = sum_dtype(query)
    scale = 1 / math.sqrt(query.shape[-1])
    scaled_query = scaled(query)
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    mean = product("bqhk,bqhk->bhq", gradient, output)[..., None]

    def add(of_query, block):
        key, value, exists = block
        weights = jnp.exp(block_scores(scaled_query, key, exists, dtype) - log_total[..., None])
        of_value = product("bhqv,bqhk->bvhk", weights.astype(value.dtype), gradient)
        of_scores = weights * (product("bqhk,bvhk->bhqv", gradient, value) - mean)
        of_scores = of_scores.astype(key.dtype)
        of_key = product("bhqv,bqhk->bvhk", of_scores, scaled_query)
        of_query += product("bhqv,bvhk->bqhk", of_scores, key) * scale
        return of_query, (of_key.astype(key.dtype), of_value.astype(value.dtype))

    start = jnp.zeros(query.shape, dtype)
    of_query, blocks = jax.lax.scan(add, start, key_blocks(key, value))

    def join(x):
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : key.shape[1]]

    return of_query.astype(query.dtype), *map(join, blocks)


@jax.custom_vjp
def blockwise(query, key, value):
    """Attention over blocks of keys with a running maximum and sum (arXiv 2112.05682); softmax in
    float32.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].

    Returns:
      [batch, length, heads, kv] in the dtype of `query`.
    """
    return forward(query, key, value)[0]


blockwise.defvjp(forward, backward)
