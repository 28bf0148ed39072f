"""Products of matrices with bfloat16 operands and float32 sums, in the form that CPUs have
instructions for.

XLA's fast kernels for CPUs (AMX, AVX512) take operands that are row-major in memory, and give
float32: [m, k] @ [k, n] and [m, k] @ [n, k]^T. Any other product of bfloat16 is computed in
float32. So every gradient here is one of these two, and an operand that has to be transposed is
transposed in memory first.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def product(x, y, contracted: tuple[int, int]):
    """x times y over one axis of each, of the last two of [..., rows, columns]; float32."""
    first = x.ndim - 2
    axes = ([first + contracted[0]], [first + contracted[1]])
    batch = tuple(range(first))
    return jax.lax.dot_general(x, y, (axes, (batch, batch)), preferred_element_type=jnp.float32)


nn_product = functools.partial(product, contracted=(1, 0))  # x @ y
nt_product = functools.partial(product, contracted=(1, 1))  # x @ y^T


def transposed(x):
    """[..., rows, columns] -> [..., columns, rows], row-major: XLA alone would only read it in
    another order.
    """
    return with_layout_constraint(x.swapaxes(-1, -2), Layout(tuple(range(x.ndim))))


@jax.custom_vjp
def matmul(x, kernel):
    """[rows, in] @ [in, out] -> [rows, out] float32, of bfloat16 operands."""
    return matmul_forward(x, kernel)[0]


def matmul_forward(x, kernel):
    low = x.astype(jnp.bfloat16)
    low_kernel = kernel.astype(jnp.bfloat16)
    return nn_product(low, low_kernel), (low, low_kernel, x[:0], kernel[:0])


def matmul_backward(residuals, gradient):
    x, kernel, like_x, like_kernel = residuals
    gradient = gradient.astype(jnp.bfloat16)
    of_x = nt_product(gradient, kernel)
    of_kernel = nn_product(transposed(x), gradient)
    return of_x.astype(like_x.dtype), of_kernel.astype(like_kernel.dtype)


matmul.defvjp(matmul_forward, matmul_backward)
