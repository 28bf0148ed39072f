"""Layers that are one matrix product, with the parameters of flax's layers.

Their `dtype` is that of the product's operands, and of all other arithmetic where `precision` says
so.
"""

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models.ops import cpu_matmul
from vit_jax.models.ops.precision import activation_dtype, operands_only
from vit_jax.models.ops.tpu_layout import gradient_in_this_shape

xavier = nn.initializers.xavier_uniform()


def product(dtype) -> dict:
    """Arguments of flax's dense layers."""
    if operands_only(dtype):
        return dict(dtype=activation_dtype(dtype), dot_general=cpu_matmul.dot_general)
    return dict(dtype=dtype)


def dense(features: int, dtype, **options) -> nn.Dense:
    """[..., in] -> [..., features]. `options` are those of nn.Dense."""
    return nn.Dense(features, **product(dtype), **options)


class HeadProjection(nn.Module):
    """[batch, length, embed] -> [batch, length, heads, kv], with the parameters of nn.DenseGeneral.

    Its products are those of matrices [embed, heads * kv]. With an axis of heads, TPUs pad the 64
    channels of the gradient to 128 if fsdp shards it, which takes twice the time: by the compiler's
    cycles, a step of L/16 on v5e:8x8 takes 384.8 Mcycles with nn.DenseGeneral and JAX's derivative
    of attention, and 332.0 with this and `einsum`.
    """

    heads: int
    kv: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        embed = x.shape[-1]
        columns = self.heads * self.kv

        def init(key, shape):
            return xavier(key, (embed, columns)).reshape(shape)

        kernel = self.param("kernel", init, (embed, self.heads, self.kv))
        bias = self.param("bias", nn.initializers.zeros, (self.heads, self.kv))
        kernel = kernel.astype(activation_dtype(self.dtype)).reshape(embed, columns)
        y = self.matmul(x, gradient_in_this_shape(kernel))
        y = y + bias.astype(y.dtype).reshape(columns)
        return y.reshape(*x.shape[:-1], self.heads, self.kv)

    def matmul(self, x, kernel):
        if not operands_only(self.dtype):
            return x.astype(self.dtype) @ kernel
        y = cpu_matmul.matmul(x.reshape(-1, x.shape[-1]), kernel)
        return y.reshape(*x.shape[:-1], -1)


def output_projection(features: int, dtype, name: str) -> nn.DenseGeneral:
    """[batch, length, heads, kv] -> [batch, length, features]."""
    return nn.DenseGeneral(features, axis=(-2, -1), kernel_init=xavier, name=name, **product(dtype))


def patch_embedding(
    features: int, patch_size: tuple[int, int], padding: str, dtype, name: str
) -> nn.Conv:
    """[batch, H, W, channels] -> [batch, H / h, W / w, features]. `padding`: VALID or SAME."""
    options = dict(dtype=dtype)
    if operands_only(dtype):
        options = dict(
            dtype=activation_dtype(dtype), conv_general_dilated=cpu_matmul.patch_convolution
        )
    return nn.Conv(features, patch_size, patch_size, padding, name=name, **options)
