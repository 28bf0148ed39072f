"""ImageNet-21k as it is published: a folder with one tar per class, named after its WordNet id.

Labels are those of the published 21,843-way heads: positions in Google's sorted list of WordNet
ids, which is that of the fall 2011 release and two classes that have no images.
"""

import concurrent.futures
import functools
import logging
import os
import pathlib

import numpy as np

from vit_jax.data.sources import index_cache, storage, tars
from vit_jax.data.sources.listing import SUFFIXES, Listing
from vit_jax.errors import NegativeResult, UserError

log = logging.getLogger("vit_jax.data.prepare")

IDS = pathlib.Path(__file__).parent / "imagenet21k_wordnet_ids.txt"
NUM_CLASSES = 21_843
WITHOUT_IMAGES = ("n03931044", "n09859684")  # in Google's list, and in no release
# Release -> (classes, images), as image-net.org states them.
RELEASES = {"fall 2011": (21_841, 14_197_122), "winter 2021": (19_167, 13_153_500)}
READERS = 16  # tars indexed at a time: on a store or a slow disk every header costs a request


@functools.cache
def ids() -> tuple[str, ...]:
    """The WordNet ids of all classes, in the order of their numbers."""
    return tuple(IDS.read_text().split())


def some(names) -> str:
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def members(path: str) -> list[tuple[str, int, int]]:
    """(name, position, length) of the images in a tar; `tars.members` says what is wrong with it."""
    return [member for member in tars.members(path) if member[0].lower().endswith(SUFFIXES)]


def scan_tar(path: str) -> tuple[list[bytes], np.ndarray, str]:
    """(names, spans int64 [images, 2], what is wrong or "") of a tar."""
    try:
        found = members(path)
    except UserError as error:
        return [], np.empty((0, 2), np.int64), str(error)
    spans = np.asarray([span for _, *span in found], np.int64).reshape(-1, 2)
    return [os.fsencode(os.path.basename(name)) for name, *_ in found], spans, ""


def scan(folder: str, paths: list[str]) -> dict[str, np.ndarray]:
    """The index of all tars; 14 million images take some minutes.

    Raises:
      UserError: tars are damaged; names them.
    """
    stamps = [storage.stamp(path) for path in paths]
    parts, bad = [], []
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for number, (names, spans, problem) in enumerate(pool.map(scan_tar, paths), 1):
            ends = np.cumsum([len(name) for name in names], dtype=np.int64)
            parts.append((np.frombuffer(b"".join(names), np.uint8), ends, spans))
            bad += [problem] if problem else []
            if number % 1000 == 0:
                log.info("indexed %d of %d tars", number, len(paths))
    if bad:
        raise UserError(
            f"{len(bad)} of the {len(paths)} tars in {folder} are damaged: {'; '.join(bad[:3])}"
        )
    starts = np.cumsum([0, *(len(part[0]) for part in parts)])
    return dict(
        stamps=np.asarray(stamps, np.int64),
        counts=np.asarray([len(part[1]) for part in parts], np.int64),
        spans=np.concatenate([part[2] for part in parts]),
        **index_cache.Strings(
            np.concatenate([part[0] for part in parts]),
            np.concatenate([part[1] + start for part, start in zip(parts, starts, strict=False)]),
        ).arrays("names"),
    )


def find(folder: str) -> tuple[str, list[str]]:
    """(absolute folder, paths of its tars, sorted).

    Raises:
      UserError: there are none.
    """
    folder = storage.absolute(folder)
    storage.must_exist(folder, "folder", "correct --from")
    names = next(storage.walk(folder))[2] if storage.is_folder(folder) else []
    found = [f"{folder}/{name}" for name in names if name.endswith(".tar")]
    if not found:
        raise UserError(
            f"{folder} holds no tars named as n01440764.tar: give the folder that does as --from"
        )
    return folder, found


def release_of(folder: str, counts: dict[str, int], partial: bool) -> str:
    """Which release the tars are, "partial" where they are none.

    Args:
      counts: number of images by the name of the tar.

    Raises:
      NegativeResult: they are none, and that is not wanted.
    """
    unknown = sorted(counts.keys() - set(ids()))
    empty = [name for name, count in counts.items() if not count]
    size = (
        len(counts) - len(unknown),
        sum(count for name, count in counts.items() if name not in unknown),
    )
    release = next(
        (name for name, wanted in RELEASES.items() if wanted == size and not unknown), "partial"
    )
    missing = [wnid for wnid in ids() if wnid not in counts and wnid not in WITHOUT_IMAGES]
    told = [
        f"unknown classes: {some(unknown)}" if unknown else "",
        f"empty: {some(f'{name}.tar' for name in empty)}" if empty else "",
        f"missing of fall 2011: {some(missing)}" if missing else "",
    ]
    told = "; ".join(filter(None, told)) or "no class is missing"
    if release == "partial" and not partial:
        known = " nor ".join(
            f"{name} ({c:,} classes, {n:,} images)" for name, (c, n) in RELEASES.items()
        )
        raise NegativeResult(
            f"{folder} is neither {known}: it has {size[0]:,} known classes and {size[1]:,} "
            f"images; {told}: add what is missing, or prepare what is there with --partial"
        )
    if release == "partial" or empty:
        log.warning(
            "%s has %s known classes and %s images; %s",
            folder,
            f"{size[0]:,}",
            f"{size[1]:,}",
            told,
        )
    return release


def load(folder: str, partial: bool) -> tuple[Listing, dict]:
    """Lists the images, and says what they are: (listing, {"release", "classes", "images", "empty",
    "unknown"}).

    Raises:
      UserError: there are no tars, or some are damaged.
      NegativeResult: it is no whole release, and not `partial`; or there is not one image of a
        known class.
    """
    folder, paths = find(folder)
    stamps = [storage.stamp(path) for path in paths]
    where = "\n".join([folder, *paths])
    arrays = index_cache.cached(
        "imagenet21k",
        where,
        lambda: scan(folder, paths),
        lambda found: np.array_equal(found["stamps"], stamps),
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
            f"{folder} has no image of a class of ImageNet-21k: give another folder as --from"
        )
    names, spans = index_cache.Strings.of(arrays, "names"), arrays["spans"]
    listing = tars.Members(
        tars=paths,
        tar_of=of_tar,
        spans=spans,
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
