"""What every data set is here: a random-access sequence of raw records."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data.sources.listing import Listing
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Source:
    """A random-access sequence of raw records.

    `read([i, j, ...])` returns the bytes of these records; `parse(record, i)` turns one inside a
    TensorFlow graph into the encoded image (a string tensor) and its int32 label; `describe(i)`
    names it for messages; `labels()` are those of all records, int32 [num_examples], which may take
    a scan. With a `set_size` above 0 an example has several
    labels: `parse` gives int32 [set_size], -1 where there are fewer, and `labels()` the first of
    each. `parts` are (examples, weight) of what is mixed, in the order of the records; one part
    unless it is a mixture.
    """

    num_examples: int
    num_classes: int
    class_names: Sequence[str]
    read: Callable[[Sequence[int]], list[bytes]]
    parse: Callable
    describe: Callable[[int], str]
    labels: Callable[[], np.ndarray]
    fingerprint: str
    parts: tuple[tuple[int, float], ...] = ()
    set_size: int = 0

    def __post_init__(self):
        if len(self.parts) < 2:
            object.__setattr__(self, "parts", ((self.num_examples, 1.0),))


def indexed(listing: Listing, numbers: np.ndarray) -> Source:
    """The files `numbers` of a listing."""
    labels = listing.labels[numbers]
    is_set, table = labels.ndim == 2, tf.constant(labels, tf.int32)
    return Source(
        num_examples=len(numbers),
        num_classes=listing.num_classes,
        class_names=listing.class_names,
        read=lambda chosen: [listing.read(numbers[i]) for i in chosen],
        parse=lambda record, i: (record, tf.gather(table, i)),
        describe=lambda i: listing.describe(numbers[i]),
        labels=lambda: labels[:, 0] if is_set else labels,
        fingerprint=listing.fingerprint,
        set_size=labels.shape[1] if is_set else 0,
    )


def take(source: Source, numbers: np.ndarray) -> Source:
    """The records `numbers` of a source, as a source."""
    table = tf.constant(numbers, tf.int64)
    return dataclasses.replace(
        source,
        num_examples=len(numbers),
        read=lambda chosen: source.read([int(numbers[i]) for i in chosen]),
        parse=lambda record, i: source.parse(record, tf.gather(table, i)),
        describe=lambda i: source.describe(int(numbers[i])),
        labels=lambda: source.labels()[numbers],
    )


def renumbered(source: Source, class_names: Sequence[str], where: str) -> Source:
    """`source` with the class numbers of `class_names`, matched by name.

    Raises:
      UserError: the source has a class that is not among them.
    """
    if tuple(source.class_names) == tuple(class_names):
        return source
    numbers = {name: number for number, name in enumerate(class_names)}
    if unknown := [name for name in source.class_names if name not in numbers]:
        raise UserError(
            f"{where} has the class {unknown[0]!r}, which the model has not: choose data of the "
            "same classes"
        )
    table = np.asarray([numbers[name] for name in source.class_names], np.int32)

    def parse(record, i):
        encoded, label = source.parse(record, i)
        return encoded, tf.where(label < 0, -1, tf.gather(table, tf.maximum(label, 0)))

    return dataclasses.replace(
        source,
        num_classes=len(class_names),
        class_names=class_names,
        parse=parse,
        labels=lambda: np.where((own := source.labels()) < 0, -1, table[own]),
    )


def with_classes(
    source: Source, class_names: Sequence[str], num_classes: int, where: str
) -> Source:
    """`source` with the class numbers of a model, matched by name where both have names.

    Raises:
      UserError: the source has a class that the model has not.
    """
    if class_names and source.class_names:
        return dataclasses.replace(renumbered(source, class_names, where), num_classes=num_classes)
    if source.num_classes > num_classes:
        raise UserError(
            f"{where} has {source.num_classes} classes, but the model has {num_classes}: choose "
            "other data"
        )
    return source


def mixture(sources: Sequence[Source], weights: Sequence[float], names: Sequence[str]) -> Source:
    """Several sources behind one another as one; training draws from them by weight.

    Classes are matched by name, those of the first source first, then what the others add. Sources
    without class names must agree in the number of classes, which then mean the same.

    Raises:
      UserError: some have names and some not, or the numbers of classes differ.
    """
    if all(source.class_names for source in sources):
        union = tuple(dict.fromkeys(name for source in sources for name in source.class_names))
        sources = [
            renumbered(source, union, name) for source, name in zip(sources, names, strict=True)
        ]
    elif len({source.num_classes for source in sources}) > 1:
        counts = ", ".join(
            f"{name} {s.num_classes}" for name, s in zip(names, sources, strict=True)
        )
        raise UserError(
            f"the parts of data.mixture have different numbers of classes ({counts}), and not all "
            "have class names to match them by: mix data of the same classes"
        )
    if len({source.set_size for source in sources}) > 1:
        raise UserError(
            "images have one label in one part of data.mixture and several in another: mix like "
            "data"
        )
    counts = np.asarray([source.num_examples for source in sources], np.int64)
    starts = np.cumsum(counts) - counts

    def place(i: int) -> tuple[int, int]:
        which = int(np.searchsorted(starts, i, side="right")) - 1
        return which, int(i - starts[which])

    def read(chosen) -> list[bytes]:
        places = [place(i) for i in chosen]
        records = {}
        for which in {which for which, _ in places}:
            mine = [i for i, (owner, _) in enumerate(places) if owner == which]
            records |= zip(mine, sources[which].read([places[i][1] for i in mine]), strict=True)
        return [records[i] for i in range(len(places))]

    def parse(record, i):
        which = tf.searchsorted(starts, i[None], side="right")[0] - 1
        inner = i - tf.gather(starts, which)
        return tf.switch_case(
            which, [lambda s=source: s.parse(record, inner) for source in sources]
        )

    def describe(i: int) -> str:
        which, inner = place(i)
        return sources[which].describe(inner)

    first = sources[0]
    return Source(
        num_examples=int(counts.sum()),
        num_classes=first.num_classes,
        class_names=first.class_names,
        read=read,
        parse=parse,
        describe=describe,
        labels=lambda: np.concatenate([source.labels() for source in sources]),
        fingerprint="+".join(source.fingerprint for source in sources),
        parts=tuple(zip(counts.tolist(), weights, strict=True)),
        set_size=first.set_size,
    )
