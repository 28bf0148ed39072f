"""LayerNorm with a backward pass of its own."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.ops.precision import activation_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x, scale, bias, epsilon: float):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis (arXiv 1607.06450
    equation 4), float32.

    For the backward pass it stores x and the two statistics; automatic differentiation would store
    several arrays of the size of x.
    """
    return forward(x, scale, bias, epsilon)[0]


def forward(x, scale, bias, epsilon):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean))
    inverse = jax.lax.rsqrt(variance + epsilon)
    return (wide - mean) * (inverse * scale) + bias, (x, mean, inverse, scale)


def backward(epsilon, residuals, gradient):
    x, mean, inverse, scale = residuals
    normal = (x.astype(jnp.float32) - mean) * inverse
    of_normal = gradient * scale
    mean_of_normal = of_normal.mean(-1, keepdims=True)
    mean_of_product = (of_normal * normal).mean(-1, keepdims=True)
    of_x = (of_normal - (mean_of_normal + normal * mean_of_product)) * inverse
    rows = tuple(range(x.ndim - 1))
    return of_x.astype(x.dtype), (gradient * normal).sum(rows), gradient.sum(rows)


layer_norm.defvjp(forward, backward)


class LayerNorm(nn.Module):
    """nn.LayerNorm by `layer_norm`: [..., embed] -> the same, in `activation_dtype(dtype)`."""

    epsilon: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        y = layer_norm(x, scale, bias, self.epsilon)
        return y.astype(activation_dtype(self.dtype))
