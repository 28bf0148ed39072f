"""Array_record shards of labelled images: written by many threads, at once or not at all, always
the same bytes.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import pathlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vit_jax.errors import UserError

log = logging.getLogger("vit_jax.data.prepare")

# Each record can be read alone, as TFDS writes them; compressing images again would take 0.1 ms
# each, for nothing.
OPTIONS = "group_size:1,uncompressed"
ORDER_SEED = 0
PROGRESS_SECONDS = 5.0


class Corrupt(Exception):
    """An example is no readable image; the message says why."""


class Stopped(Exception):
    """Another shard has failed."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of a split. `read(i)` gives (encoded image, label) or raises Corrupt; many
    threads call it.
    """

    count: int
    read: Callable[[int], tuple[bytes, int]]
    describe: Callable[[int], str]
    fingerprint: str


def order(count: int) -> np.ndarray:
    """The fixed random order in which examples are written, int64 [count]."""
    return np.random.default_rng(ORDER_SEED).permutation(count)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def of_bytes(value: bytes) -> bytes:
    """A feature of a tf.train.Example, as `encode` takes it; likewise the next two."""
    return field(1, field(1, value))


def of_float(value: float) -> bytes:
    return field(2, field(1, struct.pack("<f", value)))


def of_int(value: int) -> bytes:
    return field(3, field(1, varint(value)))


def encode(features: Mapping[str, bytes]) -> bytes:
    """A tf.train.Example. By hand, as protocol buffers leave the order of a map open."""
    entries = (
        field(1, field(1, key.encode()) + field(2, feature)) for key, feature in features.items()
    )
    return field(1, b"".join(entries))


def refuse_or_skip(examples: Examples, i: int, error: Corrupt, skip_corrupt: bool) -> str:
    """The name of a corrupt example that is left out, or a UserError with it."""
    if not skip_corrupt:
        raise UserError(
            f"{examples.describe(i)} can't be read as an image ({error}): remove or replace it, or "
            "leave such images out with --config.data.on_corrupt=skip"
        )
    return examples.describe(i)


def write_json(path: pathlib.Path, value) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)


class Progress:
    """A line every few seconds, written by whichever worker is there then."""

    def __init__(self, total: int):
        self.total, self.done, self.fresh = total, 0, 0
        self.started = self.shown = time.monotonic()
        self.lock = threading.Lock()

    def advance(self, count: int, fresh: bool = True) -> None:
        with self.lock:
            self.done += count
            self.fresh += count if fresh else 0
            now = time.monotonic()
            if now - self.shown < PROGRESS_SECONDS or not self.fresh:
                return
            self.shown = now
            speed = self.fresh / (now - self.started)
            left = datetime.timedelta(seconds=round((self.total - self.done) / speed))
            log.info(
                "%s of %s images, %.0f images/s, ETA %s",
                f"{self.done:,}",
                f"{self.total:,}",
                speed,
                left,
            )


def write_records(path: pathlib.Path, records: Iterator[bytes]) -> int:
    """Writes a shard to `path`, and to the disk, before it returns the number of records.

    Raises:
      OSError, RuntimeError: the disk is full, or can't be written.
    """
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(str(path), OPTIONS)
    count = 0
    try:
        for record in records:
            writer.write(record)
            count += 1
    finally:
        writer.close()
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return count


def write_shard(
    path: pathlib.Path,
    numbers: np.ndarray,
    examples: Examples,
    skip_corrupt: bool,
    progress: Progress,
    stop: threading.Event,
) -> dict:
    """Writes the examples `numbers`, or finds that done: {"examples": count, "skipped": names}.

    Raises:
      UserError: one is corrupt, and not to be skipped.
      Stopped: another shard has failed.
    """
    note, fresh = path.with_name(path.name + ".json"), path.with_name(path.name + ".tmp")
    if path.exists():
        progress.advance(len(numbers), fresh=False)
        return json.loads(note.read_text())
    skipped = []

    def records() -> Iterator[bytes]:
        for i in numbers.tolist():
            if stop.is_set():
                raise Stopped
            try:
                image, label = examples.read(i)
                yield encode(dict(image=of_bytes(image), label=of_int(label)))
            except Corrupt as error:
                skipped.append(refuse_or_skip(examples, i, error, skip_corrupt))
            progress.advance(1)

    try:
        result = dict(examples=write_records(fresh, records()), skipped=skipped)
        write_json(note, result)  # before the shard: one that is there has its note
        fresh.replace(path)
        return result
    except BaseException:
        stop.set()
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def write_shards(
    splits: Mapping[str, Examples],
    paths: Mapping[str, Sequence[pathlib.Path]],
    skip_corrupt: bool,
    workers: int,
) -> dict[str, list[dict]]:
    """Writes the shards that are not there; what `write_shard` says of each, by split.

    Threads, as Pillow, TensorFlow and the disk work without Python's lock: of the 4 ms that
    re-encoding a photo of 500 x 375 takes, about 0.2 ms hold it, so some 16 cores are kept busy.
    """
    progress, stop = (
        Progress(sum(examples.count for examples in splits.values())),
        threading.Event(),
    )
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for split, examples in splits.items():
                parts = np.array_split(order(examples.count), len(paths[split]))
                for path, part in zip(paths[split], parts, strict=True):
                    arguments = (path, part, examples, skip_corrupt, progress, stop)
                    jobs.append((split, pool.submit(write_shard, *arguments)))
            concurrent.futures.wait(
                [job for _, job in jobs], return_when=concurrent.futures.FIRST_EXCEPTION
            )
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    failures = [job.exception() for _, job in jobs if not job.cancelled() and job.exception()]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, Stopped)):
        raise failure
    return {split: [job.result() for owner, job in jobs if owner == split] for split in splits}
