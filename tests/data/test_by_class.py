"""`data.class_balance`: how often each class is seen, exactly, and on any number of hosts."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import last_error

from vit_jax import config as configs
from vit_jax.data import order
from vit_jax.data.sources import by_class
from vit_jax.data.sources.listing import InMemory
from vit_jax.errors import UserError
from vit_jax.train import __main__ as train

LABELS = np.asarray([2, 0, 2, 1, 2, 2, 0, 2, 2, 2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 2])  # 3, 1, 16


def source_of(labels) -> InMemory:
    labels = np.asarray(labels)
    return InMemory(
        class_names=(),
        num_classes=3,
        fingerprint="",
        all_labels=labels,
        splits={},
        name="test",
        files=[f"{i}".encode() for i in range(len(labels))],
    )


def seen(balance: float, steps, batch_size: int = 16, rows=None) -> np.ndarray:
    """The records of the rows of some steps, int [steps * rows], as numbers of `LABELS`."""
    source = by_class.ByClass(source_of(LABELS), balance, "test")
    rows = np.arange(batch_size) if rows is None else rows
    items = order.train_items(source.parts, batch_size, rows, seed=3, block=source.block)
    index = [items(tf.constant(step, tf.int64))["index"].numpy() for step in steps]
    return np.asarray([int(record) for record in source.read(np.concatenate(index).tolist())])


def test_every_class_equally_often_means_in_every_three_examples():
    drawn = seen(1.0, range(12))
    for block in LABELS[drawn].reshape(-1, 3):
        assert sorted(block) == [0, 1, 2]
    for label, size in ((0, 3), (1, 1), (2, 16)):  # and each image of a class as often as another
        epochs = drawn[LABELS[drawn] == label][: 64 // size * size].reshape(-1, size)
        assert all(sorted(epoch) == np.flatnonzero(label == LABELS).tolist() for epoch in epochs)


@pytest.mark.parametrize("balance", [0.25, 0.5, 0.9])
def test_between_the_frequencies_are_powers_of_the_counts(balance):
    wanted = np.asarray([3, 1, 16]) ** (1 - balance)
    block = int(np.round(100 * wanted).sum())
    counts = np.bincount(LABELS[seen(balance, range(-(-block // 16)))[:block]])
    np.testing.assert_array_equal(counts, np.round(100 * wanted))
    assert (counts / counts.sum() * wanted.sum() / wanted).min() > 0.99


def test_the_shares_of_many_classes_are_not_rounded_away():
    """A block of a mixture has 10,000 examples, too few for 21,843 classes."""
    counts = np.full(21_843, 1_000)
    assert by_class.shares(counts, 1.0).tolist() == [1] * 21_843
    counts[0] = 1
    shares = by_class.shares(counts, 0.5)
    assert shares[0] == 50 and set(shares[1:]) == {1581}  # 1 : sqrt(1000), common factors removed


def test_hosts_and_restarts_see_parts_of_the_same_batches():
    whole = seen(0.5, range(5, 9)).reshape(4, 16)
    for host in range(4):
        rows = np.arange(4 * host, 4 * host + 4)
        part = seen(0.5, range(5, 9), rows=rows).reshape(4, 4)
        np.testing.assert_array_equal(part, whole[:, rows])
    np.testing.assert_array_equal(seen(0.5, [8]), whole[3])


def test_labels_must_be_one_class_per_image():
    with pytest.raises(UserError, match=r"test number 1 has the label -1: correct the label"):
        by_class.ByClass(source_of([0, -1, 2]), 0.5, "photos train")
    with pytest.raises(UserError, match="one label per image, but images of photos train may have"):
        by_class.ByClass(source_of([[0, -1], [1, 2]]), 0.5, "photos train")


@pytest.mark.parametrize(
    "balance, says",
    [("1.5", "data.class_balance=1.5 is outside 0.0 to 1.0"), ("0.5", "no effect on a mixture")],
)
def test_mistakes_in_the_config(tmp_path, capsys, balance, says):
    path = tmp_path / "config.py"
    path.write_text(
        "def get_config():\n"
        f"    data = dict(name='mixture', mixture=(('digits', 1.0),), class_balance={balance})\n"
        "    return dict(total_steps=1, data=data)\n"
    )
    assert train.main([f"--config={path}", f"--workdir={tmp_path / 'run'}"]) == 2
    assert says in last_error(capsys)


def test_a_config_that_does_not_balance_reads_the_data_in_their_order():
    from vit_jax.data.sources import open as sources

    data = configs.defaults().data
    plain = sources.open_training(data)
    assert len(plain.parts) == 1 and plain.block == 10_000
    data.class_balance = 1.0
    balanced = sources.open_training(data)
    assert [size for size, _ in balanced.parts] == np.bincount(plain.labels()).tolist()
    assert balanced.fingerprint == plain.fingerprint
