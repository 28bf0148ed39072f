"""Attention by two einsums, which holds the weights [batch, heads, length, length]."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.models.ops import precision


def attention_weights(query, key, softmax_dtype, distance=None):
    """Softmax over keys of scaled dot products (arXiv 1706.03762 equation 1).

    Args:
      query, key: [batch, length, heads, kv].
      softmax_dtype: dtype in which the softmax is computed.
      distance: [length, length, kv], a second key for every pair of query and key (arXiv 2010.11929
        appendix D.4).

    Returns:
      [batch, heads, length, length] in the dtype of `query`.
    """
    query = scaled(query)
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if distance is not None:
        scores += jnp.einsum("bqhk,qvk->bhqv", query, distance)
    return jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)


def scaled(query):
    return query / jnp.sqrt(query.shape[-1]).astype(query.dtype)


def weighted(weights, value):
    """[batch, heads, length, other], [batch, other, heads, kv] -> [batch, length, heads, kv]."""
    return jnp.einsum("bhqv,bvhk->bqhk", weights, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def einsum(query, key, value, softmax_dtype):
    """Attention of scaled queries [batch, length, heads, kv] that keeps its weights for the
    backward pass.

    The backward pass takes what softmax's derivative sums over keys from the output and its
    gradient instead (arXiv 2205.14135 appendix B.2), which spares a pass over the square of
    weights.
    """
    return einsum_forward(query, key, value, softmax_dtype)[0]


def einsum_forward(query, key, value, softmax_dtype):
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if (
        query.shape[1] > 1
    ):  # the row of a single query would be padded to the 128 neighbours of a TPU's registers
        scores = precision.in_memory(scores, 0, 1, 3, 2)
    weights = jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)
    output = weighted(weights, value)
    return output, (query, key, value, weights, output)


def einsum_backward(softmax_dtype, kept, gradient):
    query, key, value, weights, output = kept
    total = jnp.einsum("bqhk,bqhk->bhq", output, gradient, preferred_element_type=jnp.float32)
    of_weights = jnp.einsum("bqhk,bvhk->bhqv", gradient, value, preferred_element_type=jnp.float32)
    of_scores = (weights * (of_weights - total[..., None])).astype(query.dtype)
    of_query = jnp.einsum("bhqv,bvhk->bqhk", of_scores, key)
    of_key = jnp.einsum("bhqv,bqhk->bvhk", of_scores, query)
    return of_query, of_key, jnp.einsum("bhqv,bqhk->bvhk", weights, gradient)


einsum.defvjp(einsum_forward, einsum_backward)
