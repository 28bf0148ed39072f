"""Attention by two einsums, which stores the weights [batch, heads, length, length]."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.models.ops.scaling import scaled
from vit_jax.models.ops.tpu_layout import in_memory


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


def weighted(weights, value):
    """[batch, heads, length, other], [batch, other, heads, kv] -> [batch, length, heads, kv]."""
    return jnp.einsum("bhqv,bvhk->bqhk", weights, value)


def einsum(query, key, value, softmax_dtype):
    """`weighted(attention_weights(query, key), value)` with a backward pass of its own.

    The backward pass takes what softmax's derivative sums over keys from the output and its
    gradient (arXiv 2205.14135 appendix B.2), which saves a pass over the attention matrix.
    """
    return attention_of_scaled(scaled(query), key, value, softmax_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention_of_scaled(query, key, value, softmax_dtype):
    return forward(query, key, value, softmax_dtype)[0]


def forward(query, key, value, softmax_dtype):
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if query.shape[1] > 1:  # a TPU would pad the row of a single query to 128
        scores = in_memory(scores, 0, 1, 3, 2)
    weights = jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)
    output = weighted(weights, value)
    return output, (query, key, value, weights, output)


def backward(softmax_dtype, residuals, gradient):
    query, key, value, weights, output = residuals
    total = jnp.einsum("bqhk,bqhk->bhq", output, gradient, preferred_element_type=jnp.float32)
    of_weights = jnp.einsum("bqhk,bvhk->bhqv", gradient, value, preferred_element_type=jnp.float32)
    of_scores = (weights * (of_weights - total[..., None])).astype(query.dtype)
    of_query = jnp.einsum("bhqv,bvhk->bqhk", of_scores, key)
    of_key = jnp.einsum("bhqv,bqhk->bvhk", of_scores, query)
    of_value = jnp.einsum("bhqv,bqhk->bvhk", weights, gradient)
    return of_query, of_key, of_value


attention_of_scaled.defvjp(forward, backward)
