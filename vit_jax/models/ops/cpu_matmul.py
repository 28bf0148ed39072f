"""Products of matrices with bfloat16 operands and float32 sums, in the form that CPUs have
instructions for.

XLA's fast kernels for CPUs (AMX, AVX512) take operands that lie row by row in memory, and give
float32: [m, k] @ [k, n] and [m, k] @ [n, k]^T. Any other product of bfloat16 is computed in
float32. So every gradient here is one of these two, and what must be transposed is transposed in
memory first.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def product(x, y, contracted: tuple[int, int]):
    """x times y over one axis of each, of the last two of [..., rows, columns]; float32."""
    batch = tuple(range(x.ndim - 2))
    axes = ([x.ndim - 2 + contracted[0]], [y.ndim - 2 + contracted[1]]), (batch, batch)
    return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


nn_product = functools.partial(product, contracted=(1, 0))  # x @ y
nt_product = functools.partial(product, contracted=(1, 1))  # x @ y^T


def transposed(x):
    """[..., rows, columns] -> [..., columns, rows], also in memory, where XLA itself would read in
    another order.
    """
    return with_layout_constraint(x.swapaxes(-1, -2), Layout(tuple(range(x.ndim))))


@jax.custom_vjp
def matmul(x, kernel):
    """[rows, in] @ [in, out] -> [rows, out] float32, of bfloat16 operands."""
    return matmul_forward(x, kernel)[0]


def matmul_forward(x, kernel):
    low, low_kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return nn_product(low, low_kernel), (low, low_kernel, x[:0], kernel[:0])


def matmul_backward(kept, gradient):
    x, kernel, like_x, like_kernel = kept
    gradient = gradient.astype(jnp.bfloat16)
    of_x, of_kernel = nt_product(gradient, kernel), nn_product(transposed(x), gradient)
    return of_x.astype(like_x.dtype), of_kernel.astype(like_kernel.dtype)


matmul.defvjp(matmul_forward, matmul_backward)


def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None):
    """`jax.lax.dot_general` as flax's layers call it: the last axes of x by the first ones of the
    kernel. float32.
    """
    count = len(dimension_numbers[0][1])
    inner = math.prod(kernel.shape[:count])
    y = matmul(x.reshape(-1, inner), kernel.reshape(inner, -1))
    return y.reshape(*x.shape[: x.ndim - count], *kernel.shape[count:])


def patches(image, kernel, strides, padding, **_):
    """`jax.lax.conv_general_dilated` as flax's layers call it, for windows that do not overlap, as
    one `matmul`.

    Args:
      image: [batch, H, W, channels].
      kernel: [h, w, channels, out].
      strides: (h, w).
      padding: VALID, which leaves out a border that fills no window, or SAME, which pads it.

    Returns:
      [batch, H / h, W / w, out] float32.
    """
    (h, w), channels = strides, image.shape[-1]
    if padding == "SAME":
        borders = jax.lax.padtype_to_pads(image.shape[1:3], (h, w), strides, padding)
        image = jnp.pad(image, ((0, 0), *borders, (0, 0)))
    rows, columns = image.shape[1] // h, image.shape[2] // w
    image = (
        image[:, : rows * h, : columns * w]
        .reshape(-1, rows, h, columns, w, channels)
        .swapaxes(2, 3)
    )
    y = matmul(image.reshape(-1, h * w * channels), kernel.reshape(h * w * channels, -1))
    return y.reshape(-1, rows, columns, kernel.shape[-1])


def attention(query, key, value, dtype):
    """Attention of scaled queries, by matrices of each head of each example; operands in `dtype`,
    float32 softmax.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].

    Returns:
      [batch, length, heads, kv] float32.
    """
    batch, _, heads, kv = query.shape

    def matrices(x):  # one batch axis: with two, XLA converts to float32
        return x.swapaxes(1, 2).reshape(batch * heads, -1, kv).astype(dtype)

    output = attention_of_matrices(*map(matrices, (query, key, value)))
    return output.reshape(batch, heads, -1, kv).swapaxes(1, 2)


@jax.custom_vjp
def attention_of_matrices(query, key, value):
    """[matrices, length, kv], twice [matrices, other, kv] -> [matrices, length, kv] float32.

    The sums of softmax divide the output instead of the weights.
    """
    return attention_forward(query, key, value)[0]


def attention_forward(query, key, value):
    scores = nt_product(query, key)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(query.dtype)
    output = nn_product(weights, value) / total
    return output, (query, key, value, weights, total, output.astype(query.dtype))


def attention_backward(kept, gradient):
    """What softmax's derivative sums over keys comes from the output (arXiv 2205.14135 appendix
    B.2).
    """
    query, key, value, weights, total, output = kept
    dtype = query.dtype
    gradient = gradient / total
    mean = (gradient * output).sum(-1, keepdims=True)
    gradient = gradient.astype(dtype)
    of_value = nn_product(transposed(weights), gradient)
    of_scores = (weights * (nt_product(gradient, value) - mean)).astype(dtype)
    of_query, of_key = nn_product(of_scores, key), nn_product(transposed(of_scores), query)
    return of_query.astype(dtype), of_key.astype(dtype), of_value.astype(dtype)


attention_of_matrices.defvjp(attention_forward, attention_backward)
