"""Batches of uint8 images on the host, from the records of a source.

They are a pure function of (config, seed, step): the position is the step, and there is no other
state but the list of what a run has left out (left_out.py). order.py says which examples a batch
has, images.py and views.py decode and crop them, to_device.py takes over the batches.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from vit_jax import config as configs
from vit_jax.cli.regular import NotRegular
from vit_jax.data import image_ops, images, order, shapes, views
from vit_jax.data.left_out import LeftOut
from vit_jax.data.read_ahead import ReadAhead
from vit_jax.data.shapes import Shapes
from vit_jax.data.skipped import Skipped, short_reason
from vit_jax.data.sources.source import Source
from vit_jax.data.stage_times import StageTimes
from vit_jax.distributed import hardware
from vit_jax.errors import LOST, Unavailable, UserError, one_line
from vit_jax.models import preparation
from vit_jax.models.classifier import Classifier

# Our functions are graphs already; without this, TensorFlow takes a second to rewrite their source.
graph = tf.autograph.experimental.do_not_convert
READ_AT_ONCE = 16  # records per call of Python, which holds a lock
# The same from a store: the more records are read at once, the more of them are neighbours, which
# one request reads. With read_ahead.py, about four times as many are in memory.
READ_AT_ONCE_DISTANT = 1024
PREFETCH = 2  # batches that are ready on the host


def one_or_blank(make: Callable, blank: Callable) -> Callable:
    """f(item) -> a data set of one example: make(item), or blank(item) if that fails."""

    def each(item):
        source = tf.data.Dataset.from_tensors(item)
        return source.map(graph(make)).ignore_errors().concatenate(source.map(graph(blank))).take(1)

    return each


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The rows of every global batch that this process feeds.

    A batch is a dict of
      image: uint8 [rows, H, W, 3], or as `shapes` says, as well as other images that it names;
      label: int32 [rows], or [rows, set_size] if an image may have several, padded with -1; 0 if
        the source has no classes;
      mask: float32 [rows], 0 for padding and for examples that failed and are skipped;
      id: int64 [rows], the index of the example in the source;
      seed: int32 [rows, 2], of every random choice about the example.

    An example fails if it can't be read or decoded, or if its label is not a class.
    """

    source: Source
    items: Callable  # f(batch number) -> index, seed and mask of each row; see order.py
    pixels: Callable  # f(encoded, seed, rotates) -> uint8 images by name; see images.py, views.py
    shapes: Shapes  # theirs
    rows: int
    steps: int
    on_corrupt: str
    threads: int
    exif_rotation: bool = True  # of those images of the source that may be turned by their EXIF
    left_out: LeftOut = dataclasses.field(default_factory=LeftOut)  # may grow between iterations
    skipped: Skipped = dataclasses.field(default_factory=Skipped)
    stages: StageTimes = dataclasses.field(default_factory=StageTimes)
    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)  # id -> why
    errors: list[UserError] = dataclasses.field(default_factory=list)  # that end the iteration

    @property
    def read_at_once(self) -> int:
        return READ_AT_ONCE_DISTANT if self.source.distant else READ_AT_ONCE

    def items_at(self, step) -> dict:
        """The items of the batch that is read at a step."""
        return self.items(self.left_out.batch_of(step))

    def records(self, indices: np.ndarray) -> np.ndarray:
        """The records, objects [n]; empty, which can't be decoded, if they can't be read."""
        records = np.empty(len(indices), object)
        with self.stages.time("read", len(indices)):
            try:
                records[:] = self.source.read(indices.tolist())
            except Exception as error:
                if isinstance(error, UserError) and not isinstance(error, NotRegular):
                    self.errors.append(error)  # no fault of an image
                    raise
                records[:] = [self.record_or_empty(i) for i in indices.tolist()]
        return records

    def record_or_empty(self, i: int) -> bytes:
        try:
            return self.source.read([i])[0]
        except Exception as error:
            if getattr(error, "errno", None):  # of the file system, which says nothing of the image
                self.errors.append(file_error(self.source.describe(i), error))
                raise self.errors[-1] from error
            self.unreadable[i] = f"{type(error).__name__}: {one_line(error)}"
            return b""

    def require_class(self, label):
        """An operation that fails if a label is not a class."""
        lowest = -1 if self.source.set_size else 0
        in_range = tf.reduce_all((label >= lowest) & (label < self.source.num_classes))
        return image_ops.require(in_range, "the label is not a class:", label)

    def label_shape(self) -> list[int]:
        return [self.source.set_size] if self.source.set_size else []

    def read(self, item: dict) -> dict:
        """Adds the raw records of some items."""
        record = tf.numpy_function(self.records, [item["index"]], tf.string, stateful=False)
        return item | dict(record=tf.ensure_shape(record, item["index"].shape))

    def example(self, item: dict) -> dict:
        """From a record to an example: parses, decodes, crops and resizes."""
        with tf.control_dependencies([item["record"]]):
            start = tf.timestamp()
        encoded, label = self.source.parse(item["record"], item["index"])
        is_class = self.require_class(label) if self.source.num_classes else label
        label = tf.ensure_shape(label, self.label_shape())
        rotates = self.exif_rotation and self.source.rotates(item["index"])
        found = self.pixels(encoded, item["seed"], rotates)
        found = {name: tf.ensure_shape(found[name], shape) for name, shape in self.shapes.items()}
        with tf.control_dependencies([*found.values(), is_class]):
            seconds = tf.timestamp() - start
        rest = dict(mask=item["mask"], id=item["index"], seed=item["seed"], seconds=seconds)
        return found | dict(label=label) | rest

    def blank(self, item: dict) -> dict:
        """Stands in for an example that failed."""
        black = {name: tf.zeros(shape, tf.uint8) for name, shape in self.shapes.items()}
        label = tf.zeros(self.label_shape(), tf.int32)
        rest = dict(id=item["index"], seed=item["seed"], seconds=tf.zeros([], tf.float64))
        return black | dict(label=label, mask=tf.zeros([])) | rest

    def read_one(self, item: dict) -> dict:
        record = self.read({name: value[None] for name, value in item.items()})["record"]
        return self.example(item | dict(record=record[0]))

    def groups(self, start: int, steps: int) -> tf.data.Dataset:
        """The items from step `start` up to `steps`, `read_at_once` at a time."""
        items = tf.data.Dataset.range(start, steps).map(graph(self.items_at))
        return items.unbatch().batch(self.read_at_once)

    def read_groups(self, start: int, steps: int, ahead: ReadAhead | None) -> tf.data.Dataset:
        """The same with their records."""
        if ahead:
            return ahead.groups(-(-(steps - start) * self.rows // self.read_at_once))
        parallel = dict(num_parallel_calls=self.threads, deterministic=True)
        return self.groups(start, steps).map(graph(self.read), **parallel)

    def dataset(
        self, start: int, steps: int, skip_failures: bool, ahead: ReadAhead | None = None
    ) -> tf.data.Dataset:
        """Batches from step `start` up to `steps`. With `skip_failures`, examples that fail are
        blank and masked; otherwise they end the iteration with an error.

        Args:
          ahead: has the records, if it takes long to read them.
        """
        parallel = dict(num_parallel_calls=self.threads, deterministic=True)
        records = self.read_groups(start, steps, ahead).unbatch()
        if skip_failures:
            each = one_or_blank(self.example, self.blank)
            examples = records.interleave(graph(each), cycle_length=self.threads, **parallel)
        else:
            examples = records.map(graph(self.example), **parallel)
        options = tf.data.Options()
        # The thread of the autotuner can delay the end of an iterator by most of a minute, and
        # there is nothing to tune.
        options.autotune.enabled = False
        # A thread pool of its own, and operations that are not split further: 5 % less time goes
        # into waking threads.
        options.threading.private_threadpool_size = self.threads + bool(ahead)  # which waits
        options.threading.max_intra_op_parallelism = 1
        batches = examples.batch(self.rows, drop_remainder=True).prefetch(PREFETCH)
        return batches.with_options(options)

    def arrays(self, start: int, steps: int, skip_failures: bool) -> Iterator[dict]:
        """The batches of `dataset` in numpy.

        Raises:
          UserError: files can't be read.
          tf.errors.OpError: an example fails, without `skip_failures`.
        """
        ahead = None
        if self.source.distant:
            ahead = ReadAhead(self.groups(start, steps), self.records)
        try:
            yield from self.dataset(start, steps, skip_failures, ahead).as_numpy_iterator()
        except tf.errors.OpError:
            if self.errors:
                raise self.errors[0] from None
            if ahead and ahead.error:
                raise ahead.error from None
            raise
        finally:
            if ahead:
                ahead.close()

    def failed(self, step: int, batch: dict) -> np.ndarray:
        """bool [rows], the examples of a batch that failed and are blank."""
        mask = self.items_at(tf.constant(step, tf.int64))["mask"].numpy()
        return batch["mask"] < mask

    def first_failures(self, step: int) -> tuple[int, list[int]]:
        """The first step from `step` on with examples that fail, and their ids.

        Records are read ahead: one that fails may belong to a batch after that of `step`.
        """
        last = min(self.steps, step + 1 + -(-self.read_at_once // self.rows))
        for number, batch in enumerate(self.arrays(step, last, skip_failures=True), step):
            failed = batch["id"][self.failed(number, batch)]
            if len(failed):
                return number, failed.tolist()
        return step, []

    def record_skipped(self, step: int, batch: dict) -> None:
        """Logs and lists the examples of a batch that failed, each once.

        Raises:
          UserError: too many failed.
        """
        failed = () if batch["mask"].all() else np.flatnonzero(self.failed(step, batch))
        for row in failed:
            index = int(batch["id"][row])
            if index not in self.skipped:
                item = dict(index=batch["id"][row], seed=batch["seed"][row], mask=np.float32(1))
                why = self.unreadable.get(index) or self.failure_reason(item)
                self.skipped.add(index, self.source.describe(index), why)
        self.skipped.count(self.rows, len(failed))

    def failure_reason(self, item: dict) -> str:
        try:
            self.read_one({name: tf.constant(value) for name, value in item.items()})
        except Exception as error:
            return short_reason(error)
        return "the first attempt failed, a second one did not"

    def batches(self, start: int = 0) -> Iterator[dict]:
        """Yields numpy batches from step `start` on.

        Raises:
          UserError: an example fails and `on_corrupt` is "error"; it names the example. Or files
            can't be read.
        """
        iterator = self.arrays(start, self.steps, self.on_corrupt == "skip")
        for step in range(start, self.steps):
            try:
                batch = next(iterator)
            except tf.errors.OpError as error:
                number, failed = self.first_failures(step)
                if not failed:
                    raise
                why = self.unreadable.get(failed[0]) or short_reason(error)
                raise UserError(
                    f"{self.source.describe(failed[0])} can't be read as an image ({len(failed)} "
                    f"such in the batch of step {number}): remove or replace it, or set "
                    f"data.on_corrupt=skip; the reason: {why}"
                ) from None
            self.stages.add("decode", float(batch.pop("seconds").sum()), self.rows)
            self.record_skipped(step, batch)
            yield batch


def file_error(name: str, error: OSError) -> UserError:
    """That a disk does not give a file, whatever is in it."""
    kind = Unavailable if error.errno in LOST else UserError
    return kind(
        f"{name} can't be read ({one_line(error)}): the file system failed, not the image, so it "
        "is not skipped; restore the file, or check the disk and its permissions, and run the same "
        "command again"
    )


def train_pixels(config, most: int) -> Callable:
    """What training sees of an encoded image of up to `most` pixels: see `Pipeline.pixels`."""
    if configs.has_views(config):
        return views.train_views(config, most)
    return images.alone(images.train_image(config.data, config.image_size, most))


def train_pipeline(
    config, source: Source, rows: np.ndarray, total_steps: int, left_out: LeftOut | None = None
) -> Pipeline:
    """The training data of a run; `rows` of the global batch belong to this process."""
    data = config.data
    threads = data.threads or hardware.cores()
    items = order.train_items(
        source.parts, data.batch_size, rows, config.seed, data.repeats, source.block
    )
    return Pipeline(
        source=source,
        items=items,
        pixels=train_pixels(config, images.most_pixels(threads)),
        shapes=shapes.of_training(config),
        rows=len(rows),
        steps=total_steps,
        on_corrupt=data.on_corrupt,
        threads=threads,
        exif_rotation=data.exif_rotation,
        left_out=left_out or LeftOut(),
    )


def eval_pipeline(
    data,
    source: Source,
    rows: np.ndarray,
    batch_size: int,
    image_size: int | tuple[int, int],
    on_corrupt: str,
    threads: int = 0,
    model: Classifier | None = None,
    exif_rotation: bool = True,
) -> Pipeline:
    """Every example of a split once, in order.

    Args:
      data: how images are prepared; see `preparation.configured`.
      model: expects images in its own way; None: those of the published weights.
      exif_rotation: see data.exif_rotation of a config.
    """
    threads = threads or hardware.cores()
    size = image_ops.pair(image_size)
    how = preparation.configured(data, size, model)
    return Pipeline(
        source=source,
        items=order.eval_items(len(source), batch_size, rows),
        pixels=images.alone(images.eval_image(how, images.most_pixels(threads))),
        shapes=shapes.of_one(size),
        rows=len(rows),
        steps=-(-len(source) // batch_size),
        on_corrupt=on_corrupt,
        threads=threads,
        exif_rotation=exif_rotation,
    )
