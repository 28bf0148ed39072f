"""Split expressions such as "train[:90%]" or "train+val", for sources that are not TFDS's own."""

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError

_PART = re.compile(r"\s*([\w.-]+)\s*(?:\[\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\])?\s*")


def _position(text: str | None, size: int, missing: int) -> int:
    if text is None:
        return missing
    value = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return value + size if value < 0 else value


def select(expression: str, splits: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """Example numbers that a split expression names.

    Args:
      expression: NAME, NAME[from:to] with counts or percentages (rounded to the nearest example), joined by +.
      splits: example numbers by split name.
      where: the data set, for messages.

    Raises:
      UserError: bad syntax, unknown split, or a slice that is empty or out of range.
    """
    parts = []
    for part in expression.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise UserError(
                f"split {expression!r} of {where} is not understood: write NAME or NAME[from:to], as train[:90%]"
            )
        name = match[1]
        if name not in splits:
            raise UserError(f"split {name!r} does not exist in {where}: it has {', '.join(splits)}")
        size = len(splits[name])
        low, high = _position(match[2], size, 0), _position(match[3], size, size)
        if not 0 <= low < high <= size:
            raise UserError(
                f"split {part.strip()!r} of {where} is examples {low} to {high} of {size}: choose a part of it"
            )
        parts.append(splits[name][low:high])
    return np.concatenate(parts)
