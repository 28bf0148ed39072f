"""Attention of short sequences on TPUs: a Pallas kernel that keeps the scores in on-chip memory."""

import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.distributed import hardware

# A register of a TPU has 8 x 128 float32 numbers.
SUBLANES = 8
LANES = 128
# The most registers of scores in a step of the kernel: its program is unrolled over heads, and the
# backward pass takes about 13 bundles for each of these.
MAX_REGISTERS = 1024
# The most bytes of its blocks, which are double-buffered.
MAX_BLOCK_BYTES = 12 * 2**20
# Besides them a kernel needs memory for registers that the compiler spills: 5.2 MiB for G/14.
SPILLED_BYTES = 6 * 2**20
DEFAULT_KERNEL_BYTES = 16 * 2**20  # of on-chip memory

NAME = "short_attention_"  # of the kernels in a compiled program, before the channels of a head

# Dimension numbers of products of matrices: a b, a b^T, a^T b.
PLAIN = (((1,), (0,)), ((), ()))
RIGHT_TRANSPOSED = (((1,), (1,)), ((), ()))
LEFT_TRANSPOSED = (((0,), (0,)), ((), ()))


def product(a, b, dimensions):
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def heads_of(width: int, kv: int) -> list[tuple[int, int, int]]:
    """(start, stop, offset) of each head: the lanes of the registers that contain it, and how many
    of them precede its own `kv`.
    """
    heads = []
    for first in range(0, width, kv):
        start = first // LANES * LANES
        stop = min(math.ceil((first + kv) / LANES) * LANES, width)
        heads.append((start, stop, first - start))
    return heads


def mask_head(x, offset: int, kv: int):
    """x [rows, lanes] with zeros outside of the `kv` lanes of a head.

    A product over all lanes is then one over those of the head, so that no lane has to be moved.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((lane >= offset) & (lane < offset + kv), x, jnp.zeros_like(x))


def add_registers(sums: dict, start: int, x, axis: int) -> None:
    """Adds x, which begins at lane `start`, to `sums`: first lane of a register -> its channels,
    which are along `axis`.
    """
    for lane in range(0, x.shape[axis], LANES):
        part = jax.lax.slice_in_dim(x, lane, min(lane + LANES, x.shape[axis]), axis=axis)
        before = sums.get(start + lane)
        sums[start + lane] = part if before is None else before + part


def exponentials(scores, kv: int, axis: int):
    """exp(scores / sqrt(kv) - maximum) over an axis."""
    factor = math.log2(math.e) / math.sqrt(kv)
    return jnp.exp2((scores - scores.max(axis, keepdims=True)) * factor)


def forward_kernel(query, key, value, output, *, kv: int):
    outputs = {}
    for start, stop, offset in heads_of(query.shape[-1], kv):
        own = functools.partial(mask_head, offset=offset, kv=kv)
        v = own(value[0, :, start:stop])
        scores = product(own(query[0, :, start:stop]), key[0, :, start:stop], RIGHT_TRANSPOSED)
        weights = exponentials(scores, kv, 1)
        y = product(weights.astype(v.dtype), v, PLAIN) / weights.sum(1, keepdims=True)
        add_registers(outputs, start, y, 1)
    for start, y in outputs.items():
        output[0, :, start : start + y.shape[1]] = y.astype(output.dtype)


def backward_kernel(query, key, value, gradient, of_query, of_key, of_value, *, kv: int):
    dtype = query.dtype
    queries, keys, values = {}, {}, {}
    for start, stop, offset in heads_of(query.shape[-1], kv):
        own = functools.partial(mask_head, offset=offset, kv=kv)
        q = query[0, :, start:stop]
        k = own(key[0, :, start:stop])
        g = own(gradient[0, :, start:stop])
        # [keys, queries]: sums over keys are then sums of registers.
        weights = exponentials(product(k, q, RIGHT_TRANSPOSED), kv, 0)
        weights = weights * (1 / weights.sum(0, keepdims=True))
        of_weights = product(value[0, :, start:stop], g, RIGHT_TRANSPOSED)
        mean = (weights * of_weights).sum(0, keepdims=True)
        of_scores = (weights * (of_weights - mean)).astype(dtype)
        add_registers(values, start, product(weights.astype(dtype), g, PLAIN), 1)
        add_registers(keys, start, product(of_scores, own(q), PLAIN), 1)
        add_registers(queries, start, product(k, of_scores, LEFT_TRANSPOSED), 0)
    scale = 1 / math.sqrt(kv)
    for start, y in queries.items():
        of_query[0, :, start : start + y.shape[0]] = (y.T * scale).astype(dtype)
    for start, y in keys.items():
        of_key[0, :, start : start + y.shape[1]] = (y * scale).astype(dtype)
    for start, y in values.items():
        of_value[0, :, start : start + y.shape[1]] = y.astype(dtype)


def block_width(length: int, other: int, embed: int, kv: int, itemsize: int) -> int:
    """Channels that one step of the kernels takes: as many whole heads as its limits allow, in
    whole registers or the whole width. 0 if not even the fewest fit.
    """
    fewest = math.lcm(kv, LANES)
    most_bytes = min(MAX_BLOCK_BYTES, hardware.kernel_bytes() - SPILLED_BYTES)
    widths = [width for width in range(fewest, embed, fewest) if embed % width == 0]

    def fits(width: int) -> bool:
        forward = math.ceil(length / SUBLANES) * math.ceil(other / LANES)
        backward = math.ceil(other / SUBLANES) * math.ceil(length / LANES)
        return (
            block_bytes(length, other, width, itemsize) <= most_bytes
            and max(forward, backward) * (width // kv) <= MAX_REGISTERS
        )

    return max(filter(fits, [*widths, embed]), default=0)


def block_bytes(length: int, other: int, width: int, itemsize: int) -> int:
    """Of the blocks of the backward pass, two of each."""
    rows = 3 * length + 4 * other
    return 2 * rows * width * itemsize


def run_kernel(kernel, like, arrays, kv: int, interpret: bool):
    """`kernel` for each example and each block of channels of arrays [batch, length, embed]; its
    outputs are `like` those arrays. Pallas is imported only here.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, length, embed = arrays[0].shape
    other = arrays[1].shape[1]
    itemsize = arrays[0].dtype.itemsize
    width = block_width(length, other, embed, kv, itemsize)
    memory = None  # the default
    if block_bytes(length, other, width, itemsize) > DEFAULT_KERNEL_BYTES - SPILLED_BYTES:
        memory = hardware.kernel_bytes()
    semantics = ("parallel", "parallel")

    def block(x):
        return pl.BlockSpec((1, x.shape[1], width), lambda example, part: (example, 0, part))

    return pl.pallas_call(
        functools.partial(kernel, kv=kv),
        grid=(batch, embed // width),
        in_specs=[block(x) for x in arrays],
        out_specs=[block(x) for x in like],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=memory
        ),
        name=f"{NAME}{kv}",
        interpret=interpret,
    )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention_of_rows(query, key, value, kv: int, interpret: bool):
    """Attention of arrays [batch, length, heads * kv]."""
    return forward(query, key, value, kv, interpret)[0]


def forward(query, key, value, kv, interpret):
    arrays = query, key, value
    (output,) = run_kernel(forward_kernel, [query], arrays, kv, interpret)
    return output, arrays


def backward(kv, interpret, arrays, gradient):
    return tuple(run_kernel(backward_kernel, arrays, (*arrays, gradient), kv, interpret))


attention_of_rows.defvjp(forward, backward)


def short_attention(query, key, value, interpret: bool = False):
    """Attention by a kernel for TPUs that holds the scores of whole heads on the chip; softmax in
    float32.

    Args:
      query: [batch, length, heads, kv], not scaled.
      key, value: [batch, other, heads, kv].
      interpret: run the kernel without a TPU, slowly.

    Returns:
      [batch, length, heads, kv] in the dtype of `query`.
    """
    rows = [x.reshape(*x.shape[:2], -1) for x in (query, key, value)]
    return attention_of_rows(*rows, query.shape[-1], interpret).reshape(query.shape)
