"""Images named one by one or by their folders, without labels."""

import os
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import ignored, storage, walk
from vit_jax.data.sources.ignored import Ignored
from vit_jax.data.sources.listing import SUFFIXES, Files, Listing
from vit_jax.errors import UserError


def load(given: Sequence[str]) -> tuple[list[str], Listing]:
    """(paths, their listing): files as given, and all images below the given folders, sorted."""
    paths = []
    unused = Ignored()
    for path in given:
        storage.must_exist(path, "image or folder", "correct the path")
        if not storage.is_folder(path):
            paths.append(path)
            continue
        for folder, _, names in walk.walk(storage.absolute(path), unused):
            found = ignored.selected(folder, names, SUFFIXES, unused)
            paths += [os.path.join(folder, name) for name in found]
    if not paths:
        others = f", but {ignored.text(unused)}" if unused else ""
        raise UserError(
            f"{', '.join(given)} has no images ({', '.join(SUFFIXES)}){others}: give another folder"
        )
    return paths, Files(
        path=paths.__getitem__,
        all_labels=np.zeros(len(paths), np.int32),
        splits={"all": np.arange(len(paths))},
        ignored=unused,
        class_names=(),
        num_classes=1,
        fingerprint="",
    )
