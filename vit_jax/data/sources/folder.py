"""A folder of images as a data set: class sub-folders, with or without train / val / test folders
above them.
"""

import dataclasses
import os

import numpy as np

from vit_jax.data.sources import index_cache, storage, walk
from vit_jax.data.sources.alike import alike, check_alike, same_problem
from vit_jax.data.sources.ignored import BROKEN, Ignored, selected
from vit_jax.data.sources.listing import SUFFIXES, Files, Listing, in_order
from vit_jax.data.sources.unlabelled import INSTEAD
from vit_jax.errors import UserError

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
SHUFFLE_SEED = 0  # of the fixed order of a folder without split folders


def scan(root: str, problems: list[str] | None = None) -> tuple[dict[str, np.ndarray], Ignored]:
    """All folders below `root` (relative, sorted, "" first), the times of their last changes, and
    the images in each of them; and the other files.

    Args:
      problems: gets the folders that can't be listed, which otherwise are an error.
    """
    unused = Ignored()
    if storage.is_local(root):
        walked = walk.walk_local(root, unused, problems)
    else:
        walked = ((path, 0, below, names) for path, below, names in walk.walk(root, unused))
    folders, changed, counts, images = [], [], [], []
    for path, time, _, names in walked:
        found = selected(path, names, SUFFIXES, unused)
        folders.append(path[len(root) :].strip("/"))
        changed.append(time)
        counts.append(len(found))
        images += found
    order = sorted(range(len(folders)), key=lambda i: folders[i].split("/"))
    starts = np.cumsum([0, *counts])
    images = [name for i in order for name in images[starts[i] : starts[i + 1]]]
    arrays = dict(
        suffixes=np.asarray(SUFFIXES),
        changed=np.asarray(changed, np.int64)[order],
        counts=np.asarray(counts, np.int64)[order],
        **index_cache.Strings.pack([folders[i] for i in order]).arrays("folders"),
        **index_cache.Strings.pack(images).arrays("images"),
        **unused.arrays(),
    )
    return arrays, unused


def unchanged(root: str, arrays) -> bool:
    """Whether no file or folder was added, removed or renamed: that changes the folder's time. What
    a broken link leads to may appear without that.
    """
    if not storage.is_local(root) or tuple(arrays["suffixes"]) != SUFFIXES:
        return False
    if BROKEN in Ignored.of(arrays):
        return False
    folders = index_cache.Strings.of(arrays, "folders")
    return all(
        os.stat(os.path.join(root, folder)).st_mtime_ns == changed
        for folder, changed in zip(folders, arrays["changed"].tolist(), strict=True)
    )


def split_folders(root: str, top: list[str], problems: list[str]) -> dict[str, str]:
    """Split -> the name of its folder, of the folders `top` directly below `root`."""
    found = {}
    for name in top:
        for split in (split for split, names in SPLITS.items() if name.lower() in names):
            if split in found:
                problems.append(
                    f"{root} has both {found[split]} and {name}, which mean {split}: merge them"
                )
            else:
                found[split] = name
    if found and "train" not in found:
        problems.append(
            f"{root} has {', '.join(found)} but no train folder: add it, or rename "
            f"{', '.join(found.values())}"
        )
    return {split: found[split] for split in SPLITS if split in found}


def class_of(folder: str, below: str) -> str | None:
    """The class of the images in `folder`, in the split whose folder is `below`; None in others."""
    parts = folder.split("/") if folder else []
    if below and parts[:1] != [below]:
        return None
    return "/".join(parts[bool(below) : bool(below) + 1])


def label_folders(
    root: str,
    folders: list[str],
    counts: np.ndarray,
    below: str,
    classes: list[str] | None,
    problems: list[str],
):
    """Labels of the folders of one split: (class names, label of every folder, -1 if it has none).
    Classes that train lacks come last.

    Args:
      below: the folder of the split, "" if there are no split folders.
      classes: the class names of train, or None if this is train.
    """
    where = os.path.join(root, below) if below else root
    names = [class_of(folder, below) for folder in folders]
    sizes = {}
    for name, count in zip(names, counts.tolist(), strict=True):
        if name:
            sizes[name] = sizes.get(name, 0) + count
    if not sizes:
        problems.append(
            f"{where} has no class folders: put the images of each class in a sub-folder named "
            f"after it, {INSTEAD}"
        )
    if classes is None:
        classes = in_order(sizes)
    unknown = sorted(sizes.keys() - set(classes))
    problems += [
        f"{os.path.join(where, name)} is a class that train does not have: remove the folder, or "
        "add the class to train"
        for name in unknown
    ]
    problems += [
        f"class folder {os.path.join(where, name)} has no images ({', '.join(SUFFIXES)}): add some "
        "or remove the folder"
        for name, count in sizes.items()
        if not count
    ]
    classes = [*classes, *unknown]
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers[name] if name else -1 for name in names]
    return classes, np.asarray(labels, np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the folders mean. `problems`: errors of one line, in the order of their weight."""

    classes: list[str]
    labels: np.ndarray  # of each folder, int32, -1 if its images are not used
    splits: dict[str, np.ndarray]  # numbers of the images by name of the split, aliases included
    problems: list[str]
    labelled: bool = True


def layout(root: str, folders: list[str], counts: np.ndarray) -> Layout:
    """Finds splits and classes.

    Args:
      folders: relative, "" first.
      counts: images directly in each of them, int64.
    """
    problems: list[str] = []
    top = [folder for folder in folders if folder and "/" not in folder]
    found = split_folders(root, top, problems)
    names = {class_of(folder, below) for below in found.values() or ("",) for folder in folders}
    same, _ = alike(names - {None, ""})
    problems += [same_problem(pair, root) for pair in same]
    classes = None
    labels = np.full(len(folders), -1, np.int32)
    splits = {}
    for split, below in found.items():
        classes, own = label_folders(root, folders, counts, below, classes, problems)
        labels = np.maximum(labels, own)
        numbers = np.flatnonzero(np.repeat(own, counts) >= 0)
        splits |= dict.fromkeys(SPLITS[split], numbers)
    if not found:
        classes, labels = label_folders(root, folders, counts, "", None, problems)
        numbers = np.flatnonzero(np.repeat(labels, counts) >= 0)
        splits["train"] = shuffled(numbers)
    return Layout(classes, labels, splits, problems)


def layout_without_classes(root: str, folders: list[str], counts: np.ndarray) -> Layout:
    """The same for images without labels, which may be anywhere in a split, or below `root` if
    there are no split folders.
    """
    problems: list[str] = []
    top = [folder for folder in folders if folder and "/" not in folder]
    found = split_folders(root, top, problems)
    is_used = np.zeros(len(folders), bool)
    splits = {}
    for split, below in found.items():
        is_in_split = np.asarray([class_of(folder, below) is not None for folder in folders])
        is_used |= is_in_split
        splits |= dict.fromkeys(SPLITS[split], np.flatnonzero(np.repeat(is_in_split, counts)))
    if not found:
        is_used[:] = True
        splits["train"] = shuffled(np.arange(counts.sum()))
    if not problems and not len(splits["train"]):
        where = os.path.join(root, found["train"]) if found else root
        problems.append(f"{where} has no images ({', '.join(SUFFIXES)}): add some")
    labels = np.where(is_used, 0, -1).astype(np.int32)
    return Layout([], labels, splits, problems, labelled=False)


def shuffled(numbers: np.ndarray) -> np.ndarray:
    """The images of a folder without split folders, in a fixed order."""
    return numbers[np.random.default_rng(SHUFFLE_SEED).permutation(len(numbers))]


def unused_images(folders: list[str], counts: np.ndarray, found: Layout) -> Ignored:
    """The images that are in no class folder, or, without labels, in no split, by kind."""
    unused = Ignored()
    tops = {name for names in SPLITS.values() for name in names}
    for folder, count, label in zip(folders, counts.tolist(), found.labels.tolist(), strict=True):
        if label < 0 and count:
            is_top = not folder or folder.lower() in tops
            kind = "outside of the split folders"
            if found.labelled and is_top:
                kind = "beside the class folders"
            unused[kind] += count
    return unused


def load(root: str, labelled: bool = True) -> Listing:
    """Lists a folder; a saved listing is used while no folder has changed.

    Class names are those of train, by `in_order`. All names of a split work ("val", "validation").
    Without split folders everything is "train", in a fixed shuffled order, for slices such as
    train[:90%]. Without labels, folders mean nothing but splits.
    """
    root = root and storage.absolute(root)
    if not root or not storage.is_folder(root):
        raise UserError(
            f"image folder {root or '(empty)'} does not exist: correct data.name=folder:PATH"
        )
    arrays = index_cache.cached(
        "folder", root, lambda: scan(root)[0], lambda arrays: unchanged(root, arrays)
    )
    folders = list(index_cache.Strings.of(arrays, "folders"))
    arrange = layout if labelled else layout_without_classes
    found = arrange(root, folders, arrays["counts"])
    if found.problems:
        raise UserError(found.problems[0])
    check_alike(found.classes, root)  # warns of case
    return listing(root, arrays, found)


def listing(root: str, arrays, found: Layout) -> Files:
    """The images of `scan`, with the meaning of their folders."""
    folders = list(index_cache.Strings.of(arrays, "folders"))
    images = index_cache.Strings.of(arrays, "images")
    counts = arrays["counts"]
    classes = found.classes
    folder_of = np.repeat(np.arange(len(folders), dtype=np.int32), counts)

    content = ["\n".join(folders), counts, images.bytes, images.ends]
    # Earlier versions numbered all classes in the order of text: their runs must not go on.
    if classes != sorted(classes):
        content.append("\n".join(classes))

    def path(i: int) -> str:
        return "/".join(part for part in (root, folders[folder_of[i]], images[i]) if part)

    return Files(
        path=path,
        all_labels=found.labels[folder_of],
        splits=found.splits,
        class_names=tuple(classes),
        num_classes=len(classes),
        fingerprint=index_cache.digest(*content),
        ignored=Ignored.of(arrays) + unused_images(folders, counts, found),
    )
