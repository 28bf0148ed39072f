"""Writes array_record shards of labelled images: with many threads, each shard atomically, always
the same bytes.
"""

import concurrent.futures
import contextlib
import datetime
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vit_jax.data.sources.source import Source
from vit_jax.errors import UserError

log = logging.getLogger("vit_jax.data.prepare")

# Each record can be read alone, as TFDS writes them. Compressing encoded images would take 0.1 ms
# each and save nothing.
OPTIONS = "group_size:1,uncompressed"
ORDER_SEED = 0
PROGRESS_SECONDS = 5.0


class Corrupt(Exception):
    """An image can't be decoded; the message says why."""


class Stopped(Exception):
    """Another shard has failed."""


def order(count: int) -> np.ndarray:
    """The fixed random order in which examples are written, int64 [count]."""
    return np.random.default_rng(ORDER_SEED).permutation(count)


def encode(features: Mapping[str, bytes | int | float]) -> bytes:
    """A serialized tf.train.Example; equal features give equal bytes."""
    import tensorflow as tf

    example = tf.train.Example()
    for key, value in features.items():
        feature = example.features.feature[key]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif isinstance(value, float):
            feature.float_list.value.append(value)
        else:
            feature.int64_list.value.append(value)
    return example.SerializeToString(deterministic=True)


class Reader:
    """Reads examples to be written.

    Args:
      transform: encoded image -> the bytes to write; raises Corrupt.
      skip_corrupt: whether corrupt images are skipped, instead of being an error.
    """

    def __init__(self, transform: Callable[[bytes], bytes], skip_corrupt: bool):
        self.transform = transform
        self.skip_corrupt = skip_corrupt

    def read(self, source: Source, i: int) -> tuple[bytes, int] | None:
        """(image, label), or None if the image is corrupt and skipped. Thread-safe."""
        try:
            image, label = source.example(i)
        except OSError as error:
            raise UserError(
                f"{source.describe(i)} can't be read ({error.strerror}): check the disk"
            ) from None
        try:
            return self.transform(image), label
        except Corrupt as error:
            if self.skip_corrupt:
                return None
            raise UserError(
                f"{source.describe(i)} can't be read as an image ({error}): remove or replace it, "
                "or skip such images with --config.data.on_corrupt=skip"
            ) from None


def write_json(path: pathlib.Path, value) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)


class Progress:
    """Logs a line every few seconds, from any of the workers."""

    def __init__(self, total: int):
        self.total = total
        self.done = 0
        self.fresh = 0  # written in this run
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
    """Writes a shard to `path` and syncs it to the disk; returns the number of records.

    Raises:
      OSError, RuntimeError: the disk is full or not writable.
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
    source: Source,
    reader: Reader,
    progress: Progress,
    stop: threading.Event,
) -> dict:
    """Writes the examples `numbers` unless the shard exists.

    Returns:
      {"examples": count, "skipped": names}.

    Raises:
      UserError: an image is corrupt.
      Stopped: another shard has failed.
    """
    summary = path.with_name(path.name + ".json")
    fresh = path.with_name(path.name + ".tmp")
    if path.exists():
        progress.advance(len(numbers), fresh=False)
        return json.loads(summary.read_text())
    skipped = []

    def records() -> Iterator[bytes]:
        for i in numbers.tolist():
            if stop.is_set():
                raise Stopped
            found = reader.read(source, i)
            if found is None:
                skipped.append(source.describe(i))
            else:
                image, label = found
                yield encode(dict(image=image, label=label))
            progress.advance(1)

    try:
        result = dict(examples=write_records(fresh, records()), skipped=skipped)
        write_json(summary, result)  # first, so that every finished shard has its summary
        fresh.replace(path)
        return result
    except BaseException:
        stop.set()
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def write_shards(
    splits: Mapping[str, Source],
    paths: Mapping[str, Sequence[pathlib.Path]],
    reader: Reader,
    workers: int,
) -> dict[str, list[dict]]:
    """Writes the shards that do not exist yet; the results of `write_shard`, by split.

    Uses threads, for Pillow, TensorFlow and the disk release Python's lock: of the 4 ms that
    re-encoding a photo of 500 x 375 takes, about 0.2 ms hold it, so about 16 cores are kept busy.
    """
    progress = Progress(sum(len(source) for source in splits.values()))
    stop = threading.Event()
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for split, source in splits.items():
                parts = np.array_split(order(len(source)), len(paths[split]))
                for path, part in zip(paths[split], parts, strict=True):
                    job = pool.submit(write_shard, path, part, source, reader, progress, stop)
                    jobs.append((split, job))
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
