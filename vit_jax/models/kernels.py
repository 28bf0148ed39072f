"""The operations whose best form depends on the platform."""

import jax
import jax.numpy as jnp


def attention_weights(query, key, softmax_dtype):
    """Softmax over keys of scaled dot products (arXiv 1706.03762 equation 1).

    Args:
      query, key: [batch, length, heads, kv].
      softmax_dtype: dtype in which the softmax is computed.

    Returns:
      [batch, heads, length, length] in the dtype of `query`.
    """
    query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    return jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)


def attention(query, key, value, softmax_dtype):
    """Multi-head attention and its weights.

    Args:
      query, key, value: [batch, length, heads, kv].

    Returns:
      [batch, length, heads, kv], and the weights [batch, heads, length, length].
    """
    weights = attention_weights(query, key, softmax_dtype)
    return jnp.einsum("bhqv,bvhk->bqhk", weights, value), weights
