"""GELU in its tanh form, with a backward pass of its own."""

import math

import jax
import jax.numpy as jnp

SLOPE, CUBIC = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (arXiv 1606.08415 section 2), of any shape.

    It keeps x alone, where automatic differentiation keeps tanh's result, too.
    """
    return forward(x)[0]


def tanh_of(x):
    return jnp.tanh(SLOPE * x * (1 + CUBIC * x * x))


def forward(x):
    return 0.5 * x * (1 + tanh_of(x)), x


def backward(x, gradient):
    tanh = tanh_of(x)
    slope = 0.5 * SLOPE * x * (1 - tanh * tanh) * (1 + 3 * CUBIC * x * x)
    return (gradient * (0.5 * (1 + tanh) + slope),)


gelu.defvjp(forward, backward)
