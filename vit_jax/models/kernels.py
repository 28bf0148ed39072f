"""The operations whose best form depends on the platform."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from vit_jax.distributed import hardware, sharding
from vit_jax.errors import UserError
from vit_jax.models import products
from vit_jax.models.attention import blockwise, cudnn, splash

# Ways to compute attention; `choose` resolves "auto".
ATTENTIONS = ("auto", "einsum", "splash", "cudnn", "blockwise")
LINEAR_MEMORY = {"splash": splash, "cudnn": cudnn, "blockwise": blockwise}
# The most tokens for which "auto" takes einsum. On one v5e, forward and backward, heads of 64: the scheduled cycles of
# einsum with a bfloat16 softmax are 0.7 times those of splash at 324 tokens, 1.2 at 400, 1.4 at 576 and 2.2 at 1,369.
# On CPUs, blockwise takes half the time of einsum at 576. On GPUs, nothing is measured.
EINSUM_UP_TO = 350


def attention_weights(query, key, softmax_dtype, distance=None):
    """Softmax over keys of scaled dot products (arXiv 1706.03762 equation 1).

    Args:
      query, key: [batch, length, heads, kv].
      softmax_dtype: dtype in which the softmax is computed.
      distance: [length, length, kv], a second key for every pair of query and key (arXiv 2010.11929 appendix D.4).

    Returns:
      [batch, heads, length, length] in the dtype of `query`.
    """
    query = scaled(query)
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if distance is not None:
        scores += jnp.einsum("bqhk,qvk->bhqv", query, distance)
    return jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)


def scaled(query):
    return query / jnp.sqrt(query.shape[-1]).astype(query.dtype)


def weighted(weights, value):
    """[batch, heads, length, other], [batch, other, heads, kv] -> [batch, length, heads, kv]."""
    return jnp.einsum("bhqv,bvhk->bqhk", weights, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def einsum(query, key, value, softmax_dtype):
    """Attention of scaled queries [batch, length, heads, kv] that keeps its weights for the backward pass.

    The backward pass takes what softmax's derivative sums over keys from the output and its gradient instead (arXiv
    2205.14135 appendix B.2), which spares a pass over the square of weights.
    """
    return einsum_forward(query, key, value, softmax_dtype)[0]


def einsum_forward(query, key, value, softmax_dtype):
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key)
    if query.shape[1] > 1:  # the row of a single query would be padded to the 128 neighbours of a TPU's registers
        scores = in_memory(scores, 0, 1, 3, 2)
    weights = jax.nn.softmax(scores.astype(softmax_dtype)).astype(query.dtype)
    output = weighted(weights, value)
    return output, (query, key, value, weights, output)


def einsum_backward(softmax_dtype, kept, gradient):
    query, key, value, weights, output = kept
    total = jnp.einsum("bqhk,bqhk->bhq", output, gradient, preferred_element_type=jnp.float32)
    of_weights = jnp.einsum("bqhk,bvhk->bhqv", gradient, value, preferred_element_type=jnp.float32)
    of_scores = (weights * (of_weights - total[..., None])).astype(query.dtype)
    of_query = jnp.einsum("bhqv,bvhk->bqhk", of_scores, key)
    of_key = jnp.einsum("bhqv,bqhk->bvhk", of_scores, query)
    return of_query, of_key, jnp.einsum("bhqv,bqhk->bvhk", weights, gradient)


einsum.defvjp(einsum_forward, einsum_backward)


@jax.custom_vjp
def gradient_as_is(x):
    """x, whose gradient a TPU makes in the shape of x, whatever shape it is asked for in afterwards."""
    return x


gradient_as_is.defvjp(
    lambda x: (x, None),
    lambda _, gradient: (jax.lax.optimization_barrier(gradient) if hardware.platform() == "tpu" else gradient,),
)


def in_memory(x, *order: int):
    """x, whose axes a TPU keeps in memory in that order, the last one as neighbours.

    Left to itself, the compiler puts the batch last where a chip has a multiple of 128 examples, and then copies every
    square of attention's scores from one order to another, five times: two layers of B/16 with 128 images and a float32
    softmax on v5e take 71.4 Mcycles and 2.36 GiB, and 51.7 and 1.92 with orders of ours. Those are the ones that it
    chooses itself for 64 images.
    """
    return with_layout_constraint(x, Layout(order)) if hardware.platform() == "tpu" else x


def cudnn_refuses(dtype, width: int) -> str:
    """What keeps cuDNN from heads of that dtype and width, in words; "" where it takes them."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"does not compute in {jnp.dtype(dtype).name}: use dtype=bfloat16"
    if width > 128 or width % 8:
        return f"takes heads of at most 128 channels, a multiple of 8, and these have {width}: use attention=auto"
    return ""


def choose(wanted: str, query, key, platform: str) -> str:
    """The way to compute attention, by shape, dtype and platform: a name of `ATTENTIONS` other than auto.

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
        raise UserError(f"attention=cudnn runs on NVIDIA GPUs from Ampere on, not on {platform}: use auto or blockwise")
    if wanted == "cudnn" and refused:
        raise UserError(f"attention=cudnn {refused}")
    if query.shape[1] == 1:
        return "einsum"
    if wanted != "auto":
        return wanted
    if query.shape[1] * key.shape[1] <= EINSUM_UP_TO**2:
        return "einsum"
    return {"tpu": "splash", "cuda": "blockwise" if refused else "cudnn"}.get(platform, "blockwise")


def operands_alone(dtype) -> bool:
    """Whether only the operands of products are bfloat16 where a layer's `dtype` is: on CPUs.

    They have instructions for such products, and none for other arithmetic of bfloat16.
    """
    return dtype == jnp.bfloat16 and hardware.platform() == "cpu"


def layer(dtype) -> dict:
    """What flax's layers of that dtype are made with: `dtype` and, where it is not theirs, `dot_general`."""
    if operands_alone(dtype):
        return dict(dtype=jnp.float32, dot_general=products.dot_general)
    return dict(dtype=dtype)


def patch_layer(dtype) -> dict:
    """What flax's convolution that embeds patches is made with."""
    if operands_alone(dtype):
        return dict(dtype=jnp.float32, conv_general_dilated=products.patches)
    return dict(dtype=dtype)


def layer_dtype(dtype):
    """Of the arithmetic between products, and of the residual stream."""
    return layer(dtype)["dtype"]


def activation(function, dtype):
    """`function` of an array, in `layer_dtype`.

    On CPUs its backward pass computes it again from its input: for Ti/16 with 16 images, of 645 MiB 481 are left, and
    3 % of the time are spared. On TPUs that breaks fusions: B/16 with 128 images takes 284 Mcycles instead of 268.
    """
    cast = lambda x: function(x.astype(layer_dtype(dtype)))  # noqa: E731
    return jax.checkpoint(cast) if hardware.platform() == "cpu" else cast


def matmul(x, kernel, dtype):
    """[..., in] @ [in, out] -> [..., out] in `layer_dtype`."""
    if operands_alone(dtype):
        return products.matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)
    return x.astype(dtype) @ kernel


def on_every_device(function, *arrays):
    """Calls `function` with each device's own examples and heads of arrays [batch, length, heads, kv].

    XLA can split neither a Pallas kernel nor, in all cases, cuDNN's. Axes that do not divide an array, as the one
    example of an initialisation, are computed by all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arrays)

    def fitting(size, axes):
        names = (axes,) if isinstance(axes, str) else axes or ()
        return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None

    spec = PartitionSpec(*map(fitting, arrays[0].shape, sharding.spec("batch", "length", "heads", "kv")))
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
        return products.attention(scaled(query), key, value, jnp.dtype(dtype))
    if chosen == "einsum":
        return einsum(scaled(query), key, value, jnp.dtype(softmax_dtype))
    return on_every_device(LINEAR_MEMORY[chosen], query, key, value)
