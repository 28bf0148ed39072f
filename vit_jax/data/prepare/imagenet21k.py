"""Lists ImageNet-21k as it is published: a folder with one tar per class, named by its WordNet id.

Labels are those of the published 21,843-way heads: positions in Google's sorted list of WordNet
ids, which are the classes of the fall 2011 release and two that have no images.
"""

import concurrent.futures
import functools
import logging
import os
import pathlib

import numpy as np

from vit_jax.data.sources import index_cache, storage, tar_members, tars, walk
from vit_jax.data.sources.ignored import Ignored
from vit_jax.data.sources.listing import SUFFIXES, Listing
from vit_jax.data.sources.spans import Spans
from vit_jax.errors import NegativeResult, UserError

log = logging.getLogger("vit_jax.data.prepare")

IDS = pathlib.Path(__file__).parent / "imagenet21k_wordnet_ids.txt"
NUM_CLASSES = 21_843
WITHOUT_IMAGES = ("n03931044", "n09859684")  # in Google's list, and in no release
# Release -> (classes, images), as stated by image-net.org.
RELEASES = {"fall 2011": (21_841, 14_197_122), "winter 2021": (19_167, 13_153_500)}
READERS = 16  # tars indexed at a time; on a store or a slow disk, every header costs a request


@functools.cache
def ids() -> tuple[str, ...]:
    """The WordNet ids of all classes, in the order of their labels."""
    return tuple(IDS.read_text().split())


def some(names) -> str:
    """The first three of many names."""
    names = list(names)
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3:,} more"
    return text


def members(path: str) -> list[tuple[str, int, int]]:
    """(name, position, length) of the images in a tar; `tar_members` raises if it is damaged."""
    found = tar_members.members(path, Ignored())
    return [member[:3] for member in found if member[0].lower().endswith(SUFFIXES)]


def scan_tar(path: str) -> tuple[list[bytes], np.ndarray, str]:
    """(names, spans int64 [images, 2], error or "") of a tar."""
    try:
        images = members(path)
    except UserError as error:
        return [], np.empty((0, 2), np.int64), str(error)
    names = [os.fsencode(os.path.basename(name)) for name, *_ in images]
    spans = np.asarray([span for _, *span in images], np.int64).reshape(-1, 2)
    return names, spans, ""


def scan(folder: str, paths: list[str]) -> dict[str, np.ndarray]:
    """The index of all tars; 14 million images take some minutes."""
    stamps = storage.stamps(paths)
    name_bytes = []
    name_ends = []
    spans = []
    errors = []
    start = 0
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for number, (names, tar_spans, error) in enumerate(pool.map(scan_tar, paths), 1):
            ends = start + np.cumsum([len(name) for name in names], dtype=np.int64)
            name_bytes.append(np.frombuffer(b"".join(names), np.uint8))
            name_ends.append(ends)
            spans.append(tar_spans)
            start += len(name_bytes[-1])
            if error:
                errors.append(error)
            if number % 1000 == 0:
                log.info("indexed %d of %d tars", number, len(paths))
    if errors:
        raise UserError(
            f"{len(errors)} of the {len(paths)} tars in {folder} are damaged: "
            f"{'; '.join(errors[:3])}"
        )
    strings = index_cache.Strings(np.concatenate(name_bytes), np.concatenate(name_ends))
    return dict(
        stamps=stamps,
        counts=np.asarray([len(ends) for ends in name_ends], np.int64),
        spans=np.concatenate(spans),
        **strings.arrays("names"),
    )


def find(folder: str) -> tuple[str, list[str]]:
    """(absolute folder, paths of its tars, sorted)."""
    folder = storage.absolute(folder)
    storage.must_exist(folder, "folder", "correct --from")
    names = next(walk.walk(folder, Ignored()))[2] if storage.is_folder(folder) else []
    paths = [f"{folder}/{name}" for name in names if name.endswith(".tar")]
    if not paths:
        raise UserError(
            f"{folder} has no tars with names such as n01440764.tar: give the folder that has them "
            "as --from"
        )
    return folder, paths


def release_of(folder: str, counts: dict[str, int], partial: bool) -> str:
    """Which release the tars are, or "partial", which is an error unless the user asks for it.

    Args:
      counts: number of images by the name of the tar.
    """
    unknown = sorted(counts.keys() - set(ids()))
    empty = [name for name, count in counts.items() if not count]
    missing = [wnid for wnid in ids() if wnid not in counts and wnid not in WITHOUT_IMAGES]
    classes = len(counts) - len(unknown)
    images = sum(count for name, count in counts.items() if name not in unknown)
    release = "partial"
    for name, size in RELEASES.items():
        if size == (classes, images) and not unknown:
            release = name
    differences = []
    if unknown:
        differences.append(f"unknown classes: {some(unknown)}")
    if empty:
        differences.append(f"empty: {some(f'{name}.tar' for name in empty)}")
    if missing:
        differences.append(f"missing of fall 2011: {some(missing)}")
    contents = f"{classes:,} known classes and {images:,} images; "
    contents += "; ".join(differences) or "no class is missing"
    if release == "partial" and not partial:
        known = " nor ".join(
            f"{name} ({c:,} classes, {n:,} images)" for name, (c, n) in RELEASES.items()
        )
        raise NegativeResult(
            f"{folder} is neither {known}: it has {contents}: add what is missing, or prepare the "
            "incomplete release with --partial"
        )
    if release == "partial" or empty:
        log.warning("%s has %s", folder, contents)
    return release


def load(folder: str, partial: bool) -> tuple[Listing, dict]:
    """Lists the images: (listing, dict of `release`, `classes`, `images`, `empty`, `unknown`).

    Args:
      partial: whether an incomplete release is allowed.
    """
    folder, paths = find(folder)
    index = "imagenet21k", "\n".join([folder, *paths])
    arrays = index_cache.cached(
        *index,
        lambda: scan(folder, paths),
        lambda cached: storage.are_unchanged(paths, cached["stamps"]),
    )
    wnids = [os.path.basename(path).removesuffix(".tar") for path in paths]
    counts = dict(zip(wnids, arrays["counts"].tolist(), strict=True))
    release = release_of(folder, counts, partial)

    numbers = {wnid: number for number, wnid in enumerate(ids())}
    of_tar = np.repeat(np.arange(len(paths), dtype=np.int32), arrays["counts"])
    labels = np.asarray([numbers.get(wnid, -1) for wnid in wnids], np.int32)[of_tar]
    known = np.flatnonzero(labels >= 0)
    if not len(known):
        raise NegativeResult(
            f"{folder} has no images of ImageNet-21k classes: give another folder as --from"
        )
    names = index_cache.Strings.of(arrays, "names")
    spans = arrays["spans"]
    listing = tars.Members(
        spans=Spans(paths, arrays["stamps"], of_tar, spans, index),
        names=names,
        class_names=ids(),
        num_classes=NUM_CLASSES,
        all_labels=labels,
        splits={"train": known},
        fingerprint=index_cache.digest(
            "\n".join(wnids), arrays["counts"], names.bytes, names.ends, spans
        ),
    )
    return listing, dict(
        release=release,
        classes=len(np.unique(labels[known])),
        images=len(known),
        empty=[wnid for wnid in wnids if not counts[wnid]],
        unknown=[wnid for wnid in wnids if wnid not in numbers],
    )
