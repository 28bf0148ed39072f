"""Mixtures, repeats and seeds: properties of the order that hold for any step."""

import numpy as np
import pytest
import tensorflow as tf

from vit_jax.data import order


def items(step: int, *, parts=((1000, 1.0),), batch_size=64, rows=None, seed=0, repeats=1) -> dict:
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    found = order.train_items(parts, batch_size, rows, seed, repeats)(tf.constant(step, tf.int64))
    return {name: value.numpy() for name, value in found.items()}


def test_the_hash_is_splitmix64():
    """First outputs of SplitMix64 from state 1234567, as in the tests of Java's and Julia's
    implementations.
    """
    golden_gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + (i + 1) * golden_gamma) % 2**64 for i in range(3)]
    found = order.mix64(tf.constant(states, tf.uint64)).numpy().tolist()
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_shares_are_exact_for_the_block():
    assert order.shares([3.0, 1.0]).tolist() == [7500, 2500]
    assert order.shares([1.0, 1.0, 1.0]).tolist() == [3334, 3333, 3333]
    assert order.shares([5.0]).tolist() == [10_000]


PARTS = ((300, 3.0), (17, 1.0), (90, 4.0))


def test_a_mixture_draws_by_weight_and_every_source_goes_round():
    """Over two blocks: exact shares, every example of a source equally often to one, epochs one
    after another.
    """
    found = [items(step, parts=PARTS, batch_size=1000, seed=7) for step in range(20)]
    index = np.concatenate([batch["index"] for batch in found])
    epoch = np.concatenate([batch["epoch"] for batch in found])
    starts = [0, 300, 317, 407]
    for start, stop, share in zip(starts, starts[1:], (7500, 2500, 10_000), strict=False):
        mine = (index >= start) & (index < stop)
        assert mine.sum() == share
        counts = np.bincount(index[mine] - start, minlength=stop - start)
        assert counts.max() - counts.min() <= 1
        for number in range(share // (stop - start)):  # an epoch is a permutation
            assert len(np.unique(index[mine & (epoch == number)])) == stop - start
    # Within a block the sources are mixed: 187.5 +- 11 of 500.
    halves = np.array_split(np.isin(index, range(300)), 40)
    assert max(abs(half.sum() - 187.5) for half in halves) < 5 * np.sqrt(500 * 0.375 * 0.625)


@pytest.mark.parametrize("parts", [((1000, 1.0),), PARTS])
@pytest.mark.parametrize("repeats", [1, 4])
def test_rows_of_processes_are_parts_of_the_global_batch(parts, repeats):
    options = dict(parts=parts, batch_size=64, repeats=repeats)
    for step in (0, 123_456):
        whole = items(step, **options)
        for rows in (range(0, 32), range(32, 64), [5, 9, 63]):
            part = items(step, rows=rows, **options)
            for name, value in part.items():
                np.testing.assert_array_equal(value, whole[name][list(rows)])


def test_repeats_stand_apart_and_are_augmented_anew():
    found = items(3, batch_size=48, repeats=3)
    index = found["index"].reshape(3, 16)
    np.testing.assert_array_equal(index, np.tile(index[:1], (3, 1)))
    assert len(np.unique(index[0])) == 16 and len(np.unique(found["seed"], axis=0)) == 48
    # An epoch of the data is three times as long in draws.
    assert items(62, batch_size=48, repeats=3)["epoch"].tolist() == ([0] * 8 + [1] * 8) * 3


def test_seeds_belong_to_the_example_and_its_epoch():
    """Another batch size changes which step an example is in, and nothing about it."""

    def by_example(batch_size: int) -> dict:
        found = [items(step, batch_size=batch_size) for step in range(4000 // batch_size)]
        epoch, index, seed = (
            np.concatenate([batch[name] for batch in found]) for name in ("epoch", "index", "seed")
        )
        keys = zip(epoch, index, strict=True)
        return dict(zip(keys, map(tuple, seed.tolist()), strict=True))

    small, large = by_example(50), by_example(400)
    assert small == large and len(set(small.values())) == 4000


def test_seeds_are_uniform_bits():
    seeds = np.concatenate(
        [items(step, batch_size=4096, parts=((10**6, 1.0),))["seed"] for step in range(4)]
    )
    bits = np.unpackbits(seeds.view(np.uint8), axis=1).mean(0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(len(seeds))
    assert abs(np.corrcoef(seeds[:-1, 0], seeds[1:, 0])[0, 1]) < 5 / np.sqrt(len(seeds))


def test_evaluation_is_in_order_with_masked_padding():
    found = order.eval_items(10, 4, np.arange(4))(tf.constant(2, tf.int64))
    assert found["index"].numpy().tolist() == [8, 9, 9, 9]
    assert found["mask"].numpy().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("size", [2, 3, 5, 17, 65_536, 65_537, 65_538, 131_073, 262_145, 1_048_577])
def test_the_shuffle_is_a_permutation_for_every_size(size):
    """TensorFlow's own leaves out the last index for 65,537, 262,145 and 1,048,577."""
    zero = tf.zeros([], tf.int64)
    for epoch in range(2):
        found = order.shuffle(tf.range(size, dtype=tf.int64), size, 0, 0, zero, zero + epoch)
        assert (np.bincount(found, minlength=size) == 1).all()
