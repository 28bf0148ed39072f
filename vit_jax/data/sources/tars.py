"""Tar shards as a data set (WebDataset), or one tar per class: read where they lie, by an index
that is built once.
"""

import fnmatch
import json
import logging
import os
import posixpath
import re
import tarfile

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.folder import SPLITS
from vit_jax.data.sources.listing import SUFFIXES, Listing, clean_label, number_classes
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

BLOCK = 512  # bytes in which a tar counts
CHUNK = 1 << 20  # bytes read at a time of the padding at the end of a tar
LABELS = (".cls", ".json")
MAX_MEMBER_BYTES = 1 << 16  # of a .cls or .json member; larger ones are no label


def braces(pattern: str) -> list[str]:
    """ "a-{00..02}.tar" -> "a-00.tar", "a-01.tar", "a-02.tar"."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    low, high = match.groups()
    numbers = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return [
        name
        for number in numbers
        for name in braces(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def below(folder: str) -> list[str]:
    """All files of a folder, at any depth."""
    return [f"{path}/{name}" for path, _, names in storage.walk(folder) for name in names]


def expanded(where: str) -> list[str]:
    """The paths that {000..099} in a path stands for; itself or its folder where they exist as they
    are.
    """
    parent, base = os.path.split(where)
    if "{" not in where or storage.exists(where):
        return [where]
    if "{" in parent and not storage.exists(parent):
        return braces(where)
    return [os.path.join(parent, name) for name in braces(base)]


def matching(path: str) -> list[str]:
    """What a path with * ? or [] in its last part stands for: itself, where there is something of
    that name.

    Raises:
      UserError: it does not exist, or its folder does not.
    """
    parent, base = os.path.split(path)
    if any(mark in base for mark in "*?["):
        storage.must_exist(parent, "folder", "correct data.name=tars:PATH")
        if not storage.exists(path):
            names = next(storage.walk(parent))[2]
            return [os.path.join(parent, name) for name in fnmatch.filter(names, base)]
    storage.must_exist(path, "tar", "correct data.name=tars:PATH")
    return below(path) if storage.is_folder(path) else [path]


def find(where: str) -> list[str]:
    """The tars of a folder (at any depth), a file, or a pattern with * ? [] or {000..099} in its
    last part, sorted.

    Raises:
      UserError: there are none, or one of those named by {000..099} is not there.
    """
    found = (
        below(where)
        if storage.is_folder(where)
        else [f for path in expanded(where) for f in matching(path)]
    )
    found = sorted({path for path in found if path.endswith(".tar")})
    if not found:
        raise UserError(
            f"{where} has no .tar files: correct data.name=tars:PATH, a folder, one file, or a "
            "pattern such as train-{000..099}.tar; compressed tars can't be read at random, unpack "
            "them"
        )
    return found


def span_of(path: str, member: tarfile.TarInfo, spans: dict) -> tuple[int, int] | None:
    """(position, length) of a member; None where it is no file.

    Args:
      spans: the same by the name of each member before it.

    Raises:
      UserError: it is sparse, or a hard link to nothing.
    """
    if member.issparse():
        raise UserError(
            f"member {member.name} of {path} is sparse, its bytes have gaps: make the tar without "
            "--sparse"
        )
    if not member.islnk():
        return (member.offset_data, member.size) if member.isreg() else None
    target = posixpath.normpath(member.linkname)
    if target not in spans:
        raise UserError(
            f"member {member.name} of {path} is a link to {member.linkname}, which is not before "
            "it: make the tar again"
        )
    return spans[target]


def check_end(path: str, end: int, last: str) -> None:
    """Raises UserError unless a tar ends at `end`, after its member `last`: by a block of zeros,
    and nothing else.
    """
    size, position = storage.stamp(path)[0], end
    while position < size or position == end:
        chunk = storage.read_range(path, position, min(CHUNK, max(size - position, 0)))
        # Half a header, or none at all, is an end as good as any to tarfile.
        if position == end and chunk[:BLOCK] != bytes(BLOCK):
            raise UserError(
                f"{path} is cut off or damaged after {last or 'its start'}: fetch it again"
            )
        if chunk.strip(b"\0"):
            raise UserError(
                f"{path} goes on after its end at byte {end}, as tars behind one another in one "
                "file do: make them one by tar --concatenate, or files of their own"
            )
        position += CHUNK


def members(path: str) -> list[tuple[str, int, int]]:
    """(name, position, length) of the files in a tar, in order; a hard link is the file that it
    names.

    Raises:
      UserError: it is no tar, is cut off, goes on after its end, or has a sparse member or a link
        to nothing.
    """
    spans, found, links, last = {}, [], [], ""
    try:
        with storage.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                last = f"its member {member.name}"
                span = spans[posixpath.normpath(member.name)] = span_of(path, member, spans)
                if span:
                    found.append((member.name, *span))
                elif member.name.lower().endswith(SUFFIXES) and not member.isdir():
                    links.append(member.name)
            end = archive.offset
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(f"{path} is no whole tar ({one_line(error)}): fetch it again") from None
    check_end(path, end, last)
    if links:
        log.warning(
            "%d images of %s are symbolic links and are left out, as %s", len(links), path, links[0]
        )
    return found


def label_in(path: str, name: str, position: int, length: int) -> str:
    """The label in a .cls (its text) or .json member (its "label").

    Raises:
      UserError: there is none.
    """
    if length > MAX_MEMBER_BYTES:
        raise UserError(
            f"member {name} of {path} has {length} bytes, too many for a label: correct it"
        )
    text = storage.read_range(path, position, length).decode("utf-8", "replace")
    if not name.lower().endswith(".json"):
        return text
    try:
        label = json.loads(text)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f'member {name} of {path} is no JSON object with a "label": correct it'
        ) from None
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise UserError(
            f'the "label" in member {name} of {path} is no text and no whole number: correct it'
        )
    return str(label)


def label_of(path: str, key: str, parts: dict) -> tuple[str, bool]:
    """The label of one example: in its .cls or .json member, else its folder in the tar, else the
    name of the tar.

    Returns:
      label, whether it is the name of the tar.

    Raises:
      UserError: it has none.
    """
    what = f"example {key} of {path}"
    for suffix in LABELS:
        if suffix in parts:
            return clean_label(label_in(path, *parts[suffix]), what), False
    inner, shard = os.path.dirname(key), os.path.basename(path).removesuffix(".tar")
    if inner.strip("./"):
        return clean_label(os.path.basename(inner), what), False
    if set(parts) <= set(SUFFIXES) and not re.search(r"[-_]\d+$", shard):
        return clean_label(shard, what), True
    raise UserError(f"{what} has no label: add a {os.path.basename(key)}.cls, or class folders")


def parted(base: str) -> tuple[str, str]:
    """(name of the example, suffix in lower case) of a member: parted at the first dot, as
    WebDataset does.

    Where that makes no suffix that is known here, at the last dot: photo.1.jpg and photo.1.cls are
      one example.
    """
    stem, _, suffix = base.partition(".")
    if f".{suffix.lower()}" not in (*SUFFIXES, *LABELS):
        stem, suffix = os.path.splitext(base)
        return stem, suffix.lower()
    return stem, f".{suffix.lower()}"


def grouped(path: str) -> dict[str, dict]:
    """Key of an example -> suffix -> (name, position, length) of its members. Leaves out hidden
    names.
    """
    groups: dict[str, dict] = {}
    for name, position, length in members(path):
        folder, base = os.path.split(name)
        if base and not base.startswith("."):
            stem, suffix = parted(base)
            groups.setdefault(os.path.join(folder, stem), {})[suffix] = name, position, length
    return groups


def examples(path: str) -> list[tuple[str, int, int, str, bool]]:
    """(key, position, length, label, whether that is the name of the tar) of every image in a tar.

    Raises:
      UserError: an image has no label, a label no image, or an example two images.
    """
    found = []
    for key, parts in grouped(path).items():
        images = [parts[suffix] for suffix in SUFFIXES if suffix in parts]
        if len(images) > 1:
            names = " and ".join(name for name, *_ in images)
            raise UserError(
                f"example {key} of {path} has {len(images)} images, {names}: name them differently"
            )
        # A photo.meta.json is no example of its own, it may go with photo.jpg.
        if not images and parts.keys() & set(LABELS) and "." not in os.path.basename(key):
            raise UserError(
                f"example {key} of {path} has a label but no image ({', '.join(SUFFIXES)}): add it"
            )
        found += [
            (key, position, length, *label_of(path, key, parts)) for _, position, length in images
        ]
    return found


def scan(paths: list[str]) -> dict[str, np.ndarray]:
    """The index of all shards."""
    keys, shard, spans, labels, classes = [], [], [], [], []
    for number, path in enumerate(paths):
        found = examples(path)
        keys += [key for key, *_ in found]
        labels += [label for *_, label, _ in found]
        spans += [(position, length) for _, position, length, *_ in found]
        classes.append(any(is_class for *_, is_class in found))
        shard += [number] * len(found)
        if number % 100 == 99:
            log.info("indexed %d of %d tars, %d images", number + 1, len(paths), len(keys))
    return dict(
        stamps=np.asarray([storage.stamp(path) for path in paths], np.int64),
        shard=np.asarray(shard, np.int32),
        spans=np.asarray(spans, np.int64).reshape(-1, 2),
        classes=np.asarray(classes, bool),
        **index_cache.Strings.pack(keys).arrays("keys"),
        **index_cache.Strings.pack(labels).arrays("labels"),
    )


def indexed(where: str, paths: list[str]) -> dict[str, np.ndarray]:
    def is_current(arrays) -> bool:
        # An index of an earlier version has no "classes", and is built again.
        return len(arrays["classes"]) == len(paths) and np.array_equal(
            arrays["stamps"], list(map(storage.stamp, paths))
        )

    return index_cache.cached("tars", "\n".join([where, *paths]), lambda: scan(paths), is_current)


def root_of(where: str) -> str:
    """The folder that the tars of a data set are in; its own name, and those above it, say nothing
    about them.
    """
    if storage.is_folder(where):
        return where
    parent = os.path.dirname(where)
    return parent if storage.exists(parent) else os.path.dirname(parent.partition("{")[0])


def split_of(root: str, path: str, is_class: bool) -> str:
    """The split that a tar is for by the last word below `root` that names one, as in val/0001.tar,
    else "train".

    The name of a tar that holds a class is that of the class: train.tar may be of locomotives.
    """
    named = (os.path.dirname(path) if is_class else path)[len(root) :]
    words = re.split(r"[^a-z]+", named.lower())
    return next(
        (split for word in reversed(words) for split, names in SPLITS.items() if word in names),
        "train",
    )


def load(where: str) -> Listing:
    """Lists tar shards.

    Raises:
      UserError: there are none, one is damaged, or an image has no label or a wrong one.
    """
    where = storage.absolute(where)
    paths = find(where)
    arrays = indexed(where, paths)
    keys, shard, spans = index_cache.Strings.of(arrays, "keys"), arrays["shard"], arrays["spans"]
    if not len(keys):
        raise UserError(
            f"the tars of {where} hold no images ({', '.join(SUFFIXES)}): correct "
            "data.name=tars:PATH"
        )
    texts, root = index_cache.Strings.of(arrays, "labels"), root_of(where)
    of_tar = np.asarray(
        [split_of(root, *tar) for tar in zip(paths, arrays["classes"].tolist(), strict=True)]
    )
    splits = {}
    for split in SPLITS:
        if len(numbers := np.flatnonzero((of_tar == split)[shard])):
            splits |= dict.fromkeys(SPLITS[split], numbers)
    labels, class_names, num_classes = number_classes(texts, splits, where)

    def read(i: int) -> bytes:
        return storage.read_range(paths[shard[i]], *spans[i].tolist())

    return Listing(
        class_names=class_names,
        num_classes=num_classes,
        labels=labels,
        splits=splits,
        read=read,
        describe=lambda i: index_cache.printable(f"{keys[i]} in {paths[shard[i]]}"),
        fingerprint=index_cache.digest(keys.bytes, keys.ends, spans, texts.bytes, texts.ends),
    )
