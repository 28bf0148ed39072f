"""array_record files on a store: an index of their chunks, then a range for each record.

The library has a client of its own for stores, with one request at a time in each thread. Formats:
https://github.com/google/riegeli, doc/riegeli_records_file_format.md;
https://github.com/google/array_record, cpp/layout.proto. The hashes of the content are not checked:
that takes 10 ms per image in Python.
"""

import concurrent.futures
from collections.abc import Sequence

import numpy as np

from vit_jax.data.sources import storage
from vit_jax.data.sources.shards import Shards
from vit_jax.errors import UserError

BLOCK = 1 << 16  # bytes; each begins with a header, which may interrupt a chunk
BLOCK_HEADER = 24
CHUNK_HEADER = 40
MAGIC = 0x71930E704FDAE05E  # in the postscript, which is the last block
SIMPLE_CHUNK = ord("r")
UNCOMPRESSED = 0
ZSTD = ord("z")
READERS = 64  # shards indexed at a time


class Damaged(ValueError):
    """The bytes are not what the format says."""


class Unsupported(ValueError):
    """The library reads this file, but this reader does not. TFDS and `vit_jax.data prepare` write
    none such.
    """


def without_block_headers(raw: bytes, position: int) -> bytes:
    """The content of the bytes that are at `position` of the file."""
    first = -position % BLOCK
    if first >= len(raw):
        return raw
    starts = range(first + BLOCK_HEADER, len(raw), BLOCK)
    pieces = [raw[start : start + BLOCK - BLOCK_HEADER] for start in starts]
    return b"".join([raw[:first], *pieces])


def varints(content: bytes | memoryview) -> np.ndarray:
    """The numbers that `content` is a sequence of, as int64; up to 63 bits each."""
    found = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(found < 128)
    if not len(ends):
        return np.zeros(0, np.int64)
    found = found[: ends[-1] + 1]
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    shifts = 7 * (np.arange(len(found)) - np.repeat(starts, lengths))
    return np.add.reduceat((found & 127).astype(np.int64) << np.minimum(shifts, 63), starts)


def varint(content: bytes | memoryview, position: int) -> tuple[int, int]:
    """(the number at `position`, the position after it)."""
    number = 0
    for shift in range(0, 64, 7):
        byte = content[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
    raise Damaged("a number is longer than 64 bits")


def decompressed(compression: int, content: memoryview) -> bytes | memoryview:
    if compression == UNCOMPRESSED:
        return content
    if compression != ZSTD:
        name = {ord("b"): "Brotli", ord("s"): "Snappy"}.get(compression, compression)
        raise Unsupported(f"the compression {name}")
    import zstandard

    size, start = varint(content, 0)
    if not size:
        return b""
    try:
        return zstandard.ZstdDecompressor().decompress(content[start:], max_output_size=size)
    except zstandard.ZstdError as error:
        raise Damaged(str(error)) from None


def chunk_records(raw: bytes, position: int) -> list[bytes]:
    """The records of the chunk that begins at `position` of the file, in the bytes from there on.

    Raises:
      Damaged, Unsupported
    """
    try:
        return parse_chunk(without_block_headers(raw, position))
    except IndexError:
        raise Damaged("it ends too early") from None


def parse_chunk(chunk: bytes) -> list[bytes]:
    """Header: three uint64 (a hash, the size of the data, a hash), type uint8, number of records in
    7 bytes, size of all records uint64. Data: compression uint8, size of the sizes, sizes, records.
    """
    data_size = int.from_bytes(chunk[8:16], "little")
    count = int.from_bytes(chunk[25:32], "little")
    total = int.from_bytes(chunk[32:40], "little")
    data = memoryview(chunk)[CHUNK_HEADER : CHUNK_HEADER + data_size]
    if len(data) != data_size:
        raise Damaged("it ends too early")
    if chunk[24] != SIMPLE_CHUNK:
        raise Damaged(f"a chunk has the type {chunk[24]}")
    compression = data[0]
    sizes_size, start = varint(data, 1)
    content = decompressed(compression, data[start + sizes_size :])
    if len(content) != total:
        raise Damaged(f"it has {len(content)} bytes instead of {total}")
    if count == 1:
        return [bytes(content)]
    sizes = varints(decompressed(compression, data[start : start + sizes_size]))
    if len(sizes) != count or sizes.sum() != total:
        raise Damaged("the sizes of its records do not add up")
    ends = np.cumsum(sizes).tolist()
    spans = zip(ends, sizes.tolist(), strict=True)
    return [bytes(content[end - size : end]) for end, size in spans]


def footer(path: str) -> tuple[np.ndarray, int]:
    """(position and number of records of each chunk, int64 [chunks, 2]; the end of the last one).

    The postscript is a record with the fields footer_offset and magic. The footer is a record of
    metadata, then one for each chunk, with its position, size, and number of records.
    """
    # It begins with a block header, wherever it is.
    postscript = varints(chunk_records(storage.read_end(path, -BLOCK), 0)[0]).tolist()
    if postscript[::2] != [8, 16] or postscript[3] != MAGIC:
        raise Damaged("its last block is not that of array_record")
    end = postscript[1]
    metadata, *chunks = chunk_records(storage.read_end(path, end), end)
    if b"transpose:true" in metadata:  # the options of the writer
        raise Unsupported("transposed chunks")
    rows = varints(b"".join(chunks)).reshape(-1, 6)
    if (rows[:, ::2] != (8, 16, 24)).any():
        raise Damaged("its footer has unknown fields")
    return rows[:, [1, 5]], end


def index_of(path: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """((position, length) of each chunk, int64 [chunks, 2]; its number of records) of a shard that
    has `count` records.
    """
    try:
        chunks, end = footer(path)
    except Unsupported as error:
        raise UserError(
            f"{path} has {error}, which can be read from a local disk only: copy the data set to "
            "one, or prepare it again"
        ) from None
    except (Damaged, ValueError, IndexError) as error:
        raise UserError(
            f"{path} is damaged or not an array_record file ({error}): prepare the data set again"
        ) from None
    if chunks[:, 1].sum() != count:
        raise UserError(
            f"{path} has {chunks[:, 1].sum()} records, but the data set has {count} there: prepare "
            "it again"
        )
    lengths = np.diff(chunks[:, 0], append=end)
    return np.stack([chunks[:, 0], lengths], axis=1), chunks[:, 1]


def scan(paths: list[str], counts: list[int]) -> dict[str, np.ndarray]:
    """The index of complete shards, with two requests for each."""
    # Read first, so that a change during the scan is noticed.
    stamps = storage.stamps(paths)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(index_of, paths, counts))
    return dict(
        stamps=stamps,
        counts=np.asarray(counts, np.int64),
        chunks=np.asarray([len(spans) for spans, _ in found], np.int64),
        spans=np.concatenate([spans for spans, _ in found]),
        records=np.concatenate([records for _, records in found]),
    )


class Records:
    """The records of a split, by number."""

    def __init__(self, instructions):
        """`instructions`: see `Shards`."""
        shards = Shards("array_record", instructions, scan)
        arrays = shards.arrays
        self.chunks = shards.spans(shards.files(arrays["chunks"]), arrays["spans"])
        self.firsts = np.cumsum(arrays["records"]) - arrays["records"]  # record of each chunk
        self.numbers = shards.numbers

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        records = self.numbers[np.asarray(numbers, np.int64)]
        wanted = np.searchsorted(self.firsts, records, side="right") - 1
        chunks, place = np.unique(wanted, return_inverse=True)
        decoded = [
            chunk_records(raw, position)
            for raw, position in zip(
                self.chunks.read(chunks), self.chunks.spans[chunks, 0].tolist(), strict=True
            )
        ]
        within = (records - self.firsts[wanted]).tolist()
        return [decoded[chunk][i] for chunk, i in zip(place.tolist(), within, strict=True)]
