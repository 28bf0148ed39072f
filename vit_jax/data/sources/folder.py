"""A folder of images as a data set: class sub-folders, with or without train / val / test folders
above them.
"""

import os

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.listing import SUFFIXES, Listing
from vit_jax.errors import UserError

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
MIXING_SEED = 0  # of the fixed order in which a folder without split folders is sliced


def scan(root: str) -> dict[str, np.ndarray]:
    """All folders below `root` (relative, sorted, "" first), when they changed, and the images in
    each of them.
    """
    folders, changed, counts, images = [], [], [], []
    remote = ((path, 0, below, names) for path, below, names in storage.walk(root))
    for path, time, _, names in storage.walk_local(root) if storage.is_local(root) else remote:
        found = [name for name in names if name.lower().endswith(SUFFIXES)]
        folders.append(path[len(root) :].strip("/"))
        changed.append(time)
        counts.append(len(found))
        images += found
    order = sorted(range(len(folders)), key=lambda i: folders[i].split("/"))
    starts = np.cumsum([0, *counts])
    images = [name for i in order for name in images[starts[i] : starts[i + 1]]]
    return dict(
        changed=np.asarray(changed, np.int64)[order],
        counts=np.asarray(counts, np.int64)[order],
        **index_cache.Strings.pack([folders[i] for i in order]).arrays("folders"),
        **index_cache.Strings.pack(images).arrays("images"),
    )


def unchanged(root: str, arrays) -> bool:
    """Adding, removing or renaming a file or folder changes the time of the folder that it is in."""
    if not storage.is_local(root):
        return False
    folders = index_cache.Strings.of(arrays, "folders")
    return all(
        os.stat(os.path.join(root, folder)).st_mtime_ns == changed
        for folder, changed in zip(folders, arrays["changed"].tolist(), strict=True)
    )


def split_folders(root: str, top: list[str]) -> dict[str, str]:
    """Split -> the name of its folder, of the folders `top` directly below `root`."""
    found = {}
    for name in top:
        for split in (split for split, names in SPLITS.items() if name.lower() in names):
            if split in found:
                raise UserError(
                    f"{root} has both {found[split]} and {name}, which mean {split}: merge them"
                )
            found[split] = name
    if found and "train" not in found:
        raise UserError(
            f"{root} has {', '.join(found)} but no train folder: class numbers come from train, "
            "add it"
        )
    return {split: found[split] for split in SPLITS if split in found}


def class_of(folder: str, below: str) -> str | None:
    """The class that the images in `folder` belong to, in a split whose folder is `below`; None:
    another split.
    """
    parts = folder.split("/") if folder else []
    if below and parts[:1] != [below]:
        return None
    return "/".join(parts[bool(below) : bool(below) + 1])


def label_folders(
    root: str, folders: list[str], counts: np.ndarray, below: str, classes: list[str] | None
):
    """Labels of the folders of one split: (class names, label of every folder, -1 where it is of no
    class).

    Args:
      below: the folder of the split, "" where there are no split folders.
      classes: the names that train has, or None when this is train.
    """
    where = os.path.join(root, below) if below else root
    names = [class_of(folder, below) for folder in folders]
    sizes = {}
    for name, count in zip(names, counts.tolist(), strict=True):
        if name:
            sizes[name] = sizes.get(name, 0) + count
    if not sizes:
        raise UserError(
            f"{where} has no class folders: put the images of each class in a sub-folder named "
            "after it"
        )
    if classes is None:
        classes = sorted(sizes)
    if unknown := sorted(sizes.keys() - set(classes)):
        raise UserError(
            f"{os.path.join(where, unknown[0])} is a class that train does not have: remove the "
            "folder, or add the class to train"
        )
    if empty := [name for name, count in sizes.items() if not count]:
        raise UserError(
            f"class folder {os.path.join(where, empty[0])} has no images ({', '.join(SUFFIXES)}): "
            "add some or remove the folder"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.asarray([numbers[name] if name else -1 for name in names], np.int32)


def load(root: str) -> Listing:
    """Lists a folder. A listing is kept, and used again while no folder has changed: a million
    files start at once.

    Class names are those of train, sorted. Both names of a split work ("val" and "validation").
    Without split folders all is "train", in a fixed mixed order, for slices as train[:90%].

    Raises:
      UserError: the folder, its class folders or their images are missing, or a class is unknown to
        train.
    """
    root = storage.absolute(root) if root else root
    if not root or not storage.is_folder(root):
        raise UserError(
            f"image folder {root or '(empty)'} does not exist: correct data.name=folder:PATH"
        )
    arrays = index_cache.cached(
        "folder", root, lambda: scan(root), lambda arrays: unchanged(root, arrays)
    )
    folders, images, counts = (
        list(index_cache.Strings.of(arrays, "folders")),
        index_cache.Strings.of(arrays, "images"),
        None,
    )
    counts = arrays["counts"]
    splits = split_folders(root, [folder for folder in folders if folder and "/" not in folder])

    classes, labels = None, np.full(len(folders), -1, np.int32)
    parts = {}
    for split, below in (splits or {"train": ""}).items():
        classes, found = label_folders(root, folders, counts, below, classes)
        labels = np.maximum(labels, found)
        numbers = np.flatnonzero(np.repeat(found, counts) >= 0)
        names = SPLITS[split] if splits else ("train",)
        order = (
            numbers
            if splits
            else numbers[np.random.default_rng(MIXING_SEED).permutation(len(numbers))]
        )
        parts |= dict.fromkeys(names, order)

    of_image = np.repeat(np.arange(len(folders), dtype=np.int32), counts)

    def path(i: int) -> str:
        return "/".join(part for part in (root, folders[of_image[i]], images[i]) if part)

    return Listing(
        class_names=tuple(classes),
        num_classes=len(classes),
        labels=labels[of_image],
        splits=parts,
        read=lambda i: storage.read(path(i)),
        describe=lambda i: index_cache.printable(path(i)),
        fingerprint=index_cache.digest("\n".join(folders), counts, images.bytes, images.ends),
    )
