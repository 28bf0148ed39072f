"""Attention on NVIDIA GPUs by cuDNN's fused kernel."""

import jax
import jax.numpy as jnp


def cudnn(query, key, value):
    """Attention by cuDNN's fused kernel, which scales the scores itself; softmax in float32.

    JAX 0.10 cannot train on odd lengths: those get a row of padding, which cuDNN masks.

    Args:
      query: [batch, length, heads, kv], float16 or bfloat16.
      key, value: [batch, other, heads, kv].

    Returns:
      [batch, length, heads, kv] in the dtype of `query`.
    """
    batch, length = query.shape[:2]
    other = key.shape[1]
    lengths = {}
    if length % 2 or other % 2:
        lengths = dict(
            query_seq_lengths=jnp.full(batch, length), key_value_seq_lengths=jnp.full(batch, other)
        )
    even = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)]
    return jax.nn.dot_product_attention(*even, **lengths, implementation="cudnn")[:, :length]
