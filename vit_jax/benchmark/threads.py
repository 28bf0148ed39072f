"""`vit_jax.benchmark data --threads=1,2,16`: whether the input pipeline scales with threads.

With more threads than cores, the core time per image shows what threads cost each other. What
limits a larger machine is work that only one thread does at a time: that of Python, under its lock.
"""

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence

from vit_jax.benchmark.core_time import WARMUP, measure
from vit_jax.benchmark.rows import row
from vit_jax.errors import UserError

COUNTS = re.compile(r"[1-9][0-9]{0,2}(,[1-9][0-9]{0,2})*")


def counts_of(args) -> list[int]:
    """[1, 2, 16] for --threads=1,2,16; [] without it."""
    if not args.threads:
        return []
    if not COUNTS.fullmatch(args.threads):
        raise UserError(
            f"--threads={args.threads} is not understood: write numbers from 1 to 999, such as "
            "1,2,16"
        )
    for name in ("topology", "against", "latency_ms", "alone"):
        if getattr(args, name):
            raise UserError(f"--threads measures only the host pipeline: leave out --{name}")
    return [int(part) for part in args.threads.split(",")]


class Timed:
    """A source that adds up the core time of reading its records: nearly all of the pipeline that
    is in Python. Some of it, in the libraries of formats, needs no lock.
    """

    def __init__(self, source):
        self.source = source
        self.spent = []  # seconds

    def __getattr__(self, name: str):
        return getattr(self.source, name)

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        start = time.thread_time()
        found = self.source.read(numbers)
        self.spent.append(time.thread_time() - start)
        return found


def measured(batches: Iterator, source: Timed, images: int, size: int) -> tuple:
    """(core-ms per image, images/s, core-ms per image in Python) of a running iterator."""
    source.spent.clear()
    start = time.thread_time()
    cost, speed = measure(batches, images, size)
    python = time.thread_time() - start + sum(source.spent)
    return cost, speed, 1e3 * python / (images // size * size)


def rows(config, host, counts: list[int], args) -> list[dict]:
    """Core time, speed and time in Python of the pipeline `host` by the number of threads, in
    alternating runs.
    """
    size = config.data.batch_size
    timed = {count: Timed(host.source) for count in counts}
    iterators = {
        count: dataclasses.replace(host, threads=count, source=source).batches()
        for count, source in timed.items()
    }
    for iterator in iterators.values():
        measure(iterator, WARMUP * size, size)
    found = {count: [] for count in timed}
    for _ in range(args.runs):
        for count, source in timed.items():
            found[count].append(measured(iterators[count], source, args.images, size))
    result = []
    for count, runs in found.items():
        cost, speed, python = zip(*runs, strict=True)
        result.append(row(f"host, {count} threads: all", "core-ms/image", cost))
        result.append(row(f"host, {count} threads: all", "images/s", speed))
        result.append(row(f"host, {count} threads: in Python", "core-ms/image", python))
    return result
