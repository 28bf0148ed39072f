"""Random access to the raw records of a data set: digits, a folder of images, or anything prepared by TFDS."""

import dataclasses
import importlib
import os
import pathlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data import digits, folder, splits
from vit_jax.errors import UserError, one_line


@dataclasses.dataclass(frozen=True)
class Source:
    """A random-access sequence of raw records.

    `read(i)` returns the bytes of record i; `parse(record, i)` turns them inside a TensorFlow graph into the encoded
    image (a string tensor) and its int32 label; `describe(i)` names it for messages.
    """

    num_examples: int
    num_classes: int
    class_names: Sequence[str]
    read: Callable[[int], bytes]
    parse: Callable
    describe: Callable[[int], str]


def indexed(read: Callable[[int], bytes], numbers: np.ndarray, labels, names, describe) -> Source:
    """A source whose labels are known beforehand; `numbers` are the chosen examples."""
    chosen = tf.constant(labels[numbers], tf.int32)
    return Source(
        num_examples=len(numbers),
        num_classes=len(names),
        class_names=names,
        read=lambda i: read(numbers[i]),
        parse=lambda record, i: (record, tf.gather(chosen, i)),
        describe=lambda i: describe(numbers[i]),
    )


def digits_source(split: str) -> Source:
    files, labels, parts = digits.load()
    numbers = splits.select(split, parts, "digits")
    return indexed(files.__getitem__, numbers, labels, digits.NAMES, lambda i: f"digits number {i}")


def read_file(path: str) -> bytes:
    return pathlib.Path(path).read_bytes()


def folder_source(root: str, split: str) -> Source:
    names, files, labels, parts = folder.load(root)
    numbers = splits.select(split, parts, root)
    return indexed(lambda i: read_file(files[i]), numbers, labels, names, files.__getitem__)


def tfrecord_offsets(path: str, count: int) -> np.ndarray:
    """(position, length) of the first `count` payloads of a TFRecord file: [count, 2] int64.

    Layout: length uint64, its checksum uint32, payload, checksum uint32.
    """
    found = np.empty((count, 2), np.int64)
    position, size = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        for i in range(count):
            header = os.pread(file.fileno(), 12, position)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size
            if position + length + 16 > size:
                raise UserError(f"{path} ends after {i} of {count} records: the data set is damaged, prepare it again")
            found[i] = position + 12, length
            position += 16 + length
    return found


class TFRecordReader:
    """Random access to the records of TFRecord shards. Keeps no file open: ImageNet alone has over 1,024."""

    def __init__(self, instructions):
        """`instructions`: TFDS file instructions with filename, skip and examples_in_shard or take."""
        self.paths, rows = [], []
        for number, part in enumerate(instructions):
            path = os.fspath(part.filename)
            offsets = tfrecord_offsets(path, part.skip + part.take)[part.skip :]
            self.paths.append(path)
            rows.append(np.column_stack([np.full(len(offsets), number), offsets]))
        self.rows = np.concatenate(rows)

    def __getitem__(self, i: int) -> bytes:
        number, position, length = self.rows[i].tolist()
        with open(self.paths[number], "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, position)


def array_record_reader(instructions):
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource(list(instructions))


def tfds_builder(name: str, data_dir: str):
    """The builder of prepared data, or a UserError that says what is missing and how to get it."""
    import tensorflow_datasets as tfds

    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except tfds.core.registered.DatasetNotFoundError:
        raise UserError(
            f"data set {name!r} is neither known to TFDS nor prepared in {where}: check the name, or set data.data_dir"
        ) from None
    except (AssertionError, ValueError, OSError, ImportError) as error:
        raise UserError(
            f"data set {name!r} can't be opened in {where}: {one_line(error)[:200]}: correct data.name"
        ) from None
    if not builder.info.splits:
        raise UserError(
            f"data set {name!r} is not prepared in {builder.data_dir}: run `tfds build {name}"
            f"{f' --data_dir={data_dir}' if data_dir else ''}`, or set data.data_dir to where it lies"
        )
    return builder


def tfds_parse(features, image_key: str, label_key: str) -> Callable:
    """Parses a serialized example without decoding its image."""
    import tensorflow_datasets as tfds

    decoders = {image_key: tfds.decode.SkipDecoding()}
    wanted = {image_key: features[image_key], label_key: features[label_key]}
    partial = type(features)(wanted)

    def parse(record, i):
        example = partial.deserialize_example(record, decoders=decoders)
        return example[image_key], tf.cast(example[label_key], tf.int32)

    return parse


def tfds_source(name: str, split: str, data_dir: str) -> Source:
    import tensorflow_datasets as tfds

    builder = tfds_builder(name, data_dir)
    info = builder.info
    try:
        instructions = info.splits[split].file_instructions
    except (ValueError, KeyError, AssertionError) as error:
        raise UserError(
            f"split {split!r} of {name} can't be read: {one_line(error)[:200]} It has {', '.join(info.splits)}, "
            "or slices such as train[:90%]: correct it"
        ) from None
    if not instructions:
        raise UserError(f"split {split!r} of {name} has no examples: choose a larger part of {', '.join(info.splits)}")
    image_key, label_key = (info.supervised_keys or ("image", "label"))[:2]
    for key, kind in ((image_key, tfds.features.Image), (label_key, tfds.features.ClassLabel)):
        if key not in info.features or not isinstance(info.features[key], kind):
            raise UserError(
                f"data set {name!r} has no {key} of type {kind.__name__}, as classification needs: choose another"
            )
    for part in instructions:
        if not os.path.exists(part.filename):
            raise UserError(f"{part.filename} of data set {name!r} is missing: prepare the data set again")
    is_array_record = builder.info.file_format.value == "array_record"
    reader = array_record_reader(instructions) if is_array_record else TFRecordReader(instructions)
    return Source(
        num_examples=sum(part.take for part in instructions),
        num_classes=info.features[label_key].num_classes,
        class_names=info.features[label_key].names,
        read=reader.__getitem__,
        parse=tfds_parse(info.features, image_key, label_key),
        describe=lambda i: f"record {i} of {name} {split}",
    )


def with_classes(source: Source, class_names: Sequence[str], num_classes: int, where: str) -> Source:
    """`source` with the class numbers of a model, matched by name where both have names.

    Raises:
      UserError: the source has a class that the model has not.
    """
    if len(class_names) != num_classes or not source.class_names:
        if source.num_classes > num_classes:
            raise UserError(
                f"{where} has {source.num_classes} classes, but the model has {num_classes}: choose other data"
            )
        return source
    numbers = {name: number for number, name in enumerate(class_names)}
    if unknown := [name for name in source.class_names if name not in numbers]:
        raise UserError(
            f"{where} has the class {unknown[0]!r}, which the model has not: choose data of the same classes"
        )
    table = tf.constant([numbers[name] for name in source.class_names], tf.int32)

    def parse(record, i):
        encoded, label = source.parse(record, i)
        return encoded, tf.gather(table, label)

    return dataclasses.replace(source, num_classes=num_classes, class_names=class_names, parse=parse)


def open_source(name: str, split: str, data_dir: str = "") -> Source:
    """Opens `digits`, `folder:PATH`, or a TFDS data set by name.

    Raises:
      UserError: it is not there, is incomplete, or has no such split.
    """
    importlib.import_module("tensorflow").config.set_visible_devices([], "GPU")
    if name == "digits":
        return digits_source(split)
    if name.startswith("folder:"):
        return folder_source(name.removeprefix("folder:"), split)
    return tfds_source(name, split, data_dir)
