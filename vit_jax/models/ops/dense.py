"""Layers that are one matrix product, with the parameters of flax's layers.

Their `dtype` is that of the product's operands, and of all other arithmetic where `precision` says
so.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.distributed import hardware
from vit_jax.models.ops import cpu_matmul
from vit_jax.models.ops.precision import activation_dtype, operands_only, patches_by_product
from vit_jax.models.ops.tpu_layout import keep_shape

xavier = nn.initializers.xavier_uniform()


@jax.custom_vjp
def add_bias(x, bias):
    """[..., features] + [features], with the gradient of the bias by `sum_of_rows`."""
    return x + bias


def add_bias_forward(x, bias):
    return x + bias, None


def add_bias_backward(_, gradient):
    return gradient, sum_of_rows(gradient)


add_bias.defvjp(add_bias_forward, add_bias_backward)


def sum_of_rows(x):
    """[..., features] -> [features], summed in float32.

    For 64 images of L/16, by the cycles of a v5e, a product with ones takes 0.01 Mcycles, and the
    sum that JAX derives for a bias 0.34.
    """
    return hardware.multiply_on_tpu(multiply_rows, add_rows, x)


def multiply_rows(x):
    rows = tuple(range(x.ndim - 1))
    # Without the barrier XLA sees that they are ones, and adds.
    ones = jax.lax.optimization_barrier(jnp.ones(x.shape[:-1], x.dtype))
    options = dict(precision="highest", preferred_element_type=jnp.float32)
    total = jax.lax.dot_general(ones, x, ((rows, rows), ((), ())), **options)
    return total.astype(x.dtype)


def add_rows(x):
    return x.sum(tuple(range(x.ndim - 1)))


def product(x, kernel, dtype):
    """[..., in] @ [in, out] -> [..., out] in `activation_dtype(dtype)`."""
    if not operands_only(dtype):
        return x.astype(dtype) @ kernel.astype(dtype)
    y = cpu_matmul.matmul(x.reshape(-1, x.shape[-1]), kernel)
    return y.reshape(*x.shape[:-1], -1)


class Dense(nn.Module):
    """[..., in] -> [..., features], with the parameters of nn.Dense."""

    features: int
    dtype: jnp.dtype = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", self.bias_init, (self.features,))
        y = product(x, kernel, self.dtype)
        return y + bias.astype(y.dtype)


def flat_kernel(module: nn.Module, shape: tuple[int, ...], rows: int):
    """The parameter "kernel" of that shape, as a matrix of that many rows.

    With an axis of heads, TPUs pad its 64 channels to 128 where fsdp gathers it and where its
    gradient is computed, and the products with it take twice the time: by the compiler's cycles,
    four layers of L/16 on v5e:8x8 take 48.6 Mcycles with that axis and 44.4 without it.
    """

    def init(key, shape):
        return xavier(key, (rows, math.prod(shape) // rows)).reshape(shape)

    kernel = module.param("kernel", init, shape).astype(activation_dtype(module.dtype))
    return keep_shape(kernel.reshape(rows, -1))


class HeadProjection(nn.Module):
    """[batch, length, embed] -> [batch, length, heads, kv], with the parameters of
    nn.DenseGeneral. What remat saves of it has no axis of heads, for which TPUs would copy it.
    """

    heads: int
    kv: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        kernel = flat_kernel(self, (x.shape[-1], self.heads, self.kv), x.shape[-1])
        bias = self.param("bias", nn.initializers.zeros, (self.heads, self.kv))
        y = product(x, kernel, self.dtype)
        y = add_bias(y, bias.astype(y.dtype).reshape(-1))
        y = checkpoint_name(y, self.name)
        return y.reshape(*x.shape[:-1], self.heads, self.kv)


class OutputProjection(nn.Module):
    """[batch, length, heads, kv] -> [batch, length, embed], with the parameters of
    nn.DenseGeneral.
    """

    embed: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        *rows, heads, kv = x.shape
        kernel = flat_kernel(self, (heads, kv, self.embed), heads * kv)
        bias = self.param("bias", nn.initializers.zeros, (self.embed,))
        x = checkpoint_name(x.reshape(*rows, heads * kv), "attended")
        y = product(x, kernel, self.dtype)
        return y + bias.astype(y.dtype)


def patch_convolution(dtype, image, kernel, strides, padding, **_):
    """`jax.lax.conv_general_dilated` as flax's layers call it, for windows that do not overlap, as
    one `product`.

    Args:
      dtype: of the product.
      image: [batch, H, W, channels].
      kernel: [h, w, channels, out].
      strides: (h, w).
      padding: VALID, which leaves out a border that does not fill a window, or SAME, which pads it.

    Returns:
      [batch, H / h, W / w, out].
    """
    h, w = strides
    if padding == "SAME":
        borders = jax.lax.padtype_to_pads(image.shape[1:3], (h, w), strides, padding)
        image = jnp.pad(image, ((0, 0), *borders, (0, 0)))
    rows = image.shape[1] // h
    columns = image.shape[2] // w
    channels = image.shape[3]
    image = image[:, : rows * h, : columns * w]
    windows = image.reshape(-1, rows, h, columns, w, channels).swapaxes(2, 3)
    inner = h * w * channels
    y = product(windows.reshape(-1, inner), kernel.reshape(inner, -1), dtype)
    return y.reshape(-1, rows, columns, kernel.shape[-1])


def patch_embedding(
    features: int, patch_size: tuple[int, int], padding: str, dtype, name: str
) -> nn.Conv:
    """[batch, H, W, channels] -> [batch, H / h, W / w, features]. `padding`: VALID or SAME."""
    options = dict(dtype=activation_dtype(dtype), name=name)
    if patches_by_product(dtype):
        options["conv_general_dilated"] = functools.partial(patch_convolution, dtype)
    return nn.Conv(features, patch_size, patch_size, padding, **options)
