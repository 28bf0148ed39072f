"""Core time and memory of this process, and what a running iterator of batches takes of them."""

import pathlib
import re
import resource
import time
from collections.abc import Iterator

WARMUP = 4  # batches that are not counted: files are cached and threads started


def core_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mib() -> float:
    """Peak resident memory of this program. (Linux's ru_maxrss starts at that of the parent.)"""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(batches: Iterator, images: int, batch_size: int) -> tuple[float, float]:
    """(core-ms per image, images/s) of a running iterator."""
    count = max(images // batch_size, 1)
    cpu_start = core_seconds()
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    cpu = core_seconds() - cpu_start
    wall = time.perf_counter() - start
    return 1e3 * cpu / (count * batch_size), count * batch_size / wall
