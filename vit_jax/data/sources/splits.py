"""Parts of a data set: split expressions such as "train[:90%]" or "train+val", and stratified
parts.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError

_PART = re.compile(r"\s*([\w.-]+)\s*(?:\[\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\])?\s*")


def _count(text: str, size: int) -> int:
    """How many of `size` examples "10%" or "5000" are."""
    if text.endswith("%"):
        return round(float(text[:-1]) * size / 100)
    return int(text)


def _position(text: str | None, size: int, missing: int) -> int:
    if text is None:
        return missing
    value = _count(text, size)
    return value + size if value < 0 else value


def select(expression: str, splits: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Example numbers that a split expression names; see `pieces`."""
    return np.concatenate(pieces(expression, splits, where))


def matched(expression: str, where: str) -> list[re.Match]:
    """The parts of a split expression: see `pieces`."""
    parts = [_PART.fullmatch(part) for part in expression.split("+")]
    if not all(parts):
        raise UserError(
            f"split {expression!r} of {where} is not valid: write NAME or NAME[from:to], such "
            "as train[:90%]"
        )
    return parts


def names(expression: str, where: str) -> list[str]:
    """The splits that a split expression has parts of."""
    return [match[1] for match in matched(expression, where)]


def pieces(expression: str, splits: Mapping[str, Sequence[int]], where: str) -> list[Sequence[int]]:
    """The slices of splits that a split expression names.

    Args:
      expression: NAME, NAME[from:to] with counts or percentages (rounded to the nearest example),
        joined by +.
      splits: example numbers by split name.
      where: the data set, for messages.
    """
    parts = []
    for match in matched(expression, where):
        name = match[1]
        if name not in splits:
            raise UserError(f"split {name!r} does not exist in {where}: it has {', '.join(splits)}")
        size = len(splits[name])
        low = _position(match[2], size, 0)
        high = _position(match[3], size, size)
        if not 0 <= low < high <= size:
            raise UserError(
                f"split {match[0].strip()!r} of {where} is examples {low} to {high} of {size}: "
                "choose a part of it"
            )
        parts.append(splits[name][low:high])
    return parts


def without_aliases(splits: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each split once: several names of one have the same array."""
    found: dict[str, np.ndarray] = {}
    for name, numbers in splits.items():
        if not any(numbers is other for other in found.values()):
            found[name] = numbers
    return found


def amount(text: str, size: int, where: str) -> int:
    """`data.subset`, such as "10%" or "5000", as a number of examples."""
    count = _count(text, size)
    if not 1 <= count <= size:
        raise UserError(
            f"config key data.subset={text!r} is {count} of the {size} examples of {where}: "
            "correct it"
        )
    return count


def stratified(labels: np.ndarray, text: str, seed: int, where: str) -> np.ndarray:
    """Numbers of a random part with the classes in proportion (to one example), ascending.

    A larger part of the same seed contains the smaller one.

    Args:
      labels: int [examples].
      text: "10%" or "5000".
    """
    count = amount(text, len(labels), where)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    _, which, sizes = np.unique(labels[shuffled], return_inverse=True, return_counts=True)
    by_class = np.argsort(which, kind="stable")
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank = np.arange(len(labels)) - starts  # of each example in its class
    # The examples of each class get evenly spaced positions in 0 to 1, so that every prefix of the
    # sorted positions contains its share of each class.
    position = (rank + rng.random(len(sizes))[which[by_class]]) / sizes[which[by_class]]
    return np.sort(shuffled[by_class[np.argsort(position, kind="stable")[:count]]])
