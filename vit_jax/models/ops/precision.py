"""Where bfloat16 applies: to all arithmetic of a layer, or to the operands of its products only."""

import jax.numpy as jnp

from vit_jax.distributed import hardware


def operands_only(dtype) -> bool:
    """Whether `dtype` is that of the operands of matrix products only: bfloat16 on CPUs.

    CPUs have instructions for such products, and none for other arithmetic in bfloat16.
    """
    return dtype == jnp.bfloat16 and hardware.platform() == "cpu"


def activation_dtype(dtype):
    """The dtype of the arithmetic between matrix products, and of the residual stream."""
    return jnp.float32 if operands_only(dtype) else dtype


def patches_by_product(dtype) -> bool:
    """Whether the embedding of patches is computed as a matrix product, not as a convolution.

    In a step of L/16 with 256 images on an H200, 200 ms long, the convolution and its gradient
    take 3.0 ms, by kernels for older cards, where a product of that size takes 0.14 ms.
    """
    return operands_only(dtype) or hardware.platform() == "cuda"
