"""The one type of every data set: a random-access sequence of labelled images.

TensorFlow is imported only to parse records.
"""

import abc
import copy
import dataclasses
import functools
import logging
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources.alike import check_alike
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

# A mixture consists of blocks of this many examples, in which every part has its exact share.
BLOCK = 10_000


@dataclasses.dataclass(eq=False, repr=False)
class Source(abc.ABC):
    """A random-access sequence of labelled images.

    With a `set_size` above 0 an image has several labels: `parse` gives int32 [set_size], padded
    with -1.
    """

    class_names: Sequence[str]  # () if classes have only numbers
    num_classes: int
    fingerprint: str  # changes with the images, their order and their labels
    set_size: int = 0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The raw records `numbers`. Several threads may call it at once."""

    @abc.abstractmethod
    def parse(self, record, i):
        """(encoded image, label int32) of the raw record with number `i`, in a TensorFlow graph."""

    @abc.abstractmethod
    def labels(self) -> np.ndarray:
        """All labels (the first of each set), int32 [examples]. May read the whole data set."""

    @abc.abstractmethod
    def describe(self, i: int) -> str:
        """The name of example `i`, for messages."""

    @property
    def distant(self) -> bool:
        """Whether `read` waits for a store, which answers many requests as fast as one."""
        return False

    def changed_file(self) -> str | None:
        """A file that is not what it was when the source was opened, for a source that reads from
        places in files. On a store, `read` finds that.
        """
        return None

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        """(number of examples, weight) of each part of a mixture, in the order of the records."""
        return ((len(self), 1.0),)

    @property
    def block(self) -> int:
        """Examples in which every part has its exact share."""
        return BLOCK

    @property
    def rotated_parts(self) -> tuple[bool, ...]:
        """Of each of the `parts`, whether data.exif_rotation holds for its images. For those of
        TFDS it does not: the published pipelines ignore EXIF.
        """
        return (False,)

    def rotates(self, i):
        """The same of image `i`: bool, or bool [] in a TensorFlow graph if the parts differ."""
        found = self.rotated_parts
        if len(set(found)) == 1:
            return found[0]
        import tensorflow as tf

        ends = np.cumsum([size for size, _ in self.parts])
        return tf.gather(found, tf.searchsorted(ends, i[None], side="right")[0])

    def example(self, i: int) -> tuple[bytes, int]:
        """(encoded image, label) of one example with one label."""
        encoded, label = self._parse_one(self.read([i])[0], i)
        return encoded.numpy(), int(label)

    @functools.cached_property
    def _parse_one(self):
        import tensorflow as tf

        signature = [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)]
        return tf.function(self.parse, input_signature=signature)


def gather(table: np.ndarray, i):
    """`table[i]` in a TensorFlow graph."""
    import tensorflow as tf

    # Made outside of the graph, which would hold a copy, and may have 2 GB at most.
    with tf.init_scope():
        tensor = tf.constant(table)
    return tf.gather(tensor, i)


class Subset(Source):
    """The examples `numbers` of another source, in this order."""

    def __init__(self, inner: Source, numbers: np.ndarray):
        super().__init__(inner.class_names, inner.num_classes, inner.fingerprint, inner.set_size)
        self.inner = inner
        self.numbers = np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def distant(self) -> bool:
        return self.inner.distant

    def changed_file(self) -> str | None:
        return self.inner.changed_file()

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return self.inner.read([int(self.numbers[i]) for i in numbers])

    def parse(self, record, i):
        return self.inner.parse(record, gather(self.numbers, i))

    @property
    def rotated_parts(self) -> tuple[bool, ...]:
        return self.inner.rotated_parts

    def labels(self) -> np.ndarray:
        return self.inner.labels()[self.numbers]

    def describe(self, i: int) -> str:
        return self.inner.describe(int(self.numbers[i]))

    def example(self, i: int) -> tuple[bytes, int]:
        return self.inner.example(int(self.numbers[i]))


class Renumbered(Source):
    """Another source with the class numbers of `class_names`, matched by name."""

    def __init__(self, inner: Source, class_names: Sequence[str], where: str):
        super().__init__(class_names, len(class_names), inner.fingerprint, inner.set_size)
        self.inner = inner
        numbers = {name: number for number, name in enumerate(class_names)}
        if unknown := [name for name in inner.class_names if name not in numbers]:
            raise UserError(
                f"{where} has the class {unknown[0]!r}, which the model does not have: choose data "
                "of the same classes"
            )
        self.new_numbers = np.asarray([numbers[name] for name in inner.class_names], np.int32)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def distant(self) -> bool:
        return self.inner.distant

    def changed_file(self) -> str | None:
        return self.inner.changed_file()

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return self.inner.read(numbers)

    def parse(self, record, i):
        import tensorflow as tf

        encoded, label = self.inner.parse(record, i)
        return encoded, tf.where(label < 0, -1, gather(self.new_numbers, tf.maximum(label, 0)))

    @property
    def rotated_parts(self) -> tuple[bool, ...]:
        return self.inner.rotated_parts

    def labels(self) -> np.ndarray:
        labels = self.inner.labels()
        return np.where(labels < 0, -1, self.new_numbers[labels])

    def describe(self, i: int) -> str:
        return self.inner.describe(i)


class Mixture(Source):
    """Several sources with the same classes, one after another; training samples them by weight."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        first = sources[0]
        fingerprint = "+".join(source.fingerprint for source in sources)
        super().__init__(first.class_names, first.num_classes, fingerprint, first.set_size)
        self.sources = sources
        self.weights = weights
        self.counts = np.asarray([len(source) for source in sources], np.int64)
        self.starts = np.cumsum(self.counts) - self.counts

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        return tuple(zip(self.counts.tolist(), self.weights, strict=True))

    @property
    def rotated_parts(self) -> tuple[bool, ...]:
        return tuple(source.rotates(0) for source in self.sources)

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def distant(self) -> bool:
        return any(source.distant for source in self.sources)

    def changed_file(self) -> str | None:
        return next(filter(None, (source.changed_file() for source in self.sources)), None)

    def locate(self, i: int) -> tuple[int, int]:
        """(which source, number in that source) of example `i`."""
        which = int(np.searchsorted(self.starts, i, side="right")) - 1
        return which, int(i - self.starts[which])

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        places = [self.locate(i) for i in numbers]
        records = {}
        for which in {which for which, _ in places}:
            mine = [place for place in places if place[0] == which]
            inner = [number for _, number in mine]
            records |= zip(mine, self.sources[which].read(inner), strict=True)
        return [records[place] for place in places]

    def parse(self, record, i):
        import tensorflow as tf

        which = tf.searchsorted(self.starts, i[None], side="right")[0] - 1
        inner = i - tf.gather(self.starts, which)
        branches = [functools.partial(source.parse, record, inner) for source in self.sources]
        return tf.switch_case(which, branches)

    def labels(self) -> np.ndarray:
        return np.concatenate([source.labels() for source in self.sources])

    def describe(self, i: int) -> str:
        which, inner = self.locate(i)
        return self.sources[which].describe(inner)


def renumbered(source: Source, class_names: Sequence[str], where: str) -> Source:
    """`source` with the class numbers of `class_names`; `where`: its name for messages."""
    if tuple(source.class_names) == tuple(class_names):
        return source
    return Renumbered(source, class_names, where)


def with_classes(
    source: Source, class_names: Sequence[str], num_classes: int, where: str
) -> Source:
    """`source` with the class numbers of a model, matched by name if both have names, otherwise by
    position.

    Positions of names mean the same only if there are as many of them. Class numbers without names
    mean what they are, and the highest may not occur.
    """
    if class_names and source.class_names:
        source = copy.copy(renumbered(source, class_names, where))
        source.num_classes = num_classes
        return source
    if source.num_classes > num_classes:
        raise UserError(
            f"{where} has {source.num_classes} classes, but the model has {num_classes}: choose "
            "other data"
        )
    if source.class_names and source.num_classes < num_classes:
        raise UserError(
            f"{where} has {source.num_classes} named classes, but the model has {num_classes} and "
            "no such names to match them by: choose data of all its classes, or list the images "
            "with the model's class numbers in a CSV file"
        )
    if source.class_names:
        names = source.class_names
        log.info(
            "%s: the model has no class names to match, so classes are matched by position: "
            "0 is %r, %d is %r",
            *(where, names[0], num_classes - 1, names[-1]),
        )
    return source


def mixture(sources: Sequence[Source], weights: Sequence[float], names: Sequence[str]) -> Source:
    """Mixes sources.

    Classes are matched by name: those of the first source come first, then what the others add.
    Sources without class names must have the same number of classes, with the same meaning.
    """
    if all(source.class_names for source in sources):
        union = tuple(dict.fromkeys(name for source in sources for name in source.class_names))
        check_alike(union, "data.mixture")
        pairs = zip(sources, names, strict=True)
        sources = [renumbered(source, union, name) for source, name in pairs]
    elif len({source.num_classes for source in sources}) > 1:
        pairs = zip(names, sources, strict=True)
        counts = ", ".join(f"{name} {source.num_classes}" for name, source in pairs)
        raise UserError(
            f"the parts of data.mixture have different numbers of classes ({counts}), and not all "
            "have class names to match them by: mix data of the same classes"
        )
    if len({source.set_size for source in sources}) > 1:
        raise UserError(
            "images have one label in one part of data.mixture and several in another: mix data of "
            "the same kind"
        )
    return Mixture(sources, weights)
