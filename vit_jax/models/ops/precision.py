"""In which dtype the arithmetic of a layer is done, and what the compiler is told of its arrays."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.distributed import hardware
from vit_jax.models.ops import cpu_matmul


@jax.custom_vjp
def gradient_as_is(x):
    """x, whose gradient a TPU makes in the shape of x, whatever shape it is asked for in
    afterwards.
    """
    return x


gradient_as_is.defvjp(
    lambda x: (x, None),
    lambda _, gradient: (
        jax.lax.optimization_barrier(gradient) if hardware.platform() == "tpu" else gradient,
    ),
)


def in_memory(x, *order: int):
    """x, whose axes a TPU keeps in memory in that order, the last one as neighbours.

    Left to itself, the compiler puts the batch last where a chip has a multiple of 128 examples,
    and then copies every square of attention's scores from one order to another, five times: two
    layers of B/16 with 128 images and a float32 softmax on v5e take 71.4 Mcycles and 2.36 GiB, and
    51.7 and 1.92 with orders of ours. Those are the ones that it chooses itself for 64 images.
    """
    return with_layout_constraint(x, Layout(order)) if hardware.platform() == "tpu" else x


def operands_alone(dtype) -> bool:
    """Whether only the operands of products are bfloat16 where a layer's `dtype` is: on CPUs.

    They have instructions for such products, and none for other arithmetic of bfloat16.
    """
    return dtype == jnp.bfloat16 and hardware.platform() == "cpu"


def layer(dtype) -> dict:
    """What flax's layers of that dtype are made with: `dtype` and, where it is not theirs,
    `dot_general`.
    """
    if operands_alone(dtype):
        return dict(dtype=jnp.float32, dot_general=cpu_matmul.dot_general)
    return dict(dtype=dtype)


def patch_layer(dtype) -> dict:
    """What flax's convolution that embeds patches is made with."""
    if operands_alone(dtype):
        return dict(dtype=jnp.float32, conv_general_dilated=cpu_matmul.patches)
    return dict(dtype=dtype)


def layer_dtype(dtype):
    """Of the arithmetic between products, and of the residual stream."""
    return layer(dtype)["dtype"]


def activation(function, dtype):
    """`function` of an array, in `layer_dtype`.

    On CPUs its backward pass computes it again from its input: for Ti/16 with 16 images, of 645 MiB
    481 are left, and 3 % of the time are spared. On TPUs that breaks fusions: B/16 with 128 images
    takes 284 Mcycles instead of 268.
    """
    cast = lambda x: function(x.astype(layer_dtype(dtype)))  # noqa: E731
    return jax.checkpoint(cast) if hardware.platform() == "cpu" else cast


def matmul(x, kernel, dtype):
    """[..., in] @ [in, out] -> [..., out] in `layer_dtype`."""
    if operands_alone(dtype):
        return cpu_matmul.matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)
    return x.astype(dtype) @ kernel
