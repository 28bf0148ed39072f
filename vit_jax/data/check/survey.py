"""Reads every image of a listing once, in threads, and keeps little of each: 100 bytes."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data import images
from vit_jax.data.check import examine
from vit_jax.data.prepare.shards import Progress
from vit_jax.data.sources.listing import Files
from vit_jax.data.sources.source import Source
from vit_jax.distributed import hardware

CHUNK = 64  # images that a thread examines at a time
FORMATS = tuple(examine.SUFFIXES)


@dataclasses.dataclass
class Survey:
    """Facts about the images `numbers` of a listing, an entry of each array for each of them."""

    numbers: np.ndarray  # int64
    format: np.ndarray  # position in FORMATS, int8; -1 if it is not known
    size: np.ndarray  # width and height, int32 [n, 2]
    orientation: np.ndarray  # uint8
    digest: np.ndarray  # uint64
    thumb: np.ndarray  # uint8 [n, 8, 9]
    has_thumb: np.ndarray  # bool
    faults: dict[str, list[tuple[int, str]]]  # kind -> (position, reason)
    other_suffix: list[int]  # positions of files with the suffix of another format

    @property
    def is_good(self) -> np.ndarray:
        """bool, of each image."""
        good = np.ones(len(self.numbers), bool)
        for found in self.faults.values():
            good[[position for position, _ in found]] = False
        return good


def blank(numbers: np.ndarray) -> Survey:
    count = len(numbers)
    return Survey(
        numbers=numbers,
        format=np.full(count, -1, np.int8),
        size=np.zeros((count, 2), np.int32),
        orientation=np.ones(count, np.uint8),
        digest=np.zeros(count, np.uint64),
        thumb=np.zeros((count, examine.SIDE, examine.SIDE + 1), np.uint8),
        has_thumb=np.zeros(count, bool),
        faults={},
        other_suffix=[],
    )


def enter(survey: Survey, position: int, facts: examine.Facts, path: str | None) -> None:
    """Adds what is known of one image; its `path` if it is a file."""
    survey.size[position] = facts.size
    survey.orientation[position] = facts.orientation
    survey.digest[position] = facts.digest
    if facts.format in FORMATS:
        survey.format[position] = FORMATS.index(facts.format)
        if path is not None and examine.has_other_suffix(path, facts.format):
            survey.other_suffix.append(position)
    if facts.thumb is not None:
        survey.thumb[position] = facts.thumb
        survey.has_thumb[position] = True
    if facts.fault:
        survey.faults.setdefault(facts.fault, []).append((position, facts.reason))


def read(source: Source, numbers: Sequence[int]) -> Survey:
    """Examines the images `numbers`."""
    threads = hardware.cores()
    most = images.most_pixels(threads)
    survey = blank(np.asarray(numbers, np.int64))
    progress = Progress(len(numbers))

    def work(chunk: np.ndarray) -> list[examine.Facts]:
        found = [examine.examine(source, i, most) for i in chunk.tolist()]
        progress.advance(len(chunk))
        return found

    chunks = [survey.numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK)]
    position = 0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for chunk, found in zip(chunks, pool.map(work, chunks), strict=True):
            for i, facts in zip(chunk.tolist(), found, strict=True):
                path = source.path(i) if isinstance(source, Files) else None
                enter(survey, position, facts, path)
                position += 1
    return survey
