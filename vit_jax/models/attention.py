"""Attention that never holds the [batch, heads, length, length] weights: its memory grows with the tokens."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Keys per step of `blockwise`: the memory of its scores against the number of its steps.
KEY_BLOCK = 512

# A TPU's registers have 128 lanes: the last dimension of what a kernel reads is a multiple of it, whatever its shape.
LANES = 128
# Most rows of queries and of keys, of 2 bytes per number, that `splash` holds in 16 MiB of scoped VMEM (v4, v5e, v5p),
# and the largest tile of scores beside them. Larger tiles run out of it, or spill; smaller ones take more bundles.
MAX_ROWS = 1536
MAX_TILE = 3 * 2**18
# Added to the scores of padding. exp(x - maximum) is exactly 0 for it, and bfloat16 can hold it.
FAR = -1e9


def blocks_of(length: int, largest: int) -> tuple[int, int]:
    """(count, size) of equal blocks, as few as `largest` allows; padding is less than one row per block."""
    count = math.ceil(length / largest)
    return count, math.ceil(length / count)


# --- any platform -----------------------------------------------------------------------------------------------------


def key_blocks(key, value):
    """Blocks of keys, values and which of them exist: two [count, batch, size, heads, kv] and a bool [count, size]."""
    length = key.shape[1]
    count, size = blocks_of(length, KEY_BLOCK)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0), (0, 0)))
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    return cut(key), cut(value), (jnp.arange(count * size) < length).reshape(count, size)


def block_scores(query, key, exists, dtype):
    """Scaled scores of all queries against one block of keys, -infinity for padding: [batch, heads, length, size]."""
    scores = jnp.einsum("bqhk,bvhk->bhqv", query, key, preferred_element_type=dtype)
    return jnp.where(exists, scores, -jnp.inf)


def wide(x) -> jnp.dtype:
    """The dtype of softmax and sums: float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def blockwise_forward(query, key, value):
    """The output, and what the backward pass needs: the inputs, the output, and the log of every softmax's sum."""
    dtype = wide(query)
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    batch, length, heads, _ = query.shape

    def add(carry, block):
        largest, total, output = carry
        key, value, exists = block
        scores = block_scores(scaled, key, exists, dtype)
        new = jnp.maximum(largest, scores.max(-1))  # finite: every block has a key that exists
        weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
        part = jnp.einsum("bhqv,bvhk->bhqk", weights.astype(value.dtype), value, preferred_element_type=dtype)
        return (new, total * shrink + weights.sum(-1), output * shrink[..., None] + part), None

    start = jnp.full((batch, heads, length), -jnp.inf, dtype), jnp.zeros((batch, heads, length), dtype)
    start = (*start, jnp.zeros((batch, heads, length, value.shape[-1]), dtype))
    (largest, total, output), _ = jax.lax.scan(add, start, key_blocks(key, value))
    output = (output / total[..., None]).astype(query.dtype).swapaxes(1, 2)
    return output, (query, key, value, output, largest + jnp.log(total))


def blockwise_backward(saved, gradient):
    """Gradients of query, key and value, whose weights are computed again block by block (arXiv 2205.14135, B.4)."""
    query, key, value, output, log_total = saved
    dtype, scale = wide(query), 1 / math.sqrt(query.shape[-1])
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    shared = product("bqhk,bqhk->bhq", gradient, output)[..., None]

    def add(query_gradient, block):
        key, value, exists = block
        weights = jnp.exp(block_scores(scaled, key, exists, dtype) - log_total[..., None])
        value_gradient = product("bhqv,bqhk->bvhk", weights.astype(value.dtype), gradient)
        change = weights * (product("bqhk,bvhk->bhqv", gradient, value) - shared)
        change = change.astype(key.dtype)
        key_gradient = product("bhqv,bqhk->bvhk", change, scaled)
        query_gradient += product("bhqv,bvhk->bqhk", change, key) * scale
        return query_gradient, (key_gradient.astype(key.dtype), value_gradient.astype(value.dtype))

    start = jnp.zeros(query.shape, dtype)
    query_gradient, parts = jax.lax.scan(add, start, key_blocks(key, value))

    def joined(x):
        x = x.swapaxes(0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : key.shape[1]]

    return query_gradient.astype(query.dtype), *map(joined, parts)


@jax.custom_vjp
def blockwise(query, key, value):
    """Attention over blocks of keys with a running maximum and sum (arXiv 2112.05682); softmax in float32.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].

    Returns:
      [batch, length, heads, kv] in the dtype of `query`.
    """
    return blockwise_forward(query, key, value)[0]


blockwise.defvjp(blockwise_forward, blockwise_backward)


# --- TPU --------------------------------------------------------------------------------------------------------------


class SplashBlocks(NamedTuple):
    queries: int  # padded length
    keys: int
    query_block: int  # rows in memory
    key_block: int
    compute: int  # keys at a time


def splash_blocks(length: int, other: int, itemsize: int) -> SplashBlocks:
    """Sizes for `length` queries and `other` keys of `itemsize` bytes per number.

    A few queries make one block, which needs no padding: a block may be as long as its array. Keys are
    padded, for a kernel goes over them by multiples of 128, `compute` at a time. Its work grows with their rows, and
    each step costs about 64 rows more (bundles that the compiler schedules for a v5e).
    """
    rows = MAX_ROWS * 2 // max(itemsize, 2)
    count, block = blocks_of(length, rows)
    block = block if count == 1 else LANES * math.ceil(block / LANES)
    key_count, key_rows = blocks_of(other, rows)
    sizes = range(LANES, min(rows, max(MAX_TILE // block, LANES)) + 1, LANES)
    compute = min(sizes, key=lambda size: (math.ceil(key_rows / size) * (size + 64), -size))
    key_block = compute * math.ceil(key_rows / compute)
    return SplashBlocks(count * block, key_count * key_block, block, key_block, compute)


def splash_kernel(sizes: SplashBlocks, interpret: bool):
    """The kernel of Pallas for [heads, queries, kv] and [heads, keys, kv]; it is imported where it is used."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    # One backward kernel instead of two: it computes the weights once.
    blocks = splash_attention_kernel.BlockSizes(
        block_q=sizes.query_block,
        block_kv=sizes.key_block,
        block_kv_compute=sizes.compute,
        block_q_dkv=sizes.query_block,
        block_kv_dkv=sizes.key_block,
        block_kv_dkv_compute=sizes.compute,
        use_fused_bwd_kernel=True,
    )
    # One head stands for all of them.
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((sizes.queries, sizes.keys))])
    return splash_attention_kernel.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret
    )


def splash(query, key, value, interpret: bool = False):
    """Attention by JAX's Pallas kernel for TPUs, "splash attention"; softmax in float32.

    Keys that are padding carry `FAR` in a column that is 1 in every query: kernels read rows of 128 lanes whatever the
    width of a head (64, 72, 80, 88 or 104), so that this mask is free, which segment ids are not. Examples and heads
    are one axis, for nothing tells them apart. Padding happens before heads and length change places: XLA fuses it.

    Args:
      query: [batch, length, heads, kv].
      key, value: [batch, other, heads, kv].
      interpret: run the kernel without a TPU, slowly.

    Returns:
      [batch, length, heads, kv] in the dtype of `query`.
    """
    batch, length, heads, width = query.shape
    other = key.shape[1]
    sizes = splash_blocks(length, other, query.dtype.itemsize)
    channels = LANES - width % LANES if sizes.keys > other else 0

    def grow(x, rows, channels):
        return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, channels)))

    def lay(x):
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], x.shape[3])

    query = grow(query / jnp.sqrt(width).astype(query.dtype), sizes.queries, channels)
    key, value = grow(key, sizes.keys, channels), grow(value, sizes.keys, 0)
    if channels:
        column = (jnp.arange(width + channels) == width).astype(query.dtype)
        exists = jnp.arange(sizes.keys)[:, None, None] < other
        query, key = query + column, key + jnp.where(exists, 0, FAR).astype(key.dtype) * column
    y = splash_kernel(sizes, interpret)(lay(query), lay(key), lay(value))
    return y.reshape(batch, heads, sizes.queries, width).swapaxes(1, 2)[:, :length]


# --- GPU --------------------------------------------------------------------------------------------------------------


def cudnn(query, key, value):
    """Attention by cuDNN's fused kernel; softmax in float32. Shapes as in `blockwise`; float16 or bfloat16.

    JAX 0.10 refuses to train on odd lengths: those get a row of padding, which cuDNN leaves out.
    """
    batch, length = query.shape[:2]
    other = key.shape[1]
    lengths = {}
    if length % 2 or other % 2:
        lengths = dict(query_seq_lengths=jnp.full(batch, length), key_value_seq_lengths=jnp.full(batch, other))
    even = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)]
    return jax.nn.dot_product_attention(*even, **lengths, implementation="cudnn")[:, :length]
