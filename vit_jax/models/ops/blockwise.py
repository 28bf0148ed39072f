"""Attention that never holds the [batch, heads, length, length] weights: its memory grows with the
tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp

# Keys per step of `blockwise`: the memory of its scores against the number of its steps.
KEY_BLOCK = 512


def blocks_of(length: int, largest: int) -> tuple[int, int]:
    """(count, size) of equal blocks, as few as `largest` allows; padding is less than one row per
    block.
    """
    count = math.ceil(length / largest)
    return count, math.ceil(length / count)


def key_blocks(key, value):
    """Blocks of keys, values and which of them exist: two [count, batch, size, heads, kv] and a
    bool [count, size].
    """
    length = key.shape[1]
    count, size = blocks_of(length, KEY_BLOCK)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    return cut(key), cut(value), (jnp.arange(count * size) < length).reshape(count, size)


def block_scores(query, key, exists, dtype):
    """Scaled scores of all queries against one block of keys, -infinity for padding: [batch, heads,
    length, size].
    """
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key, preferred_element_type=dtype)
    return jnp.where(exists, scores, -jnp.inf)


def wide(x) -> jnp.dtype:
    """The dtype of softmax and sums: float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def blockwise_forward(query, key, value):
    """The output, and what the backward pass needs: the inputs, the output, and the log of every
    softmax's sum.
    """
    dtype = wide(query)
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    batch, length, heads, _ = query.shape

    def add(carry, block):
        largest, total, output = carry
        key, value, exists = block
        scores = block_scores(scaled, key, exists, dtype)
        new = jnp.maximum(largest, scores.max(-1))  # finite: every block has a key that exists
        weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
        part = jnp.einsum(
            "bhqv,bvhk->bhqk", weights.astype(value.dtype), value, preferred_element_type=dtype
        )
        return (new, total * shrink + weights.sum(-1), output * shrink[..., None] + part), None

    start = (
        jnp.full((batch, heads, length), -jnp.inf, dtype),
        jnp.zeros((batch, heads, length), dtype),
    )
    start = (*start, jnp.zeros((batch, heads, length, value.shape[-1]), dtype))
    (largest, total, output), _ = jax.lax.scan(add, start, key_blocks(key, value))
    output = (output / total[..., None]).astype(query.dtype).swapaxes(1, 2)
    return output, (query, key, value, output, largest + jnp.log(total))


def blockwise_backward(saved, gradient):
    """Gradients of query, key and value, whose weights are computed again block by block (arXiv
    2205.14135, B.4).
    """
    query, key, value, output, log_total = saved
    dtype, scale = wide(query), 1 / math.sqrt(query.shape[-1])
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    shared = product("bqhk,bqhk->bhq", gradient, output)[..., None]

    def add(query_gradient, block):
        key, value, exists = block
        weights = jnp.exp(block_scores(scaled, key, exists, dtype) - log_total[..., None])
        value_gradient = product("bhqv,bqhk->bvhk", weights.astype(value.dtype), gradient)
        change = weights * (product("bqhk,bvhk->bhqv", gradient, value) - shared)
        change = change.astype(key.dtype)
        key_gradient = product("bhqv,bqhk->bvhk", change, scaled)
        query_gradient += product("bhqv,bvhk->bqhk", change, key) * scale
        return query_gradient, (key_gradient.astype(key.dtype), value_gradient.astype(value.dtype))

    start = jnp.zeros(query.shape, dtype)
    query_gradient, parts = jax.lax.scan(add, start, key_blocks(key, value))

    def joined(x):
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : key.shape[1]]

    return query_gradient.astype(query.dtype), *map(joined, parts)


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
    return blockwise_forward(query, key, value)[0]


blockwise.defvjp(blockwise_forward, blockwise_backward)
