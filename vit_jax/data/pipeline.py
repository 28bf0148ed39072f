"""The input pipeline: a pure function of (config, seed, step). Position is the step; there is no other state."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from vit_jax.data import images
from vit_jax.data.sources import Source
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

SHUFFLE_SALT, AUGMENT_SALT = 0, 1
# With TensorFlow's default of 4 the batches of a sorted folder are too alike to be random (65,536 examples: 15 sigma);
# from 8 on the order passes chi-square tests against uniform for 10^3 to 10^6 examples.
ROUNDS = 16


def train_ids(num_examples: int, batch_size: int, rows: np.ndarray, seed: int) -> Callable:
    """Which examples step n reads: every epoch is a permutation of the split, computed and not stored.

    Returns:
      f(step) -> (id [rows] int64, epoch [rows] int64, mask [rows] float32).
    """

    def shuffle_key(epoch):
        # RandomIndexShuffle uses few bits of each number of its key (8 up to 65,536 examples): fill all of them.
        key = tf.random.fold_in(tf.constant([seed, SHUFFLE_SALT], tf.int32), epoch)
        return tf.random.stateless_uniform([3], key, minval=None, maxval=None, dtype=tf.int64)

    def ids(step):
        position = step * batch_size + tf.constant(rows, tf.int64)
        epoch = position // num_examples
        epochs, which = tf.unique(epoch)
        key = tf.gather(tf.map_fn(shuffle_key, epochs), which)
        last = tf.fill(tf.shape(epoch), tf.constant(num_examples - 1, tf.int64))
        shuffled = tf.raw_ops.RandomIndexShuffle(index=position % num_examples, seed=key, max_index=last, rounds=ROUNDS)
        return shuffled, epoch, tf.ones_like(epoch, tf.float32)

    return ids


def eval_ids(num_examples: int, batch_size: int, rows: np.ndarray) -> Callable:
    """Like `train_ids`, in order and once; mask 0 marks the padding of the last batch."""

    def ids(step):
        position = step * batch_size + tf.constant(rows, tf.int64)
        mask = tf.cast(position < num_examples, tf.float32)
        return tf.minimum(position, num_examples - 1), tf.zeros_like(position), mask

    return ids


def one_or_blank(make: Callable, blank: Callable) -> Callable:
    """f(*item) -> a data set of one example: make(*item), or blank(*item) where that fails."""

    def each(*item):
        source = tf.data.Dataset.from_tensors(item)
        return source.map(make).ignore_errors().concatenate(source.map(blank)).take(1)

    return each


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Batches of this process: dicts of `image` uint8 [rows, S, S, 3], `label` int32, `mask` float32, `id` int64."""

    source: Source
    ids: Callable
    image: Callable
    size: int
    seed: int
    rows: int
    steps: int
    on_corrupt: str
    threads: int = 0
    bad: set = dataclasses.field(default_factory=set)  # examples of this process that were blanked

    def example(self, index, epoch, mask) -> dict:
        key = tf.constant([self.seed, AUGMENT_SALT], tf.int32)
        for value in (epoch, index):
            key = tf.random.fold_in(key, value)
        record = tf.numpy_function(self.source.read, [index], tf.string, stateful=False)
        encoded, label = self.source.parse(tf.ensure_shape(record, []), index)
        image = tf.ensure_shape(self.image(encoded, key), [self.size, self.size, 3])
        return dict(image=image, label=label, mask=mask, id=index)

    def blank(self, index, epoch, mask) -> dict:
        image = tf.zeros([self.size, self.size, 3], tf.uint8)
        return dict(image=image, label=tf.zeros([], tf.int32), mask=tf.zeros([]), id=index)

    def dataset(self, start: int, steps: int, careful: bool) -> tf.data.Dataset:
        """Batches from `start` to `steps`; `careful` puts a blank, masked example where one can't be read."""
        items = tf.data.Dataset.range(start, steps).map(self.ids).unbatch()
        threads = self.threads or os.cpu_count()
        if careful:
            each = one_or_blank(self.example, self.blank)
            examples = items.interleave(each, cycle_length=threads, num_parallel_calls=threads, deterministic=True)
        else:
            examples = items.map(self.example, num_parallel_calls=threads, deterministic=True)
        options = tf.data.Options()
        # Its optimizer thread can hold up the end of an iterator for most of a minute, and there is nothing to tune.
        options.autotune.enabled = False
        return examples.batch(self.rows, drop_remainder=True).prefetch(2).with_options(options)

    def unreadable(self, step: int) -> list[str]:
        """Names of the examples of one step that can't be read or decoded."""
        wanted = self.ids(tf.constant(step, tf.int64))[2].numpy()
        batch = next(self.dataset(step, step + 1, careful=True).as_numpy_iterator())
        return [self.source.describe(int(i)) for i in batch["id"][batch["mask"] < wanted]]

    def count_blanks(self, step: int, batch: dict) -> None:
        """Notes and names the examples of a batch that `careful` blanked."""
        if batch["mask"].all():
            return
        wanted = self.ids(tf.constant(step, tf.int64))[2].numpy()
        for i in batch["id"][batch["mask"] < wanted].tolist():
            if i not in self.bad:
                log.warning("%s can't be read as an image and is skipped", self.source.describe(i))
                self.bad.add(i)

    def batches(self, start: int = 0) -> Iterator[dict]:
        """Yields numpy batches from step `start` on.

        Raises:
          UserError: an example can't be read and `on_corrupt` is "error"; it names the example.
        """
        iterator = self.dataset(start, self.steps, self.on_corrupt == "skip").as_numpy_iterator()
        for step in range(start, self.steps):
            try:
                batch = next(iterator)
            except tf.errors.OpError as error:
                bad = self.unreadable(step)
                if not bad:
                    raise
                raise UserError(
                    f"{bad[0]} can't be read as an image ({len(bad)} such in the batch of step {step}): "
                    f"remove or replace it, or set data.on_corrupt=skip; the decoder says: {one_line(error)[:160]}"
                ) from None
            self.count_blanks(step, batch)
            yield batch


def train_pipeline(config, source: Source, rows: np.ndarray, total_steps: int) -> Pipeline:
    """The training data of a run; `rows` of the global batch belong to this process."""
    data = config.data
    return Pipeline(
        source=source,
        ids=train_ids(source.num_examples, data.batch_size, rows, config.seed),
        image=images.train_image(data, config.image_size),
        size=config.image_size,
        seed=config.seed,
        rows=len(rows),
        steps=total_steps,
        on_corrupt=data.on_corrupt,
        threads=data.threads,
    )


def eval_pipeline(
    data, source: Source, rows: np.ndarray, batch_size: int, image_size: int, on_corrupt: str, threads: int = 0
) -> Pipeline:
    """Every example of a split once, in order."""
    return Pipeline(
        source=source,
        ids=eval_ids(source.num_examples, batch_size, rows),
        image=images.eval_image(data, image_size),
        size=image_size,
        seed=0,
        rows=len(rows),
        steps=-(-source.num_examples // batch_size),
        on_corrupt=on_corrupt,
        threads=threads,
    )
