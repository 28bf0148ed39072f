"""Tar shards as a data set (WebDataset), or one tar per class: read where they lie, by an index that is built once."""

import fnmatch
import itertools
import json
import logging
import os
import re
import tarfile

import numpy as np

from vit_jax.data import index, storage
from vit_jax.data.folder import SPLITS
from vit_jax.data.listing import SUFFIXES, Listing, number_classes
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

BLOCK = 512  # bytes in which a tar counts
MAX_LABEL_BYTES = 1 << 16  # of a .cls or .json member; larger ones are no label


def braces(pattern: str) -> list[str]:
    """ "a-{00..02}.tar" -> "a-00.tar", "a-01.tar", "a-02.tar"."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    low, high = match.groups()
    numbers = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return [name for number in numbers for name in braces(pattern[: match.start()] + number + pattern[match.end() :])]


def find(where: str) -> list[str]:
    """The tars of a folder (at any depth), a file, or a pattern with * ? [] or {000..099}, sorted."""
    if storage.is_folder(where):
        found = [f"{folder}/{name}" for folder, _, names in storage.walk(where) for name in names]
    elif any(mark in where for mark in "*?["):
        parent = os.path.dirname(where)
        storage.must_exist(parent, "folder", "correct data.name=tars:PATH")
        found = [f"{parent}/{name}" for _, _, names in itertools.islice(storage.walk(parent), 1) for name in names]
        found = fnmatch.filter(found, where)
    else:
        found = braces(where)
        for path in found:
            storage.must_exist(path, "tar", "correct data.name=tars:PATH")
    found = sorted(path for path in found if path.endswith(".tar"))
    if not found:
        raise UserError(
            f"{where} has no .tar files: correct data.name=tars:PATH, a folder, one file, or a pattern such as "
            "train-{000..099}.tar; compressed tars can't be read at random, unpack them"
        )
    return found


def members(path: str) -> list[tuple[str, int, int]]:
    """(name, position, length) of the regular files in a tar, in order.

    Raises:
      UserError: it is no tar, or is cut off.
    """
    size = storage.stamp(path)[0]
    try:
        with storage.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            found = [(m.name, m.offset_data, m.size) for m in archive if m.isreg()]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(f"{path} is no whole tar ({one_line(error)}): fetch it again") from None
    end = -(-sum(found[-1][1:]) // BLOCK) * BLOCK if found else 0
    # tarfile takes half a header for the end of the archive, which is a block of zeros.
    if end > size or (end < size and found and storage.read_range(path, end, BLOCK) != bytes(BLOCK)):
        raise UserError(f"{path} is cut off at or after its member {found[-1][0]}: fetch it again")
    return found


def label_in(path: str, name: str, position: int, length: int) -> str:
    """The label in a .cls (its text) or .json member (its "label")."""
    if length > MAX_LABEL_BYTES:
        raise UserError(f"member {name} of {path} has {length} bytes, too many for a label: correct it")
    text = storage.read_range(path, position, length).decode("utf-8", "replace").strip()
    if not name.endswith(".json"):
        return text
    try:
        return str(json.loads(text)["label"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f'member {name} of {path} is no JSON object with a "label": correct it') from None


def label_of(path: str, key: str, parts: dict) -> str:
    """The label of one example: in its .cls or .json member, else its folder in the tar, else the name of the tar."""
    for suffix in (".cls", ".json"):
        if suffix in parts:
            return label_in(path, *parts[suffix])
    inner, shard = os.path.dirname(key), os.path.basename(path).removesuffix(".tar")
    if inner.strip("./"):
        return os.path.basename(inner)
    if set(parts) <= set(SUFFIXES) and not re.search(r"[-_]\d+$", shard):
        return shard
    raise UserError(f"example {key} of {path} has no label: add a {os.path.basename(key)}.cls, or class folders")


def examples(path: str) -> list[tuple[str, int, int, str]]:
    """(key, position, length, label) of every image in a tar. Members of one name up to its first dot are one example.

    Raises:
      UserError: an image has no label, or a label no image.
    """
    groups: dict[str, dict] = {}
    for name, position, length in members(path):
        folder, base = os.path.split(name)
        stem, _, suffix = base.partition(".")
        if stem:
            groups.setdefault(os.path.join(folder, stem), {})["." + suffix.lower()] = name, position, length
    found = []
    for key, parts in groups.items():
        images = [parts[suffix] for suffix in SUFFIXES if suffix in parts]
        if not images and parts.keys() & {".cls", ".json"}:
            raise UserError(f"example {key} of {path} has a label but no image ({', '.join(SUFFIXES)}): add it")
        found += [(key, position, length, label_of(path, key, parts)) for _, position, length in images[:1]]
    return found


def scan(paths: list[str]) -> dict[str, np.ndarray]:
    """The index of all shards."""
    keys, shard, spans, labels = [], [], [], []
    for number, path in enumerate(paths):
        found = examples(path)
        keys += [key for key, *_ in found]
        labels += [label for *_, label in found]
        spans += [(position, length) for _, position, length, _ in found]
        shard += [number] * len(found)
        if number % 100 == 99:
            log.info("indexed %d of %d tars, %d images", number + 1, len(paths), len(keys))
    return dict(
        stamps=np.asarray([storage.stamp(path) for path in paths], np.int64),
        shard=np.asarray(shard, np.int32),
        spans=np.asarray(spans, np.int64).reshape(-1, 2),
        **index.Strings.pack(keys).arrays("keys"),
        **index.Strings.pack(labels).arrays("labels"),
    )


def indexed(where: str, paths: list[str]) -> dict[str, np.ndarray]:
    def is_current(arrays) -> bool:
        return np.array_equal(arrays["stamps"], [storage.stamp(path) for path in paths])

    return index.cached("tars", "\n".join([where, *paths]), lambda: scan(paths), is_current)


def split_of(where: str, path: str) -> str:
    """The split that a shard belongs to by a word of its path, as train-0001.tar or val/0001.tar, else "train"."""
    words = re.split(r"[^a-z]+", path[len(os.path.dirname(where)) :].lower())
    return next((split for split, names in SPLITS.items() if set(words) & set(names)), "train")


def load(where: str) -> Listing:
    """Lists tar shards.

    Raises:
      UserError: there are none, one is damaged, or an image has no label.
    """
    where = storage.absolute(where)
    paths = find(where)
    arrays = indexed(where, paths)
    keys, shard, spans = index.Strings.of(arrays, "keys"), arrays["shard"], arrays["spans"]
    if not len(keys):
        raise UserError(f"the tars of {where} hold no images ({', '.join(SUFFIXES)}): correct data.name=tars:PATH")
    texts = index.Strings.of(arrays, "labels")
    split = np.asarray([split_of(where, path) for path in paths])[shard]
    splits = {}
    for name in (name for name in SPLITS if (split == name).any()):
        splits |= dict.fromkeys(SPLITS[name], np.flatnonzero(split == name))
    labels, class_names, num_classes = number_classes(list(texts), splits, where)

    def read(i: int) -> bytes:
        return storage.read_range(paths[shard[i]], *spans[i].tolist())

    return Listing(
        class_names=class_names,
        num_classes=num_classes,
        labels=labels,
        splits=splits,
        read=read,
        describe=lambda i: f"{keys[i]} in {paths[shard[i]]}",
        fingerprint=index.digest(keys.bytes, keys.ends, spans, texts.bytes, texts.ends),
    )
