"""Which steps of a run are in the files that wandb keeps of it (run-ID.wandb): protobuf messages in
LevelDB's log format, that is, in blocks of 32 KiB, of which the first begins with 7 bytes of
wandb's. https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import pathlib
import struct
import zlib
from collections.abc import Iterator

BLOCK = 32_768
MAGIC = b":W&B"
FILE_HEADER = 7
PART = struct.Struct("<IHB")  # checksum, length, kind of a part of a record
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def parts(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """(kind, content) of all complete parts of records, of which the last may be cut off.

    Raises:
      ValueError: the file is damaged, or of another format.
    """
    with path.open("rb") as file:
        start = FILE_HEADER
        while block := file.read(BLOCK):
            if start and not block.startswith(MAGIC):
                raise ValueError(f"{path} does not begin like a file of wandb")
            while start + PART.size <= len(block):
                checksum, length, kind = PART.unpack_from(block, start)
                start += PART.size + length
                if not FULL <= kind <= LAST or start > len(block):
                    return
                content = block[start - length : start]
                if zlib.crc32(bytes([kind]) + content) != checksum:
                    raise ValueError(f"{path} has a record with a wrong checksum")
                yield kind, content
            start = 0


def records(path: pathlib.Path) -> Iterator[bytes]:
    """All complete records; raises what `parts` does."""
    content = b""
    for kind, part in parts(path):
        content = part if kind in (FULL, FIRST) else content + part
        if kind in (FULL, LAST):
            yield content


def steps(path: pathlib.Path) -> Iterator[int]:
    """The steps in a file."""
    from wandb.proto import wandb_internal_pb2

    for content in records(path):
        record = wandb_internal_pb2.Record.FromString(content)
        for item in record.history.item:
            if "_step" in (item.key, *item.nested_key):
                yield int(item.value_json)


def last_step(folder: pathlib.Path, run_id: str, but: pathlib.Path) -> int | None:
    """The last step of a run in wandb's folder, -1 if it has none; `but`: the sub-folder of this
    start. None if there is no file of an earlier start, or one that can't be read.
    """
    files = [path for path in folder.glob(f"*run-*-*/run-{run_id}.wandb") if path.parent != but]
    if not files:
        return None
    try:
        return max((step for path in files for step in steps(path)), default=-1)
    except Exception:  # a version of wandb whose files are different
        return None
