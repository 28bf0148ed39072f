"""The operations whose best form depends on the platform."""

import jax
import jax.numpy as jnp


def attention_weights(query, key, softmax_dtype, distance=None):
    """Softmax over keys of scaled dot products (arXiv 1706.03762 equation 1).

    Args:
      query, key: [batch, length, heads, kv].
      softmax_dtype: dtype in which the softmax is computed.
      distance: [length, length, kv], a second key for every pair of query and key (arXiv 2010.11929 appendix D.4).

    Returns:
      [batch, heads, length, length] in the dtype of `query`.
    """
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if distance is not None:
        scores += jnp.einsum("bqhk,qvk->bhqv", query, distance)
    return jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)


def attention(query, key, value, softmax_dtype, distance=None):
    """Multi-head attention and its weights.

    Args:
      query, key, value: [batch, length, heads, kv].
      softmax_dtype, distance: as in `attention_weights`.

    Returns:
      [batch, length, heads, kv], and the weights [batch, heads, length, length].
    """
    weights = attention_weights(query, key, softmax_dtype, distance)
    return jnp.einsum("bhqv,bvhk->bqhk", weights, value), weights
