"""Random access to the records of TFRecord shards, by an index of their positions that is built
once.
"""

import concurrent.futures
import struct
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import storage
from vit_jax.data.sources.shards import Shards
from vit_jax.errors import UserError

READERS = 16  # shards indexed at a time; on a store all of their bytes are read


def offsets(path: str, count: int) -> np.ndarray:
    """(position, length) of the first `count` payloads of a TFRecord file: [count, 2] int64.

    Layout: length uint64, its checksum uint32, payload, checksum uint32.
    """
    found = np.empty((count, 2), np.int64)
    position = 0
    size = storage.size(path)
    with storage.open_file(path) as file:
        for i in range(count):
            file.seek(position)
            header = file.read(12)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size
            if position + length + 16 > size:
                raise UserError(
                    f"{path} ends after {i} of {count} records: the data set is damaged, prepare "
                    "it again"
                )
            found[i] = position + 12, length
            position += 16 + length
    return found


def scan(paths: list[str], counts: list[int]) -> dict[str, np.ndarray]:
    """The index of complete shards."""
    # Read first, so that a change during the scan is noticed.
    stamps = storage.stamps(paths)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        rows = list(pool.map(offsets, paths, counts))
    return dict(stamps=stamps, counts=np.asarray(counts, np.int64), rows=np.concatenate(rows))


class Records:
    """The records of a split, by number."""

    def __init__(self, instructions):
        """`instructions`: see `Shards`."""
        shards = Shards("tfrecord", instructions, scan)
        files = shards.files(shards.counts)[shards.numbers]
        self.spans = shards.spans(files, shards.arrays["rows"][shards.numbers])

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        return self.spans.read(numbers)
