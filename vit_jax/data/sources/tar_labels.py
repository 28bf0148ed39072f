"""The labels of the examples in a tar."""

import json
import os
import re

from vit_jax.data.sources.listing import SUFFIXES, clean_label
from vit_jax.data.sources.tar_members import LABELS
from vit_jax.data.sources.unlabelled import INSTEAD
from vit_jax.errors import UserError


def label_in(path: str, name: str, length: int, content: bytes | None) -> str:
    """The label in a .cls member (its text) or a .json member (its "label")."""
    if content is None:
        raise UserError(
            f"member {name} of {path} has {length} bytes, too many for a label: correct it"
        )
    text = content.decode("utf-8", "replace")
    if not name.lower().endswith(".json"):
        return text
    try:
        label = json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        label = None
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise UserError(
            f'member {name} of {path} is not a JSON object with a "label" that is a text or a '
            "whole number: correct it"
        )
    return str(label)


def label_of(path: str, key: str, parts: dict) -> tuple[str, bool]:
    """The label of one example: in its .cls or .json member, else its folder in the tar, else the
    name of the tar.

    Returns:
      label, whether it is the name of the tar.
    """
    what = f"example {key} of {path}"
    for suffix in LABELS:
        if suffix in parts:
            name, _, length, content = parts[suffix]
            return clean_label(label_in(path, name, length, content), what), False
    folder = os.path.dirname(key)
    if folder.strip("./"):
        return clean_label(os.path.basename(folder), what), False
    shard = os.path.basename(path).removesuffix(".tar")
    if set(parts) <= set(SUFFIXES) and not re.search(r"[-_]\d+$", shard):
        return clean_label(shard, what), True
    raise UserError(
        f"{what} has no label: add a {os.path.basename(key)}.cls, or class folders, {INSTEAD}"
    )
