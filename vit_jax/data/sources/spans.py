"""Records by their places in files: read in ranges, on a store several at once, and neighbours
together.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.storage import StoreError

# A gap between two records is read along with them if that takes less time than a request of its
# own: 30 ms at the 35 MB/s of one connection.
MAX_GAP = 1 << 20  # bytes
# A core decrypts and copies this much in about 0.1 ms, a tenth of what decoding an image takes.
GAP_BYTES_PER_RECORD = 1 << 17  # on average, at most
MAX_REQUEST = 1 << 23  # bytes, except for a single record that is longer


@dataclasses.dataclass
class Request:
    """A range of one file, and which records it contains."""

    file: int
    start: int
    stop: int
    records: list[int]


def joined(files: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Whether each record, sorted by place, is read together with the one before it, bool [n].

    The smallest gaps come first, until all of them have `GAP_BYTES_PER_RECORD`.
    """
    gaps = np.maximum(starts[1:] - stops[:-1], 0)
    order = np.argsort(gaps, kind="stable")
    order = order[(gaps[order] <= MAX_GAP) & (files[1:] == files[:-1])[order]]
    affordable = np.cumsum(gaps[order]) <= GAP_BYTES_PER_RECORD * len(files)
    found = np.zeros(len(files), bool)
    found[order[affordable] + 1] = True
    return found


def plan(files: np.ndarray, spans: np.ndarray) -> list[Request]:
    """The requests that read records.

    Args:
      files: which file each is in, int [n].
      spans: (position, length) of each, in bytes, int64 [n, 2].
    """
    order = np.lexsort((spans[:, 0], files))
    starts = spans[order, 0]
    stops = starts + spans[order, 1]
    together = joined(files[order], starts, stops).tolist()
    requests = []
    rows = zip(order.tolist(), files[order].tolist(), starts.tolist(), stops.tolist(), strict=True)
    for is_joined, (record, file, start, stop) in zip(together, rows, strict=True):
        if is_joined and stop - requests[-1].start <= MAX_REQUEST:
            requests[-1].stop = max(requests[-1].stop, stop)
            requests[-1].records.append(record)
        else:
            requests.append(Request(file, start, stop, [record]))
    return requests


@dataclasses.dataclass(frozen=True)
class Spans:
    """Where records are."""

    paths: Sequence[str]
    stamps: np.ndarray  # of the files when they were indexed, int64 [files, 2]
    files: np.ndarray  # which file each record is in, int [records]
    spans: np.ndarray  # (position, length) of each record in its file, bytes, int64 [records, 2]
    index: tuple[str, str]  # (kind, where) of `index_cache.cached`, which has these places

    def __len__(self) -> int:
        return len(self.files)

    @property
    def distant(self) -> bool:
        return storage.is_distant(self.paths[0])

    def changed_file(self) -> str | None:
        """A local file that is no longer the one that was indexed."""
        if self.distant:  # `check` sees it in every answer
            return None
        return storage.first_changed(self.paths, self.stamps)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        """The records `numbers`.

        Raises:
          StoreError: the store can't be read, or a file on it has changed.
        """
        if self.distant:
            return self.read_distant(np.asarray(numbers, np.int64))
        return [
            storage.read_range(self.paths[self.files[i]], *self.spans[i].tolist()) for i in numbers
        ]

    def read_distant(self, numbers: np.ndarray) -> list[bytes]:
        """Sends all requests, then takes the records from the answers."""
        spans = self.spans[numbers]
        pending = collections.deque(
            (request, storage.request(self.paths[request.file], request.start, request.stop))
            for request in plan(self.files[numbers], spans)
        )
        records = [b""] * len(numbers)
        while pending:
            request, wait = pending.popleft()
            content, stamp = wait()
            self.check(request.file, stamp)
            for i in request.records:
                position, length = spans[i].tolist()
                start = position - request.start
                records[i] = content[start : start + length]
        return records

    def check(self, file: int, stamp: tuple[int, int]) -> None:
        """Raises StoreError if a file is no longer the one that was indexed."""
        if tuple(self.stamps[file].tolist()) == stamp:
            return
        index_cache.forget(*self.index)
        raise StoreError(
            f"{self.paths[file]} has changed since it was indexed: start again, which makes a new "
            "index"
        )
