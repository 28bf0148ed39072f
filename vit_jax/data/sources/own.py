"""A data set of the user's own: `data.name` = MODULE:ATTRIBUTE, which gives a random-access
sequence for a split.

Item i is (image, label): the bytes of an image file or uint8 [H, W, 3], and a class number; for
training without labels it may be the image alone. The sequence may also have `class_names` or
`num_classes`, `labels` (all of them), and `fingerprint`, a text that changes with the data. Needs
no TensorFlow but to parse records.
"""

import functools
import hashlib
import io
import numbers
from collections.abc import Iterable, Sequence

import ml_collections
import numpy as np
from PIL import Image

from vit_jax.config import own_parts
from vit_jax.data.sources import splits, unlabelled
from vit_jax.data.sources.source import Source, Subset
from vit_jax.data.sources.unlabelled import INSTEAD
from vit_jax.errors import UserError

LABEL_BYTES = 4  # int32, little-endian, before the image in a record


class OwnSource(Source):
    """One split of a data set of the user's own. A record is the label, then the encoded image."""

    def __init__(self, part: own_parts.OwnPart, items, split: str, labelled: bool):
        self.part = part
        self.items = items
        self.split = split
        if not callable(getattr(items, "__len__", None)) or not hasattr(items, "__getitem__"):
            raise part.error(
                f"gives {own_parts.shown(items)} for split {split!r}, but it must give a sequence "
                "with __len__ and __getitem__"
            )
        names, classes = classes_of(part, items) if labelled else ((), 0)
        if not len(items):
            raise part.error(f"has no examples in split {split!r}")
        super().__init__(names, classes, "")
        self.fingerprint = str(getattr(items, "fingerprint", "")) or self.digest()
        part.guard(self.read)([0])

    def digest(self) -> str:
        """What is known of the data without reading them: their number, classes and `labels`."""
        facts = [str(len(self)), str(self.num_classes), *self.class_names]
        digest = hashlib.sha256("\0".join(facts).encode())
        if self.num_classes and hasattr(self.items, "labels"):
            digest.update(self.labels().tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.items)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.record(i) for i in numbers]

    def item(self, i: int) -> tuple:
        """(image, label) of example i, of the right types."""
        item = self.items[i]
        if not self.num_classes:
            item = (item[0] if isinstance(item, tuple) and item else item, 0)
        if not isinstance(item, tuple) or len(item) != 2:
            raise self.part.error(
                f"gives {own_parts.shown(item)} as {self.describe(i)}, but it must give a pair "
                f"(image, label), {INSTEAD}"
            )
        image, label = item
        is_pixels = getattr(image, "dtype", None) == np.uint8 and image.shape[2:] == (3,)
        if not isinstance(image, bytes) and not is_pixels:
            raise self.part.error(
                f"gives {own_parts.shown(image)} as the image of {self.describe(i)}, but it must "
                "give bytes of an image file or uint8 [H, W, 3]"
            )
        if np.ndim(label) or not np.issubdtype(np.asarray(label).dtype, np.integer):
            raise self.part.error(
                f"gives {label!r} as the label of {self.describe(i)}, but it must give a class "
                "number"
            )
        return image, int(label)

    def record(self, i: int) -> bytes:
        image, label = self.item(i)
        if not isinstance(image, bytes):
            image = png(image)
        return label.to_bytes(LABEL_BYTES, "little", signed=True) + image

    def parse(self, record, i):
        import tensorflow as tf

        label = tf.io.decode_raw(tf.strings.substr(record, 0, LABEL_BYTES), tf.int32)[0]
        return tf.strings.substr(record, LABEL_BYTES, -1), label

    @functools.cached_property
    def all_labels(self) -> np.ndarray:
        if not self.num_classes:
            return unlabelled.labels(len(self))
        labels = getattr(self.items, "labels", None)
        if labels is None:
            labels = [self.part.guard(self.item)(i)[1] for i in range(len(self))]
        labels = np.asarray(labels)
        if labels.shape != (len(self),) or not np.issubdtype(labels.dtype, np.integer):
            raise self.part.error(
                f"has labels {own_parts.shown(labels)}, but there must be a class number for each "
                f"of the {len(self)} examples"
            )
        return labels.astype(np.int32)

    def labels(self) -> np.ndarray:
        return self.all_labels

    def describe(self, i: int) -> str:
        return f"{self.part.name} {self.split} number {i}"


def classes_of(part: own_parts.OwnPart, items) -> tuple[tuple[str, ...], int]:
    """(class names, number of classes) of the sequence; without names there are ()."""
    names = getattr(items, "class_names", None)
    classes = getattr(items, "num_classes", None)
    if names is None and classes is None:
        raise part.error("has neither class_names nor num_classes: add one to the sequence")
    if names is None:
        if not isinstance(classes, numbers.Integral) or classes < 1:
            raise part.error(f"has num_classes {classes!r}, but it must be a number from 1")
        return (), int(classes)
    if isinstance(names, str) or not isinstance(names, Iterable) or not len(tuple(names)):
        raise part.error(f"has class_names {names!r}, but it must be a sequence of names")
    return tuple(map(str, names)), len(tuple(names))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, format="png", compress_level=1)
    return buffer.getvalue()


def load(name: str, split: str, data_dir: str = "", user=None, labelled: bool = True) -> Source:
    """A split of a data set of the user's own, or a slice of one.

    Args:
      name: MODULE:ATTRIBUTE.
      split: NAME or NAME[from:to].
      user: `config.user`; the part gets a `config` with this group alone.

    Raises:
      UserError: it does not fit.
    """
    config = ml_collections.FrozenConfigDict(dict(user=dict(user or {})))
    part = own_parts.part("data.name", name, config)
    names = splits.names(split, name)
    if len(names) > 1:
        raise UserError(f"split {split!r} of {name} has several parts: name one of them")
    source = OwnSource(part, part(split=names[0], data_dir=data_dir), names[0], labelled)
    numbers = splits.select(split, {names[0]: np.arange(len(source))}, name)
    return source if len(numbers) == len(source) else Subset(source, numbers)
