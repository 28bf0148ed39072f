"""Attention on TPUs by JAX's splash kernel."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from vit_jax.models.ops.blockwise import blocks_of
from vit_jax.models.ops.scaling import scaled

# A TPU's registers have 128 lanes: the last dimension of every array that a kernel reads is padded
# to a multiple of it.
LANES = 128
# Most rows of queries and of keys, of 2 bytes per number, that fit into 16 MiB of scoped VMEM (v4,
# v5e, v5p), and the largest tile of scores beside them. Larger tiles run out of memory or spill;
# smaller ones take more bundles.
MAX_ROWS = 1536
MAX_TILE = 3 * 2**18
# Added to the scores of padding: exp(x - maximum) is exactly 0 then. bfloat16 can represent it.
MASKED_SCORE = -1e9


class SplashBlocks(NamedTuple):
    queries: int  # padded length
    keys: int  # padded length
    query_block: int  # rows in memory
    key_block: int  # rows in memory
    compute: int  # keys at a time


def splash_blocks(length: int, other: int, itemsize: int) -> SplashBlocks:
    """Sizes for `length` queries and `other` keys of `itemsize` bytes per number.

    A few queries make one block, which needs no padding: a block may be as long as its array. Keys
    are padded because a kernel takes a multiple of 128 of them, `compute`, at a time. Its work
    grows with their rows, and each step costs as much as about 64 rows more (in bundles that the
    compiler schedules for a v5e).
    """
    rows = MAX_ROWS * 2 // max(itemsize, 2)
    count, block = blocks_of(length, rows)
    if count > 1:
        block = LANES * math.ceil(block / LANES)
    key_count, key_rows = blocks_of(other, rows)
    sizes = range(LANES, min(rows, max(MAX_TILE // block, LANES)) + 1, LANES)
    compute = min(sizes, key=lambda size: (math.ceil(key_rows / size) * (size + 64), -size))
    key_block = compute * math.ceil(key_rows / compute)
    return SplashBlocks(count * block, key_count * key_block, block, key_block, compute)


def splash_kernel(sizes: SplashBlocks, interpret: bool):
    """The Pallas kernel for [heads, queries, kv] and [heads, keys, kv]. Pallas is imported only
    here.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

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
    # The mask of one head applies to all of them.
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.FullMask((sizes.queries, sizes.keys))]
    )
    return splash_attention_kernel.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret
    )


def pad(x, rows: int, channels: int):
    """[batch, length, heads, kv] -> [batch, rows, heads, kv + channels], with zeros."""
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, channels)))


def splash(query, key, value, interpret: bool = False):
    """Attention by JAX's Pallas kernel for TPUs, "splash attention"; softmax in float32.

    Keys that are padding have `MASKED_SCORE` in a column that is 1 in every query. Unlike segment
    ids this mask costs nothing, because kernels read rows of 128 lanes whatever the width of a head
    (64, 72, 80, 88 or 104). Examples and heads become one axis: the kernel treats both alike.
    Padding precedes the swap of heads and length, so that XLA fuses it.

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

    def heads_first(x):
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], x.shape[3])

    query = pad(scaled(query), sizes.queries, channels)
    key = pad(key, sizes.keys, channels)
    value = pad(value, sizes.keys, 0)
    if channels:
        column = (jnp.arange(width + channels) == width).astype(query.dtype)
        exists = jnp.arange(sizes.keys)[:, None, None] < other
        query = query + column
        key = key + jnp.where(exists, 0, MASKED_SCORE).astype(key.dtype) * column
    y = splash_kernel(sizes, interpret)(heads_first(query), heads_first(key), heads_first(value))
    return y.reshape(batch, heads, sizes.queries, width).swapaxes(1, 2)[:, :length]
