"""Labelled image files, wherever they are: a folder, tar shards, a CSV file, memory."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from vit_jax.data.sources import storage
from vit_jax.data.sources.alike import check_alike
from vit_jax.data.sources.source import Source, gather
from vit_jax.errors import UserError, printable

# Of images, in any case.
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif")
SUFFIXES += (".tif", ".tiff", ".heic", ".heif", ".avif")
MAX_LABEL_BYTES = 256  # a longer one is a text that was taken for a label by mistake


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Listing(Source):
    """All files of a data set; their contents are the records."""

    all_labels: np.ndarray  # int32 [files], or [files, set_size] padded with -1
    splits: Mapping[str, np.ndarray]  # name -> numbers of its files
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind -> other files

    def __post_init__(self):
        self.all_labels = np.asarray(self.all_labels, np.int32)
        if self.all_labels.ndim == 2:
            self.set_size = self.all_labels.shape[1]

    def __len__(self) -> int:
        return len(self.all_labels)

    def parse(self, record, i):
        return record, gather(self.all_labels, i)

    @property
    def rotated_parts(self) -> tuple[bool, ...]:
        return (True,)

    def labels(self) -> np.ndarray:
        return self.all_labels[:, 0] if self.set_size else self.all_labels

    def example(self, i: int) -> tuple[bytes, int]:
        return self.read([i])[0], int(self.all_labels[i])


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Files(Listing):
    """Image files by their paths."""

    path: Callable[[int], str]

    @property
    def distant(self) -> bool:
        return not storage.is_local(self.path(0))

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return storage.read_all([self.path(i) for i in numbers])

    def describe(self, i: int) -> str:
        return printable(self.path(i))


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class InMemory(Listing):
    """Encoded images in memory."""

    name: str  # of the data set
    files: Sequence[bytes]

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.files[i] for i in numbers]

    def describe(self, i: int) -> str:
        return f"{self.name} number {i}"


def clean_label(text: str, what: str) -> str:
    """The label of `what` without the white space around it."""
    text = text.strip()
    try:
        size = len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise UserError(f"the label of {what} is not valid Unicode: correct it") from None
    if not size:
        raise UserError(f"the label of {what} is empty: add it")
    if size > MAX_LABEL_BYTES:
        raise UserError(
            f"the label of {what} has {size} bytes, more than {MAX_LABEL_BYTES}: give a shorter one"
        )
    return text


def distinct(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """(the distinct texts, sorted; for each text its number among them, int32).

    Keeps only the distinct texts in memory: an array of all would take the length of the longest
    one for each.
    """
    first: dict[str, int] = {}
    numbers = np.fromiter((first.setdefault(text, len(first)) for text in texts), np.int32)
    names = sorted(first)
    table = np.empty(len(names), np.int32)
    table[[first[name] for name in names]] = np.arange(len(names))
    return names, table[numbers]


def are_numbers(names: Collection[str]) -> bool:
    """Whether all classes have whole numbers as names."""
    return all(name.isascii() and name.isdigit() and len(name) < 9 for name in names)


def in_order(names: Collection[str]) -> list[str]:
    """Class names in the order of their class numbers: whole numbers by value (007 before 7),
    otherwise as text.
    """
    if are_numbers(names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def as_numbers(names: Sequence[str], examples: int, where: str) -> np.ndarray | None:
    """The classes `names` as numbers, or None if they are not all numbers."""
    if not are_numbers(names):
        return None
    numbers = np.asarray([int(name) for name in names], np.int32)
    # A model has an output for each number up to the highest one: an ID that was taken for a label
    # would fill the memory.
    if int(numbers.max()) + 1 > 10 * examples + 1000:
        raise UserError(
            f"{where} has the label {names[int(numbers.argmax())]} in {examples} examples: numbers "
            "as labels must count from 0, renumber them, or put a letter before them to make them "
            "names"
        )
    return numbers


def number_classes(texts: Iterable[str], splits: Mapping[str, np.ndarray], where: str):
    """Numbers classes that are given as text.

    Whole numbers are used as they are, without class names. Other texts are numbered in the order
    of the sorted names in train, or in the whole data set if it has no train.

    Returns:
      labels int32 [files], class names, number of classes.
    """
    found, labels = distinct(texts)
    check_alike(found, where)
    numbers = as_numbers(found, len(labels), where)
    if numbers is not None:
        return numbers[labels], (), int(numbers.max()) + 1
    known = np.arange(len(found))
    if "train" in splits:
        known = np.unique(labels[splits["train"]])
    table = np.full(len(found), -1, np.int32)
    table[known] = np.arange(len(known))
    stray = np.setdiff1d(np.arange(len(found)), known)
    if len(stray):
        name = found[int(stray[0])]
        raise UserError(
            f"{where} has the class {name!r} in other splits but not in train: add it to train, or "
            "remove it"
        )
    return table[labels], tuple(found[i] for i in known.tolist()), len(known)
