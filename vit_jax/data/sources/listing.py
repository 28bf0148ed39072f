"""Labelled image files, whatever holds them: a folder, tar shards, a manifest, the digits. Needs no
TensorFlow.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError

# Images by the ends of their names, in any case.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
MAX_LABEL_BYTES = 256  # longer ones are texts that were taken for labels by mistake


@dataclasses.dataclass(frozen=True)
class Listing:
    """Random access to the encoded images of a data set, with labels and splits."""

    class_names: Sequence[str]  # () where classes have only numbers
    num_classes: int
    labels: np.ndarray  # int32 [files]
    splits: Mapping[str, np.ndarray]  # name -> numbers of files
    read: Callable[[int], bytes]
    describe: Callable[[int], str]
    fingerprint: str  # changes with the files, their order, and their labels


def clean_label(text: str, what: str) -> str:
    """A label without the white space around it; `what` it is the label of is for errors.

    Raises:
      UserError: it is empty, too long, or no Unicode.
    """
    text = text.strip()
    try:
        size = len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise UserError(f"the label of {what} is no Unicode text: correct it") from None
    if not size:
        raise UserError(f"the label of {what} is empty: add it")
    if size > MAX_LABEL_BYTES:
        raise UserError(
            f"the label of {what} has {size} bytes, more than {MAX_LABEL_BYTES}: give a shorter one"
        )
    return text


def distinct(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """The distinct texts, sorted, and for each text its number among them, int32. Holds only the
    distinct ones.
    """
    # An array of texts would take the length of the longest one for each of them.
    first: dict[str, int] = {}
    numbers = np.fromiter((first.setdefault(text, len(first)) for text in texts), np.int32)
    names = sorted(first)
    table = np.empty(len(names), np.int32)
    table[[first[name] for name in names]] = np.arange(len(names))
    return names, table[numbers]


def as_numbers(names: Sequence[str], examples: int, where: str) -> np.ndarray | None:
    """The classes `names` as numbers, or None where they are not all numbers.

    Raises:
      UserError: a number is so high that it can't be one of a class.
    """
    if not all(name.isascii() and name.isdigit() and len(name) < 9 for name in names):
        return None
    numbers = np.asarray([int(name) for name in names], np.int32)
    # A model has an output for each number up to the highest one, so an ID as a label would fill
    # the memory.
    if int(numbers.max()) + 1 > 10 * examples + 1000:
        raise UserError(
            f"{where} has the label {names[int(numbers.argmax())]} in {examples} examples: numbers "
            "as labels must count from 0, renumber them, or put a letter before them to make them "
            "names"
        )
    return numbers


def number_classes(texts: Iterable[str], splits: Mapping[str, np.ndarray], where: str):
    """Numbers classes that are given as text.

    Whole numbers are classes as they are, without names; anything else is numbered in the order of
    the sorted names that train has, or that there are where there is no train.

    Returns:
      labels int32 [files], class names, number of classes.

    Raises:
      UserError: another split has a class that train has not, or a number is too high.
    """
    found, labels = distinct(texts)
    numbers = as_numbers(found, len(labels), where)
    if numbers is not None:
        return numbers[labels], (), int(numbers.max()) + 1
    known = np.unique(labels[splits["train"]]) if "train" in splits else np.arange(len(found))
    table = np.full(len(found), -1, np.int32)
    table[known] = np.arange(len(known))
    stray = np.setdiff1d(np.arange(len(found)), known)
    if len(stray):
        name = found[int(stray[0])]
        raise UserError(
            f"{where} has the class {name!r} outside of train only: add it to train, or remove it"
        )
    return table[labels], tuple(found[i] for i in known.tolist()), len(known)
