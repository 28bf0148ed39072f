"""Activation functions, and what the backward pass stores of them."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.distributed import hardware
from vit_jax.models.ops.precision import activation_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def derived_from_input(function, x):
    """function(x), whose derivative is computed from x alone, in float32.

    In the dtype of x, XLA would find the same subexpressions in both passes, and store them.
    """
    return function(x)


def forward(function, x):
    return function(x), x


def backward(function, x, gradient):
    _, pull = jax.vjp(function, x.astype(jnp.float32))
    (gradient,) = pull(gradient.astype(jnp.float32))
    return (gradient.astype(x.dtype),)


derived_from_input.defvjp(forward, backward)


def activate(function, x, dtype):
    """function(x), computed in `activation_dtype(dtype)`.

    On CPUs the backward pass computes it again from its input: Ti/16 with 16 images then takes 481
    MiB instead of 645, and 3 % less time. On TPUs that breaks fusions: B/16 with 128 images takes
    284 Mcycles instead of 268. On GPUs it stores its input only, because the tanh of L/16 with 256
    images is 9.2 GiB.
    """

    def compute(x):
        return function(x.astype(activation_dtype(dtype)))

    platform = hardware.platform()
    if platform == "cpu":
        return jax.checkpoint(compute)(x)
    if platform == "cuda":
        return derived_from_input(function, x.astype(dtype))
    return compute(x)
