"""Images named one by one or by their folders, without labels."""

import os
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.listing import SUFFIXES, Listing
from vit_jax.errors import UserError


def load(given: Sequence[str]) -> tuple[list[str], Listing]:
    """(paths, their listing): files as they are given, folders with all images below them, sorted.

    Raises:
      UserError: one does not exist, or there is no image at all.
    """
    paths = []
    for path in given:
        storage.must_exist(path, "image or folder", "correct the path")
        if not storage.is_folder(path):
            paths.append(path)
            continue
        for folder, _, names in storage.walk(storage.absolute(path)):
            paths += [
                os.path.join(folder, name) for name in names if name.lower().endswith(SUFFIXES)
            ]
    if not paths:
        raise UserError(
            f"{', '.join(given)} has no images ({', '.join(SUFFIXES)}): give another folder"
        )
    everything = np.arange(len(paths))
    return paths, Listing(
        class_names=(),
        num_classes=1,
        labels=np.zeros(len(paths), np.int32),
        splits={"all": everything},
        read=lambda i: storage.read(paths[i]),
        describe=lambda i: index_cache.printable(paths[i]),
        fingerprint="",
    )
