"""Attention on CPUs, which stores the weights [batch, heads, length, length]."""

import jax
import jax.numpy as jnp

from vit_jax.models.ops.cpu_matmul import nn_product, nt_product, transposed
from vit_jax.models.ops.scaling import scaled


def cpu_attention(query, key, value, dtype):
    """Attention by products of each head of each example; operands in `dtype`, float32 softmax.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].

    Returns:
      [batch, length, heads, kv] float32.
    """
    batch, _, heads, kv = query.shape

    def matrices(x):  # one batch axis: with two, XLA converts to float32
        return x.swapaxes(1, 2).reshape(batch * heads, -1, kv).astype(dtype)

    output = attention_of_matrices(matrices(scaled(query)), matrices(key), matrices(value))
    return output.reshape(batch, heads, -1, kv).swapaxes(1, 2)


@jax.custom_vjp
def attention_of_matrices(query, key, value):
    """[matrices, length, kv], twice [matrices, other, kv] -> [matrices, length, kv] float32.

    The sums of softmax divide the output instead of the weights.
    """
    return forward(query, key, value)[0]


def forward(query, key, value):
    scores = nt_product(query, key)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(query.dtype)
    output = nn_product(weights, value) / total
    return output, (query, key, value, weights, total, output.astype(query.dtype))


def backward(residuals, gradient):
    """What softmax's derivative sums over keys comes from the output (arXiv 2205.14135, B.2)."""
    query, key, value, weights, total, output = residuals
    dtype = query.dtype
    gradient = gradient / total
    mean = (gradient * output).sum(-1, keepdims=True)
    gradient = gradient.astype(dtype)
    of_value = nn_product(transposed(weights), gradient)
    of_scores = (weights * (nt_product(gradient, value) - mean)).astype(dtype)
    of_query = nn_product(of_scores, key)
    of_key = nn_product(transposed(of_scores), query)
    return of_query.astype(dtype), of_key.astype(dtype), of_value.astype(dtype)


attention_of_matrices.defvjp(forward, backward)
