"""The shards of a data set that TFDS has prepared: their index, and which records a split names."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.spans import Spans


class Shards:
    """Complete shards with their index, made by `scan(paths, counts)` -> arrays, which include
    `stamps` and `counts`.
    """

    def __init__(self, kind: str, instructions: Sequence, scan: Callable):
        """
        Args:
          kind: of the index.
          instructions: of TFDS, with filename, skip, take and examples_in_shard.
        """
        self.paths = [os.fspath(part.filename) for part in instructions]
        self.counts = [part.examples_in_shard for part in instructions]
        self.index = kind, "\n".join(self.paths)
        self.arrays = index_cache.cached(
            *self.index, lambda: scan(self.paths, self.counts), self.is_current
        )
        starts = np.cumsum([0, *self.counts[:-1]])
        chosen = [
            np.arange(start + part.skip, start + part.skip + part.take)
            for start, part in zip(starts, instructions, strict=True)
        ]
        self.numbers = np.concatenate(chosen)  # of the records that the split names, int64 [n]

    def is_current(self, arrays) -> bool:
        same = np.array_equal(arrays["counts"], self.counts)
        return same and storage.are_unchanged(self.paths, arrays["stamps"])

    def files(self, counts: Sequence[int]) -> np.ndarray:
        """The shard that each of the parts is in, int32, if shards have so many parts."""
        return np.repeat(np.arange(len(self.paths), dtype=np.int32), counts)

    def spans(self, files: np.ndarray, spans: np.ndarray) -> Spans:
        """Places in the shards; see `Spans`."""
        return Spans(self.paths, self.arrays["stamps"], files, spans, self.index)
