"""The input pipeline: a pure function of (config, seed, step). Position is the step; there is no
other state.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from vit_jax.data import image_ops, images, order
from vit_jax.data.skipped import Skipped
from vit_jax.data.sources.source import Source
from vit_jax.data.stage_times import Stages
from vit_jax.errors import UserError, one_line

# Our functions are graphs already; without this, TensorFlow takes a second to rewrite their source.
graph = tf.autograph.experimental.do_not_convert
READ_AT_ONCE = 16  # records per call of Python, which holds a lock
PREFETCH = 2  # batches on the host, ready


def one_or_blank(make: Callable, blank: Callable) -> Callable:
    """f(item) -> a data set of one example: make(item), or blank(item) where that fails."""

    def each(item):
        source = tf.data.Dataset.from_tensors(item)
        return source.map(graph(make)).ignore_errors().concatenate(source.map(graph(blank))).take(1)

    return each


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Batches of this process: dicts of `image` uint8 [rows, S, S, 3], `label` int32 [rows] or
    [rows, set], `mask` float32, `id` int64, `seed` int32 [rows, 2]."""

    source: Source
    items: Callable
    image: Callable
    size: int
    rows: int
    steps: int
    on_corrupt: str
    threads: int
    bad: Skipped = dataclasses.field(
        default_factory=Skipped
    )  # examples of this process that were blanked
    stages: Stages = dataclasses.field(default_factory=Stages)

    def records(self, indices: np.ndarray) -> np.ndarray:
        found = np.empty(len(indices), object)
        with self.stages.time("read", len(indices)):
            found[:] = self.source.read(indices.tolist())
        return found

    def label_shape(self) -> list[int]:
        return [self.source.set_size] if self.source.set_size else []

    def read(self, item: dict) -> dict:
        """Adds the raw records of some items."""
        record = tf.numpy_function(self.records, [item["index"]], tf.string, stateful=False)
        return item | dict(record=tf.ensure_shape(record, item["index"].shape))

    def example(self, item: dict) -> dict:
        with tf.control_dependencies([item["record"]]):
            start = tf.timestamp()
        encoded, label = self.source.parse(item["record"], item["index"])
        lowest = -1 if self.source.set_size else 0
        inside = tf.reduce_all((label >= lowest) & (label < self.source.num_classes))
        known = image_ops.require(inside, "the label is no class:", label)
        label = tf.ensure_shape(label, self.label_shape())
        image = tf.ensure_shape(self.image(encoded, item["seed"]), [self.size, self.size, 3])
        with tf.control_dependencies([image, known]):
            seconds = tf.timestamp() - start
        kept = dict(mask=item["mask"], id=item["index"], seed=item["seed"], seconds=seconds)
        return dict(image=image, label=label) | kept

    def blank(self, item: dict) -> dict:
        image, zero = (
            tf.zeros([self.size, self.size, 3], tf.uint8),
            tf.zeros(self.label_shape(), tf.int32),
        )
        kept = dict(id=item["index"], seed=item["seed"], seconds=tf.zeros([], tf.float64))
        return dict(image=image, label=zero, mask=tf.zeros([])) | kept

    def read_one(self, item: dict) -> dict:
        record = self.read({name: value[None] for name, value in item.items()})["record"]
        return self.example(item | dict(record=record[0]))

    def dataset(self, start: int, steps: int, careful: bool) -> tf.data.Dataset:
        """Batches from `start` to `steps`; `careful` puts a blank, masked example where one can't
        be read.
        """
        parallel = dict(num_parallel_calls=self.threads, deterministic=True)
        items = tf.data.Dataset.range(start, steps).map(graph(self.items)).unbatch()
        if careful:
            each = one_or_blank(self.read_one, self.blank)
            examples = items.interleave(graph(each), cycle_length=self.threads, **parallel)
        else:
            records = items.batch(READ_AT_ONCE).map(graph(self.read), **parallel).unbatch()
            examples = records.map(graph(self.example), **parallel)
        options = tf.data.Options()
        # Its optimizer thread can hold up the end of an iterator for most of a minute, and there is
        # nothing to tune.
        options.autotune.enabled = False
        # A pool of its own, and operations that don't share it out further: 5 % less time in waking
        # threads.
        options.threading.private_threadpool_size = self.threads
        options.threading.max_intra_op_parallelism = 1
        return (
            examples.batch(self.rows, drop_remainder=True).prefetch(PREFETCH).with_options(options)
        )

    def wanted(self, step: int) -> np.ndarray:
        """The mask of a step before anything is read."""
        return self.items(tf.constant(step, tf.int64))["mask"].numpy()

    def unreadable(self, step: int) -> tuple[int, list[str]]:
        """The first step from `step` on with examples that can't be read or decoded, and their
        names.

        Records are read ahead: one that fails may belong to a batch behind that of `step`.
        """
        last = min(self.steps, step + 1 + -(-READ_AT_ONCE // self.rows))
        for number, batch in enumerate(
            self.dataset(step, last, careful=True).as_numpy_iterator(), step
        ):
            bad = batch["id"][batch["mask"] < self.wanted(number)]
            if len(bad):
                return number, [self.source.describe(int(i)) for i in bad]
        return step, []

    def count_blanks(self, step: int, batch: dict) -> None:
        """Notes and names the examples of a batch that `careful` blanked."""
        if batch["mask"].all():
            return
        for row in np.flatnonzero(batch["mask"] < self.wanted(step)):
            item = dict(index=batch["id"][row], seed=batch["seed"][row], mask=np.float32(1))
            if (i := int(item["index"])) not in self.bad:
                self.bad.note(i, self.source.describe(i), self.why(item))

    def why(self, item: dict) -> str:
        """The reason for which an example was blanked."""
        try:
            self.read_one({name: tf.constant(value) for name, value in item.items()})
        except Exception as error:
            return reason(error)
        return "it could not be read at first"

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
                where, bad = self.unreadable(step)
                if not bad:
                    raise
                raise UserError(
                    f"{bad[0]} can't be read as an image ({len(bad)} such in the batch of step "
                    f"{where}): remove or replace it, or set data.on_corrupt=skip; the reason: "
                    f"{reason(error)}"
                ) from None
            self.stages.add("decode", float(batch.pop("seconds").sum()), self.rows)
            self.count_blanks(step, batch)
            yield batch


def reason(error: Exception) -> str:
    """What TensorFlow says, without where in its graph that was."""
    text = re.sub(r"\{\{[^}]*\}\}|\[\[.*", "", one_line(error)).split(" Traceback ")[0]
    return re.sub(r".*Iterator::\S+: ", "", text).strip()[:160]


def cores() -> int:
    """Those that this process may use, in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def train_pipeline(config, source: Source, rows: np.ndarray, total_steps: int) -> Pipeline:
    """The training data of a run; `rows` of the global batch belong to this process."""
    data = config.data
    return Pipeline(
        source=source,
        items=order.train_items(source.parts, data.batch_size, rows, config.seed, data.repeats),
        image=images.train_image(data, config.image_size),
        size=config.image_size,
        rows=len(rows),
        steps=total_steps,
        on_corrupt=data.on_corrupt,
        threads=data.threads or cores(),
    )


def eval_pipeline(
    data,
    source: Source,
    rows: np.ndarray,
    batch_size: int,
    image_size: int,
    on_corrupt: str,
    threads: int = 0,
) -> Pipeline:
    """Every example of a split once, in order."""
    return Pipeline(
        source=source,
        items=order.eval_items(len(source), batch_size, rows),
        image=images.eval_image(data, image_size),
        size=image_size,
        rows=len(rows),
        steps=-(-len(source) // batch_size),
        on_corrupt=on_corrupt,
        threads=threads or cores(),
    )
