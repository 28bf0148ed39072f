"""A folder of images as a data set: class sub-folders, with or without train / val / test folders above them."""

import os
import pathlib

import numpy as np

from vit_jax.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
MIXING_SEED = 0  # of the fixed order in which a folder without split folders is sliced


def subfolders(path: pathlib.Path) -> dict[str, pathlib.Path]:
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    return {name: path / name for name in names}


def images_in(path: pathlib.Path) -> list[str]:
    """Image files below `path`, at any depth, sorted."""
    found = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if name.lower().endswith(SUFFIXES) and name[0] != "."]
    return sorted(found)


def list_classes(path: pathlib.Path, classes: list[str] | None) -> tuple[list[str], list[str], np.ndarray]:
    """Lists one split: its class names, files, and the label of every file.

    Args:
      classes: the names that train has, or None when this is train.
    """
    folders = subfolders(path)
    if not folders:
        raise UserError(f"{path} has no class folders: put the images of each class in a sub-folder named after it")
    if classes is None:
        classes = list(folders)
    if unknown := sorted(set(folders) - set(classes)):
        raise UserError(
            f"{path / unknown[0]} is a class that train does not have: remove the folder, or add the class to train"
        )
    files, labels = [], []
    for name, folder in folders.items():
        found = images_in(folder)
        if not found:
            raise UserError(
                f"class folder {folder} has no images ({', '.join(SUFFIXES)}): add some or remove the folder"
            )
        files += found
        labels += [classes.index(name)] * len(found)
    return classes, files, np.asarray(labels, np.int32)


def load(root: str) -> tuple[list[str], list[str], np.ndarray, dict[str, np.ndarray]]:
    """Lists a folder.

    Returns:
      Class names (those of train, sorted), files, labels, and example numbers by split. Both names of a split work
      ("val" and "validation"). Without split folders all is "train", in a fixed mixed order, for slices as train[:90%].

    Raises:
      UserError: the folder, its class folders or their images are missing, or a class is unknown to train.
    """
    path = pathlib.Path(root).expanduser()
    if not root or not path.is_dir():
        raise UserError(f"image folder {path.absolute()} does not exist: correct data.name=folder:PATH")
    below = subfolders(path)
    folders = {}
    for name, folder in below.items():
        for split in (split for split, names in SPLITS.items() if name.lower() in names):
            if split in folders:
                raise UserError(f"{path} has both {folders[split].name} and {name}, which mean {split}: merge them")
            folders[split] = folder
    if not folders:
        classes, files, labels = list_classes(path, None)
        return classes, files, labels, {"train": np.random.default_rng(MIXING_SEED).permutation(len(files))}
    if "train" not in folders:
        raise UserError(f"{path} has {', '.join(folders)} but no train folder: class numbers come from train, add it")

    classes, files, labels, splits = None, [], [], {}
    for split in [split for split in SPLITS if split in folders]:
        folder = folders[split]
        classes, found, found_labels = list_classes(folder, classes)
        numbers = np.arange(len(files), len(files) + len(found))
        splits |= {name: numbers for name in SPLITS[split]}
        files += found
        labels.append(found_labels)
    return classes, files, np.concatenate(labels), splits
