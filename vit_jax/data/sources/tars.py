"""Tar shards as a data set (WebDataset), or one tar per class: read in place, by an index that is
built once.
"""

import concurrent.futures
import dataclasses
import fnmatch
import functools
import logging
import os
import re
from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.data.sources import index_cache, storage, tar_members, unlabelled, walk
from vit_jax.data.sources.folder import SPLITS
from vit_jax.data.sources.ignored import HIDDEN, Ignored, is_foreign, selected, suffix_kind
from vit_jax.data.sources.listing import SUFFIXES, Listing, number_classes
from vit_jax.data.sources.spans import Spans
from vit_jax.data.sources.tar_labels import label_of
from vit_jax.data.sources.tar_members import LABELS
from vit_jax.errors import UserError, printable

log = logging.getLogger(__name__)

READERS = 8  # tars indexed at a time on a store


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Members(Listing):
    """Image files in tars."""

    spans: Spans
    names: Sequence[str]  # of the images, for messages

    @property
    def distant(self) -> bool:
        return self.spans.distant

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return self.spans.read(numbers)

    def changed_file(self) -> str | None:
        return self.spans.changed_file()

    def describe(self, i: int) -> str:
        return printable(f"{self.names[i]} in {self.spans.paths[self.spans.files[i]]}")


def braces(pattern: str) -> list[str]:
    """ "a-{00..02}.tar" -> "a-00.tar", "a-01.tar", "a-02.tar"."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    low, high = match.groups()
    before = pattern[: match.start()]
    after = pattern[match.end() :]
    numbers = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return [name for number in numbers for name in braces(before + number + after)]


def tars_below(folder: str, unused: Ignored) -> list[str]:
    """All tars of a folder, at any depth; counts other files."""
    return [
        f"{path}/{name}"
        for path, _, names in walk.walk(folder, unused)
        for name in selected(path, names, (".tar",), unused)
    ]


def expanded(where: str) -> list[str]:
    """The paths that {000..099} in a path stands for; the path itself if a file or folder has
    braces in its name.
    """
    parent, base = os.path.split(where)
    if "{" not in where or storage.exists(where):
        return [where]
    if "{" in parent and not storage.exists(parent):
        return braces(where)
    return [os.path.join(parent, name) for name in braces(base)]


def matching(path: str, unused: Ignored) -> list[str]:
    """The files that a path with * ? or [] in its last part stands for; the path itself if a file
    has that name.
    """
    parent, base = os.path.split(path)
    if any(mark in base for mark in "*?["):
        storage.must_exist(parent, "folder", "correct data.name=tars:PATH")
        if not storage.exists(path):
            names = next(walk.walk(parent, Ignored()))[2]
            return [os.path.join(parent, name) for name in fnmatch.filter(names, base)]
    storage.must_exist(path, "tar", "correct data.name=tars:PATH")
    return tars_below(path, unused) if storage.is_folder(path) else [path]


def find(where: str) -> tuple[list[str], Ignored]:
    """The tars of a folder (at any depth), a file, or a pattern with * ? [] or {000..099} in its
    last part, sorted; and the other files of a folder.
    """
    unused = Ignored()
    if storage.is_folder(where):
        found = tars_below(where, unused)
    else:
        found = [file for path in expanded(where) for file in matching(path, unused)]
    found = sorted({path for path in found if path.endswith(".tar")})
    if not found:
        raise UserError(
            f"{where} has no .tar files: correct data.name=tars:PATH, a folder, one file, or a "
            "pattern such as train-{000..099}.tar; decompress compressed tars, which have no "
            "random access"
        )
    return found, unused


def split_name(base: str) -> tuple[str, str]:
    """(name of the example, suffix in lower case) of a member, split at the first dot as WebDataset
    does.

    If that gives an unknown suffix, it is split at the last dot: photo.1.jpg and photo.1.cls are
    one example.
    """
    stem, _, suffix = base.partition(".")
    if f".{suffix.lower()}" in (*SUFFIXES, *LABELS):
        return stem, f".{suffix.lower()}"
    stem, suffix = os.path.splitext(base)
    return stem, suffix.lower()


def grouped(path: str, unused: Ignored) -> dict[str, dict]:
    """Key of an example -> suffix -> each of the members that is not hidden."""
    groups: dict[str, dict] = {}
    for member in tar_members.members(path, unused):
        folder, base = os.path.split(member[0])
        names = [name for name in folder.split("/") if name not in (".", "..")]
        foreign = list(filter(is_foreign, names))
        if foreign:
            kind = "in hidden folders" if foreign[0].startswith(".") else f"in {foreign[0]}"
            unused.add(kind, member[0])
        elif base.startswith("."):
            unused.add(HIDDEN, member[0])
        elif base:
            stem, suffix = split_name(base)
            parts = groups.setdefault(os.path.join(folder, stem), {})
            if suffix in parts:
                unused.add("earlier of the same name", member[0])
            parts[suffix] = member
    return groups


def examples(path: str, labelled: bool) -> tuple[list[tuple[str, int, int, str, bool]], Ignored]:
    """(key, position, length, label, whether the label is the name of the tar) of every image; and
    the members that are neither images nor their labels.
    """
    found = []
    unused = Ignored()
    for key, parts in grouped(path, unused).items():
        images = [parts[suffix] for suffix in SUFFIXES if suffix in parts]
        if len(images) > 1:
            names = " and ".join(name for name, *_ in images)
            raise UserError(
                f"example {key} of {path} has {len(images)} images, {names}: name them differently"
            )
        if images:
            _, position, length, _ = images[0]
            label = label_of(path, key, parts) if labelled else ("", False)
            found.append((key, position, length, *label))
        # A photo.meta.json is not an example: it may belong to photo.jpg.
        elif labelled and parts.keys() & set(LABELS) and "." not in os.path.basename(key):
            raise UserError(
                f"example {key} of {path} has a label but no image ({', '.join(SUFFIXES)}): add it"
            )
        used = (*SUFFIXES, *LABELS) if images else ()
        for suffix in parts.keys() - set(used):
            unused.add(suffix_kind(parts[suffix][0]), parts[suffix][0])
    return found, unused


def all_examples(paths: list[str], labelled: bool) -> Iterator[tuple[list, Ignored]]:
    """`examples` of each tar; several at a time if the answers take long."""
    of_tar = functools.partial(examples, labelled=labelled)
    if not storage.is_distant(paths[0]):
        yield from map(of_tar, paths)
        return
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(of_tar, paths)


def scan(paths: list[str], labelled: bool) -> dict[str, np.ndarray]:
    """The index of all shards; reads them from start to end if they are on a store."""
    # Read first, so that a change during the scan is noticed.
    stamps = storage.stamps(paths)
    keys, shard, spans, labels, classes = [], [], [], [], []
    unused = Ignored()
    for number, (found, others) in enumerate(all_examples(paths, labelled)):
        unused.update(others)
        keys += [key for key, *_ in found]
        labels += [label for *_, label, _ in found]
        spans += [(position, length) for _, position, length, *_ in found]
        classes.append(any(is_class for *_, is_class in found))
        shard += [number] * len(found)
        if number % 100 == 99:
            log.info("indexed %d of %d tars, %d images", number + 1, len(paths), len(keys))
    return dict(
        suffixes=np.asarray(SUFFIXES),
        stamps=stamps,
        shard=np.asarray(shard, np.int32),
        spans=np.asarray(spans, np.int64).reshape(-1, 2),
        classes=np.asarray(classes, bool),
        **index_cache.Strings.pack(keys).arrays("keys"),
        **index_cache.Strings.pack(labels).arrays("labels"),
        **unused.arrays(),
    )


def indexed(index: tuple[str, str], paths: list[str], labelled: bool) -> dict[str, np.ndarray]:
    def is_current(arrays) -> bool:
        # An index of an earlier version has no "suffixes", and is built again.
        complete = tuple(arrays["suffixes"]) == SUFFIXES and len(arrays["classes"]) == len(paths)
        return complete and storage.are_unchanged(paths, arrays["stamps"])

    return index_cache.cached(*index, lambda: scan(paths, labelled), is_current)


def root_of(where: str) -> str:
    """The folder that contains the tars of a data set; names of splits are looked for below it."""
    if storage.is_folder(where):
        return where
    parent = os.path.dirname(where)
    if storage.exists(parent):
        return parent
    return os.path.dirname(parent.partition("{")[0])


def split_of(root: str, path: str, is_class: bool) -> str:
    """The split of a tar: the last word of its path below `root` that names one, such as in
    val/0001.tar, else "train".

    If a tar is a class, its own name is that of the class: train.tar may be locomotives.
    """
    named = (os.path.dirname(path) if is_class else path)[len(root) :]
    for word in reversed(re.split(r"[^a-z]+", named.lower())):
        for split, names in SPLITS.items():
            if word in names:
                return split
    return "train"


def load(where: str, labelled: bool = True) -> Listing:
    """Lists the images of tar shards. Without labels, a tar is never a class: its name may name a
    split.
    """
    where = storage.absolute(where)
    paths, others = find(where)
    index = "tars" if labelled else "tars_images", "\n".join([where, *paths])
    arrays = indexed(index, paths, labelled)
    keys = index_cache.Strings.of(arrays, "keys")
    texts = index_cache.Strings.of(arrays, "labels")
    shard = arrays["shard"]
    spans = arrays["spans"]
    if not len(keys):
        raise UserError(
            f"the tars of {where} have no images ({', '.join(SUFFIXES)}): correct "
            "data.name=tars:PATH"
        )
    root = root_of(where)
    of_tar = [split_of(root, *tar) for tar in zip(paths, arrays["classes"].tolist(), strict=True)]
    of_image = np.asarray(of_tar)[shard]
    splits = {}
    for split, names in SPLITS.items():
        numbers = np.flatnonzero(of_image == split)
        if len(numbers):
            splits |= dict.fromkeys(names, numbers)
    if labelled:
        labels, class_names, num_classes = number_classes(texts, splits, where)
    else:
        labels, class_names, num_classes = unlabelled.numbered(len(keys))
    return Members(
        spans=Spans(paths, arrays["stamps"], shard, spans, index),
        names=keys,
        all_labels=labels,
        splits=splits,
        class_names=class_names,
        num_classes=num_classes,
        fingerprint=index_cache.digest(keys.bytes, keys.ends, spans, texts.bytes, texts.ends),
        ignored=others + Ignored.of(arrays),
    )
