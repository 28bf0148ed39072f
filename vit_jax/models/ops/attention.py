"""The operations whose best form depends on the platform."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.distributed import hardware, sharding
from vit_jax.errors import UserError
from vit_jax.models.ops import cpu_matmul, einsum
from vit_jax.models.ops.blockwise import blockwise
from vit_jax.models.ops.cudnn import cudnn
from vit_jax.models.ops.splash import splash

# Ways to compute attention; `choose` resolves "auto".
ATTENTIONS = ("auto", "einsum", "splash", "cudnn", "blockwise")
LINEAR_MEMORY = {"splash": splash, "cudnn": cudnn, "blockwise": blockwise}
# The most tokens for which "auto" takes einsum. On one v5e, forward and backward, heads of 64: the
# scheduled cycles of einsum with a bfloat16 softmax are 0.7 times those of splash at 324 tokens,
# 1.2 at 400, 1.4 at 576 and 2.2 at 1,369. On CPUs, blockwise takes half the time of einsum at 576.
# On GPUs, nothing is measured.
EINSUM_UP_TO = 350


def cudnn_refuses(dtype, width: int) -> str:
    """What keeps cuDNN from heads of that dtype and width, in words; "" where it takes them."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"does not compute in {jnp.dtype(dtype).name}: use dtype=bfloat16"
    if width > 128 or width % 8:
        return f"takes heads of at most 128 channels, a multiple of 8, and these have {width}: use attention=auto"
    return ""


def choose(wanted: str, query, key, platform: str) -> str:
    """The way to compute attention, by shape, dtype and platform: a name of `ATTENTIONS` other than
    auto.

    A probe that pools (one query) has a row of weights, not a square: einsum, whatever is wanted.

    Args:
      wanted: a name of `ATTENTIONS`.
      query, key: [batch, length, heads, kv], or only their shapes and dtypes.
      platform: as `platform` names it.

    Raises:
      UserError: what is wanted does not run there.
    """
    refused = cudnn_refuses(query.dtype, query.shape[-1])
    if wanted == "splash" and platform != "tpu":
        raise UserError(f"attention=splash runs on TPUs, not on {platform}: use auto or blockwise")
    if wanted == "cudnn" and platform != "cuda":
        raise UserError(
            f"attention=cudnn runs on NVIDIA GPUs from Ampere on, not on {platform}: use auto or "
            "blockwise"
        )
    if wanted == "cudnn" and refused:
        raise UserError(f"attention=cudnn {refused}")
    if query.shape[1] == 1:
        return "einsum"
    if wanted != "auto":
        return wanted
    if query.shape[1] * key.shape[1] <= EINSUM_UP_TO**2:
        return "einsum"
    return {"tpu": "splash", "cuda": "blockwise" if refused else "cudnn"}.get(platform, "blockwise")


def on_every_device(function, *arrays):
    """Calls `function` with each device's own examples and heads of arrays [batch, length, heads,
    kv].

    XLA can split neither a Pallas kernel nor, in all cases, cuDNN's. Axes that do not divide an
    array, as the one example of an initialisation, are computed by all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arrays)

    def fitting(size, axes):
        names = (axes,) if isinstance(axes, str) else axes or ()
        return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None

    spec = PartitionSpec(
        *map(fitting, arrays[0].shape, sharding.spec("batch", "length", "heads", "kv"))
    )
    # Pallas does not say over which axes its outputs vary, so the check that they do cannot pass.
    return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def attention(query, key, value, dtype, softmax_dtype, wanted: str = "auto"):
    """Multi-head attention, by the way that `choose` names.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].
      dtype: of the operands of its products.
      softmax_dtype: of einsum's softmax; the other ways compute it in float32.
      wanted: a name of `ATTENTIONS`.

    Returns:
      [batch, length, heads, kv].
    """
    chosen = choose(wanted, query, key, hardware.platform())
    if chosen == "einsum" and hardware.platform() == "cpu":
        return cpu_matmul.attention(einsum.scaled(query), key, value, jnp.dtype(dtype))
    if chosen == "einsum":
        return einsum.einsum(einsum.scaled(query), key, value, jnp.dtype(softmax_dtype))
    return on_every_device(LINEAR_MEMORY[chosen], query, key, value)
