"""Data sets that TFDS has prepared, as array_record or tfrecord: any record at once, images left
encoded.
"""

import logging
import os
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data.sources import index_cache, storage, tfds_labels, tfrecord
from vit_jax.data.sources.source import Source
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)


def builder_of(name: str, data_dir: str):
    """The builder of prepared data, or a UserError that says what is missing and how to get it."""
    import tensorflow_datasets as tfds

    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(
            f"data set {name!r} is neither known to TFDS nor prepared in {where}: check the name, "
            "or set data.data_dir"
        ) from None
    except Exception as error:  # of a damaged dataset_info.json, say, each library's own
        raise UserError(
            f"data set {name!r} can't be opened in {where}: {one_line(error)[:200]}: correct "
            "data.name"
        ) from None
    if not builder.info.splits:
        raise UserError(
            f"data set {name!r} is not prepared in {builder.data_dir}: run `python -m vit_jax.data "
            "prepare` with this config, or set data.data_dir to where it lies"
        )
    return builder


def keys_of(info, name: str) -> tuple[str, str]:
    """The features that hold image and label.

    Raises:
      UserError: there are none, as classification needs them.
    """
    import tensorflow_datasets as tfds

    image_key, label_key = (info.supervised_keys or ("image", "label"))[:2]
    for key, kind in ((image_key, tfds.features.Image), (label_key, tfds.features.ClassLabel)):
        feature = dict(info.features.items()).get(key)
        if not isinstance(feature, kind) and not (key == label_key and tfds_labels.is_set(feature)):
            raise UserError(
                f"data set {name!r} has no {key} of type {kind.__name__}, as classification needs: "
                "choose another"
            )
    return image_key, label_key


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
    for part in found:
        if not storage.exists(os.fspath(part.filename)):
            raise UserError(
                f"{part.filename} of data set {name!r} is missing: prepare the data set again"
            )
    return found


def array_record_reader(instructions) -> Callable:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(list(instructions))
    return lambda numbers: [
        records[i] for i in numbers
    ]  # half the time of its own way to read several


def read_labels(read: Callable, parse: Callable, count: int, fingerprint: str) -> np.ndarray:
    """The labels of all records, of sets the first, int32 [count]. Reads the whole split, once: the
    labels are kept.
    """

    def scan() -> dict[str, np.ndarray]:
        def records(numbers):
            return np.asarray([*read(numbers.tolist()), b""], object)[
                :-1
            ]  # an array of objects even for one record

        numbers = tf.data.Dataset.range(count).batch(64)
        pairs = numbers.map(
            lambda i: (tf.numpy_function(records, [i], tf.string, stateful=False), i)
        ).unbatch()
        labels = pairs.map(
            lambda record, i: tf.reshape(parse(tf.ensure_shape(record, []), i)[1], [-1])[0]
        )
        log.info("reading the labels of %d records, once", count)
        return dict(labels=np.fromiter(labels.as_numpy_iterator(), np.int32, count))

    arrays = index_cache.cached(
        "labels", fingerprint, scan, lambda arrays: len(arrays["labels"]) == count
    )
    return arrays["labels"]


def load(name: str, split: str, data_dir: str) -> Source:
    """Opens a split of a prepared data set by its image and label.

    Raises:
      UserError: it is not prepared, lacks a file or the split, or is not for classification.
    """
    builder = builder_of(name, data_dir)
    image_key, label_key = keys_of(builder.info, name)
    return open_split(
        builder, name, split, image_key, tfds_labels.of_feature(builder.info.features, label_key)
    )


def open_split(
    builder, name: str, split: str, image_key: str, rule: tfds_labels.Rule, scale: int = 1
) -> Source:
    """The records of a TFDS split expression, with images and labels as `labels.make_parse` reads
    them.

    Raises:
      UserError: there is no such split, or a file is missing.
    """
    info = builder.info
    instructions = instructions_of(info, name, split)
    is_array_record = info.file_format.value == "array_record"
    read = array_record_reader(instructions) if is_array_record else tfrecord.Reader(instructions)
    parse = tfds_labels.make_parse(info.features, image_key, rule, scale)
    count = sum(part.take for part in instructions)
    parts = [
        (os.path.basename(part.filename), part.skip, part.take, part.examples_in_shard)
        for part in instructions
    ]
    sizes = {
        key: part.num_bytes
        for key, part in info.splits.items()
        if key in re.findall(r"[\w.-]+", split)
    }
    fingerprint = index_cache.digest(
        info.full_name, repr(parts), repr(sizes), *([rule.what] if rule.what else [])
    )
    return Source(
        num_examples=count,
        num_classes=len(rule.names),
        class_names=tuple(rule.names),
        read=read,
        parse=parse,
        describe=lambda i: f"record {i} of {name} {split}",
        labels=lambda: read_labels(read, parse, count, fingerprint + os.fspath(builder.data_dir)),
        fingerprint=fingerprint,
        set_size=rule.set_size,
    )


def default_data_dir() -> str:
    import tensorflow_datasets as tfds

    return tfds.core.constants.DATA_DIR


def is_known(name: str) -> bool:
    """Whether TFDS has code for a data set of this name."""
    import tensorflow_datasets as tfds

    try:
        tfds.builder_cls(name)
    except (tfds.core.registered.DatasetNotFoundError, ValueError):
        return False
    return True


def open_builder(name: str, data_dir: str):
    """The builder of a data set, prepared or not.

    Raises:
      UserError: TFDS does not know it.
    """
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=data_dir or None)
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(
            f"TFDS does not know the data set {name!r}, it can't be prepared: correct data.name"
        ) from None
    except Exception as error:  # of a damaged dataset_info.json, say, each library's own
        raise UserError(
            f"data set {name!r} can't be opened by TFDS: {one_line(error)[:200]}: correct data.name"
        ) from None
