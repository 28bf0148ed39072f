"""Which examples a step reads, and the random seed of each.

The first stage of the pipeline. Order and seeds are computed directly for any step; nothing is
stored.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data.sources.source import BLOCK

# What a hash is for; each purpose has its own.
SHUFFLE_SALT = 0
AUGMENT_SALT = 1
MIXTURE_SALT = 2
# Rounds of the shuffle. With TensorFlow's default of 4, the batches of a sorted folder are more
# alike than random ones (15 sigma for 65,536 examples); from 8 on, the order passes chi-square
# tests of uniformity for 10^3 to 10^6 examples.
ROUNDS = 16


def mix64(x):
    """A bijection of uint64 in which every bit depends on all: the finalizer of SplitMix64 (Steele
    et al. 2014).
    """

    def mix(x, shift: int):
        return x ^ tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64))

    x = mix(x, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
    x = mix(x, 27) * tf.constant(0x94D049BB133111EB, tf.uint64)
    return mix(x, 31)


def hash64(*values):
    """uint64 for integers, or uint64 [n] if some of them are tensors int64 [n]."""
    x = tf.zeros([], tf.uint64)
    for value in values:
        x = mix64(x + tf.cast(value, tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64))
    return x


def shuffle(position, size, *key):
    """Applies the permutation of 0 to `size` - 1 that `key` chooses to `position`, int64 [n].

    RandomIndexShuffle uses few bits of each number of its seed (8 for up to 65,536 examples), so
    that all bits of the seed must be random.
    """
    words = [tf.bitcast(hash64(*key, word), tf.int64) for word in range(3)]
    seed = tf.stack([tf.broadcast_to(word, tf.shape(position)) for word in words], axis=-1)
    size = tf.broadcast_to(tf.cast(size, tf.int64), tf.shape(position))
    # If the largest index is a power of two, such as 2^16, the result may not be a permutation:
    # TensorFlow 2.21 takes one bit too few. Then one more index is shuffled, and what is mapped to
    # it is shuffled again.
    spare = tf.cast(tf.equal(tf.bitwise.bitwise_and(size - 1, size - 2), 0), tf.int64)

    def permute(index):
        return tf.raw_ops.RandomIndexShuffle(
            index=index, seed=seed, max_index=size - 1 + spare, rounds=ROUNDS
        )

    index = permute(position)
    return tf.where(index == size, permute(index), index)


def shares(weights: Sequence[float], block: int = BLOCK) -> np.ndarray:
    """Number of examples of each source in a block, int64 [sources]: in proportion to the weights,
    by the method of largest remainders.
    """
    exact = np.asarray(weights, np.float64) / sum(weights) * block
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: block - counts.sum()]] += 1
    return counts


def deal(position, counts: np.ndarray, seed: int):
    """Which source the examples of a mixture come from: (source, position in that source), int64
    [n] each.
    """
    size = int(counts.sum())
    block = position // size
    slot = shuffle(position % size, size, seed, MIXTURE_SALT, block)
    ends = np.cumsum(counts)
    source = tf.searchsorted(tf.constant(ends), slot, side="right", out_type=tf.int64)
    first = tf.gather(tf.constant(ends - counts), source)
    return source, block * tf.gather(tf.constant(counts), source) + slot - first


def example_seeds(seed: int, epoch, index, repeat):
    """int32 [n, 2], the only source of randomness for an example, independent of its batch."""
    return tf.bitcast(hash64(seed, AUGMENT_SALT, epoch, index, repeat), tf.int32)


def train_items(
    parts: Sequence[tuple[int, float]],
    batch_size: int,
    rows: np.ndarray,
    seed: int,
    repeats: int = 1,
    block: int = BLOCK,
) -> Callable:
    """The order of training. Every epoch of a source is a permutation of it.

    Args:
      parts: (number of examples, weight) of every source; usually there is only one.
      rows: which rows of the global batch to return, int [rows].
      repeats: repeated augmentation (arXiv 1901.09335): copies of each image per batch.
      block: examples in which every source has its exact share.

    Returns:
      f(step) -> dict of `index` int64 [rows], `epoch` int64, `seed` int32 [rows, 2], `mask`
      float32.
    """
    sizes = np.asarray([size for size, _ in parts], np.int64)
    starts = np.cumsum(sizes) - sizes
    counts = shares([weight for _, weight in parts], block)
    distinct = batch_size // repeats
    slot = tf.constant(rows % distinct, tf.int64)
    repeat = tf.constant(rows // distinct, tf.int64)

    def items(step) -> dict:
        position = step * distinct + slot
        if len(parts) > 1:
            source, position = deal(position, counts, seed)
        else:
            source = tf.zeros_like(position)
        size = tf.gather(tf.constant(sizes), source)
        epoch = position // size
        index = shuffle(position % size, size, seed, SHUFFLE_SALT, source, epoch)
        index += tf.gather(starts, source)
        seeds = example_seeds(seed, epoch, index, repeat)
        return dict(index=index, epoch=epoch, seed=seeds, mask=tf.ones_like(epoch, tf.float32))

    return items


def ids(config, parts: Sequence[tuple[int, float]], step: int, block: int = BLOCK) -> list[int]:
    """Ids of the examples in the global batch of `step`, the number of updates done before it."""
    data = config.data
    rows = np.arange(data.batch_size)
    items = train_items(parts, data.batch_size, rows, config.seed, data.repeats, block)
    return items(tf.constant(step, tf.int64))["index"].numpy().tolist()


def eval_items(num_examples: int, batch_size: int, rows: np.ndarray) -> Callable:
    """Like `train_items`, but every example once and in order; mask 0 marks the padding of the
    last batch.
    """

    def items(step) -> dict:
        position = step * batch_size + tf.constant(rows, tf.int64)
        mask = tf.cast(position < num_examples, tf.float32)
        index = tf.minimum(position, num_examples - 1)
        seed = tf.zeros([len(rows), 2], tf.int32)
        return dict(index=index, epoch=tf.zeros_like(position), seed=seed, mask=mask)

    return items
