"""Which examples a step reads, and the seed of each: computed for any step at once, and not stored."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

SHUFFLE_SALT, AUGMENT_SALT, MIXTURE_SALT = 0, 1, 2
# With TensorFlow's default of 4 the batches of a sorted folder are too alike to be random (65,536
# examples: 15 sigma); from 8 on the order passes chi-square tests against uniform for 10^3 to 10^6
# examples.
ROUNDS = 16
# A mixture is dealt in blocks of this many examples, in which every source has its exact share.
BLOCK = 10_000


def mix64(x):
    """A bijection of uint64 in which every bit depends on all: the finalizer of SplitMix64 (Steele
    et al. 2014).
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64))) * tf.constant(
            factor, tf.uint64
        )
    return x ^ tf.bitwise.right_shift(x, tf.constant(31, tf.uint64))


def hash64(*values):
    """One uint64 for whole numbers, or for tensors int64 [n] of them: [n]."""
    x = tf.zeros([], tf.uint64)
    for value in values:
        x = mix64(x + tf.cast(value, tf.uint64) + tf.constant(0x9E3779B97F4A7C15, tf.uint64))
    return x


def shuffle(position, size, *key):
    """Maps `position` int64 [n] to its place in a permutation of 0 to `size` - 1 that `key`
    chooses.

    RandomIndexShuffle uses few bits of each number of its key (8 up to 65,536 examples): all of
    them are filled.
    """
    words = [tf.bitcast(hash64(*key, word), tf.int64) for word in range(3)]
    seed = tf.stack([tf.broadcast_to(word, tf.shape(position)) for word in words], axis=-1)
    size = tf.broadcast_to(tf.cast(size, tf.int64), tf.shape(position))
    # Where the largest index is a power of two, 2^16 and some above are no permutation in
    # TensorFlow 2.21, which takes a bit too few: there one more index is shuffled, and what lands
    # on it is shuffled again.
    spare = tf.cast(tf.equal(tf.bitwise.bitwise_and(size - 1, size - 2), 0), tf.int64)

    def permute(index):
        return tf.raw_ops.RandomIndexShuffle(
            index=index, seed=seed, max_index=size - 1 + spare, rounds=ROUNDS
        )

    found = permute(position)
    return tf.where(found == size, permute(found), found)


def shares(weights: Sequence[float]) -> np.ndarray:
    """Examples of each source in a block, in proportion to the weights by largest remainders: int64
    [sources].
    """
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


def deal(position, counts: np.ndarray, seed: int):
    """Which source the examples of a mixture come from: (source, position in that source), int64
    [n] each.
    """
    block, ends = position // BLOCK, np.cumsum(counts)
    place = shuffle(position % BLOCK, BLOCK, seed, MIXTURE_SALT, block)
    source = tf.searchsorted(tf.constant(ends), place, side="right", out_type=tf.int64)
    first = tf.gather(tf.constant(ends - counts), source)
    return source, block * tf.gather(tf.constant(counts), source) + place - first


def example_seeds(seed: int, epoch, index, repeat):
    """int32 [n, 2]: every random choice about an example comes from this, whatever batch it is in."""
    return tf.bitcast(hash64(seed, AUGMENT_SALT, epoch, index, repeat), tf.int32)


def train_items(
    parts: Sequence[tuple[int, float]],
    batch_size: int,
    rows: np.ndarray,
    seed: int,
    repeats: int = 1,
) -> Callable:
    """The order of training. Every epoch of a source is a permutation of it.

    Args:
      parts: (examples, weight) of every source of the mixture, mostly one.
      rows: those of the global batch that are wanted, int [rows].
      repeats: how often a batch holds each of its examples, each time augmented anew (arXiv
        1901.09335).

    Returns:
      f(step) -> dict of `index` int64 [rows], `epoch` int64, `seed` int32 [rows, 2], `mask`
      float32.
    """
    sizes = np.asarray([size for size, _ in parts], np.int64)
    starts, counts = np.cumsum(sizes) - sizes, shares([weight for _, weight in parts])
    distinct = batch_size // repeats
    slot, repeat = (tf.constant(part, tf.int64) for part in (rows % distinct, rows // distinct))

    def items(step) -> dict:
        position = step * distinct + slot
        source, position = (
            deal(position, counts, seed) if len(parts) > 1 else (tf.zeros_like(position), position)
        )
        size = tf.gather(tf.constant(sizes), source)
        epoch = position // size
        index = shuffle(position % size, size, seed, SHUFFLE_SALT, source, epoch) + tf.gather(
            starts, source
        )
        seeds = example_seeds(seed, epoch, index, repeat)
        return dict(index=index, epoch=epoch, seed=seeds, mask=tf.ones_like(epoch, tf.float32))

    return items


def ids(config, parts: Sequence[tuple[int, float]], step: int) -> list[int]:
    """Ids of the examples of the global batch that the update after `step` others reads."""
    data = config.data
    items = train_items(
        parts, data.batch_size, np.arange(data.batch_size), config.seed, data.repeats
    )
    return items(tf.constant(step, tf.int64))["index"].numpy().tolist()


def eval_items(num_examples: int, batch_size: int, rows: np.ndarray) -> Callable:
    """Like `train_items`, in order and once; mask 0 marks the padding of the last batch."""

    def items(step) -> dict:
        position = step * batch_size + tf.constant(rows, tf.int64)
        mask = tf.cast(position < num_examples, tf.float32)
        index, zero = tf.minimum(position, num_examples - 1), tf.zeros_like(position)
        return dict(index=index, epoch=zero, seed=tf.zeros([len(rows), 2], tf.int32), mask=mask)

    return items
