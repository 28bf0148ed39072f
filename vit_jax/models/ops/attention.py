"""Multi-head attention, by the best way for its shape and platform."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.distributed import hardware, sharding
from vit_jax.errors import UserError
from vit_jax.models.ops.blockwise import blockwise
from vit_jax.models.ops.cpu_attention import cpu_attention
from vit_jax.models.ops.cudnn import cudnn
from vit_jax.models.ops.einsum import einsum
from vit_jax.models.ops.short_attention import block_width, short_attention
from vit_jax.models.ops.splash import splash

# Ways to compute attention; `choose` resolves "auto".
ATTENTIONS = ("auto", "einsum", "short", "splash", "cudnn", "blockwise")
LINEAR_MEMORY = {
    "short": short_attention,
    "splash": splash,
    "cudnn": cudnn,
    "blockwise": blockwise,
}
# The most tokens for which "auto" takes einsum. On one v5e, forward and backward, heads of 64: the
# scheduled cycles of einsum with a bfloat16 softmax are 0.7 times those of splash at 324 tokens,
# 1.2 at 400, 1.4 at 576 and 2.2 at 1,369. On CPUs, blockwise takes half the time of einsum at 576.
EINSUM_UP_TO = 350
# The fewest tokens for which "auto" takes cuDNN, and the fewest that were measured: on an H200,
# a step of L/16 with 256 images takes 204 ms with it, and 246 with einsum. Odd numbers of tokens,
# which are padded for it, were not measured: those take einsum as long as others do elsewhere.
CUDNN_FROM = 196


def cudnn_refuses(dtype, width: int) -> str:
    """Why cuDNN does not take heads of that dtype and width; "" if it does."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"does not compute in {jnp.dtype(dtype).name}: use dtype=bfloat16"
    if width > 128 or width % 8:
        return (
            "takes heads of at most 128 channels, a multiple of 8, and these have "
            f"{width}: use attention=auto"
        )
    return ""


def split(shape) -> PartitionSpec:
    """How the mesh splits [batch, length, heads, kv]: an axis whose devices do not divide it, such
    as the one example of an initialisation, is not split.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def fitting(size, axes):
        count = math.prod(mesh.shape[name] for name in sharding.mesh_axes(axes))
        return axes if size % count == 0 else None

    return PartitionSpec(*map(fitting, shape, sharding.spec("batch", "length", "heads", "kv")))


def is_short(query, key) -> bool:
    """Whether `short_attention` takes the heads that each device has of the sequences."""
    shape = query.shape
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        shape = jax.NamedSharding(mesh, split(shape)).shard_shape(shape)
    _, length, heads, kv = shape
    return block_width(length, key.shape[1], heads * kv, kv, query.dtype.itemsize) > 0


def check_way(way: str, query, key, platform: str) -> None:
    """Raises UserError if that way does not run on the platform or not with these shapes."""
    if way in ("short", "splash") and platform != "tpu":
        raise UserError(f"attention={way} runs on TPUs, not on {platform}: use auto or blockwise")
    if way == "short" and not is_short(query, key):
        raise UserError(
            f"attention=short holds the scores on the chip, which {query.shape[1]} queries and "
            f"{key.shape[1]} keys of {query.shape[2]} heads of {query.shape[3]} channels in "
            f"{jnp.dtype(query.dtype).name} exceed: use auto or splash"
        )
    if way != "cudnn":
        return
    if platform != "cuda":
        raise UserError(
            f"attention=cudnn runs on NVIDIA GPUs from Ampere on, not on {platform}: use auto or "
            "blockwise"
        )
    problem = cudnn_refuses(query.dtype, query.shape[-1])
    if problem:
        raise UserError(f"attention=cudnn {problem}")


def choose(way: str, query, key, platform: str) -> str:
    """The way to compute attention, by shape, dtype and platform: one of `ATTENTIONS` but auto.

    Attention pooling has one query, so a row of weights, not a square: einsum, whatever the `way`.

    Args:
      way: one of `ATTENTIONS`.
      query, key: [batch, length, heads, kv], or only their shapes and dtypes.
      platform: as `hardware.platform` names it.

    Raises:
      UserError: `way` does not run on the platform.
    """
    check_way(way, query, key, platform)
    if query.shape[1] == 1:
        return "einsum"
    if way != "auto":
        return way
    if platform == "tpu" and is_short(query, key):
        return "short"
    lengths = query.shape[1], key.shape[1]
    scores = math.prod(lengths)
    has_cudnn = platform == "cuda" and not cudnn_refuses(query.dtype, query.shape[-1])
    is_padded = any(length % 2 for length in lengths)
    if has_cudnn and scores >= CUDNN_FROM**2 and not is_padded:
        return "cudnn"
    if scores <= EINSUM_UP_TO**2:
        return "einsum"
    if has_cudnn:
        return "cudnn"
    return "splash" if platform == "tpu" else "blockwise"


def on_every_device(function, *arrays):
    """Calls `function` on each device with its own examples and heads of arrays [batch, length,
    heads, kv].

    XLA can split neither a Pallas kernel nor, in all cases, cuDNN's.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    spec = split(arrays[0].shape)
    # Pallas does not declare over which axes its outputs vary, so that check cannot pass.
    return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def attend(query, key, value, dtype, softmax_dtype, way: str = "auto"):
    """Multi-head attention (arXiv 1706.03762 equation 1), by the way that `choose` names.

    Args:
      query: [batch, length, heads, kv], not scaled.
      key, value: [batch, other, heads, kv].
      dtype: of the operands of its products.
      softmax_dtype: of einsum's softmax; the other ways compute it in float32.
      way: one of `ATTENTIONS`.

    Returns:
      [batch, length, heads, kv].
    """
    platform = hardware.platform()
    chosen = choose(way, query, key, platform)
    if chosen != "einsum":
        return on_every_device(LINEAR_MEMORY[chosen], query, key, value)
    if platform == "cpu":
        return cpu_attention(query, key, value, jnp.dtype(dtype))
    return einsum(query, key, value, jnp.dtype(softmax_dtype))
