"""Labelled image files, whatever holds them: a folder, tar shards, a manifest, the digits. Needs no TensorFlow."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError

# Images by the ends of their names, in any case.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


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


def number_classes(texts: Sequence[str], splits: Mapping[str, np.ndarray], where: str):
    """Numbers classes that are given as text.

    Whole numbers are classes as they are, without names; anything else is numbered in the order of the sorted names
    that train has, or that there are where there is no train.

    Returns:
      labels int32 [files], class names, number of classes.

    Raises:
      UserError: another split has a class that train has not.
    """
    found, labels = np.unique(np.asarray(texts, object).astype(str), return_inverse=True)
    if all(name.isascii() and name.isdigit() and len(name) < 9 for name in found):
        numbers = found.astype(np.int32)
        return numbers[labels], (), int(numbers.max()) + 1
    known = np.unique(labels[splits["train"]]) if "train" in splits else np.arange(len(found))
    table = np.full(len(found), -1, np.int32)
    table[known] = np.arange(len(known))
    labels = table[labels]
    if (labels < 0).any():
        stray = int(np.flatnonzero(labels < 0)[0])
        raise UserError(f"{where} has the class {texts[stray]!r} outside of train only: add it to train, or remove it")
    return labels, tuple(map(str, found[known])), len(known)
