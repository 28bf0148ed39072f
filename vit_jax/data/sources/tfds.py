"""Data sets that TFDS has prepared, as array_record or tfrecord: random access to the records, with
images still encoded.
"""

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from vit_jax.cli import regular
from vit_jax.config import meanings
from vit_jax.data.sources import (
    array_record,
    index_cache,
    storage,
    tfds_labels,
    tfrecord,
    unlabelled,
)
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.unlabelled import INSTEAD
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)


def default_data_dir() -> str:
    import tensorflow_datasets as tfds

    return tfds.core.constants.DATA_DIR


def is_known(name: str) -> bool:
    """Whether TFDS has code for a data set of this name, whatever the config and version after it,
    as in imagenette/160px-v2:1.0.0.
    """
    import tensorflow_datasets as tfds

    try:
        tfds.builder_cls(re.split("[/:]", name)[0])
    except (tfds.core.registered.DatasetNotFoundError, ValueError):
        return False
    return True


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Removes the folder that TFDS makes, and leaves, for a data set that is not prepared."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def open_builder(name: str, data_dir: str):
    """The builder of a data set, prepared or not.

    Raises:
      UserError: TFDS does not know the data set, or can't open it.
    """
    import tensorflow_datasets as tfds

    where = data_dir or default_data_dir()
    if name.startswith("huggingface:"):  # TFDS would try the network for half a minute
        raise UserError(
            f"data set {name!r} is not prepared in {where}, and data sets of the Hugging Face hub "
            "are not read: save its images in folders, and correct data.name"
        )
    regular.check_below(os.path.join(os.path.expanduser(where), re.split("[/:]", name)[0]))
    try:
        with own_temporary_folder():
            return tfds.builder(name, data_dir=data_dir or None)
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(
            f"data set {name!r} is neither known to TFDS nor prepared in {where}: correct "
            f"data.name, or set data.data_dir{meanings.data_set_meant(name)}"
        ) from None
    except Exception as error:  # of any type, such as for a damaged dataset_info.json
        raise UserError(
            f"data set {name!r} can't be opened in {where}: {one_line(error)[:200]}: correct "
            "data.name"
        ) from None


def builder_of(name: str, data_dir: str):
    """The builder of a prepared data set."""
    builder = open_builder(name, data_dir)
    if not builder.info.splits:
        raise UserError(
            f"data set {name!r} is not prepared in {builder.data_dir}: run `python -m vit_jax.data "
            "prepare` with this config, or set data.data_dir to the folder that contains it"
        )
    return builder


def keys_of(info, name: str) -> tuple[str, str]:
    """The names of the features image and label."""
    import tensorflow_datasets as tfds

    image_key, label_key = (info.supervised_keys or ("image", "label"))[:2]
    for key, kind in ((image_key, tfds.features.Image), (label_key, tfds.features.ClassLabel)):
        feature = dict(info.features.items()).get(key)
        if not isinstance(feature, kind) and not (key == label_key and tfds_labels.is_set(feature)):
            raise UserError(
                f"data set {name!r} has no {key} of type {kind.__name__}, which classification "
                f"needs: choose another, {INSTEAD}"
            )
    return image_key, label_key


def image_key_of(info, name: str) -> str:
    """The name of the feature with the image, for training without labels."""
    import tensorflow_datasets as tfds

    features = dict(info.features.items())
    images = [key for key, feature in features.items() if isinstance(feature, tfds.features.Image)]
    for key in (*(info.supervised_keys or ())[:1], "image", *images):
        if key in images:
            return key
    raise UserError(f"data set {name!r} has no feature of type Image: choose another")


def instructions_of(info, name: str, split: str) -> list:
    """Which records of which files a split expression names."""
    try:
        found = info.splits[split].file_instructions
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(
            f"split {split!r} of {name} can't be read: {one_line(error)[:200]} It has "
            f"{', '.join(info.splits)}, or slices such as train[:90%]: correct it"
        ) from None
    if sum(part.take for part in found) < 1:
        raise UserError(
            f"split {split!r} of {name} has no examples: choose a larger part of "
            f"{', '.join(info.splits)}"
        )
    paths = [os.fspath(part.filename) for part in found]
    for number in storage.missing(paths):
        raise UserError(
            f"{paths[number]} of data set {name!r} is missing: prepare the data set again"
        )
    return found


class Library:
    """The records of array_record files on a local disk, by the library of the format."""

    def __init__(self, instructions):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        self.records = ArrayRecordDataSource(list(instructions))

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        # One by one takes half the time of the library's own way to read several.
        return [self.records[i] for i in numbers]


def open_records(info, instructions, distant: bool):
    if info.file_format.value != "array_record":
        return tfrecord.Records(instructions)
    return array_record.Records(instructions) if distant else Library(instructions)


class Records(Source):
    """The records of a TFDS split expression; `rule` gives their labels."""

    def __init__(
        self, builder, name: str, split: str, image_key: str, rule: tfds_labels.Rule, scale: int = 1
    ):
        info = builder.info
        instructions = instructions_of(info, name, split)
        parts = [
            (os.path.basename(part.filename), part.skip, part.take, part.examples_in_shard)
            for part in instructions
        ]
        named = re.findall(r"[\w.-]+", split)
        sizes = {key: part.num_bytes for key, part in info.splits.items() if key in named}
        fingerprint = index_cache.digest(
            info.full_name, repr(parts), repr(sizes), *([rule.what] if rule.what else [])
        )
        super().__init__(tuple(rule.names), len(rule.names), fingerprint, rule.set_size)
        self.title = f"{name} {split}"
        self.data_dir = os.fspath(builder.data_dir)
        self.count = sum(part.take for part in instructions)
        self.paths = [os.fspath(part.filename) for part in instructions]
        self.on_store = storage.is_distant(self.paths[0])
        self.stamps = None if self.on_store else storage.stamps(self.paths)
        self.records = open_records(info, instructions, self.on_store)
        self.parse_record = tfds_labels.make_parse(info.features, image_key, rule, scale)

    def __len__(self) -> int:
        return self.count

    @property
    def distant(self) -> bool:
        return self.on_store

    def changed_file(self) -> str | None:
        return None if self.on_store else storage.first_changed(self.paths, self.stamps)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return self.records.read(numbers)

    def parse(self, record, i):
        return self.parse_record(record)

    def describe(self, i: int) -> str:
        return f"record {i} of {self.title}"

    def labels(self) -> np.ndarray:
        """Reads the whole split, once: the labels are cached."""
        if not self.num_classes:
            return unlabelled.labels(self.count)
        where = self.fingerprint + self.data_dir
        arrays = index_cache.cached(
            "labels", where, self.scan_labels, lambda arrays: len(arrays["labels"]) == self.count
        )
        return arrays["labels"]

    def scan_labels(self) -> dict[str, np.ndarray]:
        def read(numbers):
            records = [*self.read(numbers.tolist()), b""]
            return np.asarray(records, object)[:-1]  # an array of objects even for one record

        def label(record):
            return tf.reshape(self.parse_record(tf.ensure_shape(record, []))[1], [-1])[0]

        log.info("reading the labels of %d records, once", self.count)
        numbers = tf.data.Dataset.range(self.count).batch(64)
        records = numbers.map(lambda i: tf.numpy_function(read, [i], tf.string, stateful=False))
        labels = records.unbatch().map(label).as_numpy_iterator()
        return dict(labels=np.fromiter(labels, np.int32, self.count))


def load(name: str, split: str, data_dir: str, labelled: bool = True) -> Source:
    """Opens a split of a prepared data set with its image and label."""
    builder = builder_of(name, data_dir)
    if not labelled:
        image_key = image_key_of(builder.info, name)
        return Records(builder, name, split, image_key, tfds_labels.NO_LABEL)
    image_key, label_key = keys_of(builder.info, name)
    rule = tfds_labels.of_feature(builder.info.features, label_key)
    return Records(builder, name, split, image_key, rule)
