"""Local files that are read as if they were on a store, by the code that reads stores: for
measurements of what a latency costs.
"""

import concurrent.futures
import time

from vit_jax.data.sources import storage


class Simulated:
    """Reads local files as if each request took `latency` seconds, `connections` at a time."""

    def __init__(self, latency: float, connections: int):
        self.latency = latency
        self.requests = 0
        self.pool = concurrent.futures.ThreadPoolExecutor(connections)

    def request(self, path: str, start: int, stop: int) -> storage.Wait:
        self.requests += 1
        return self.pool.submit(self.answer, path, start, stop).result

    def answer(self, path: str, start: int, stop: int) -> tuple[bytes, tuple[int, int]]:
        time.sleep(self.latency)
        return storage.read_range(path, start, stop - start), storage.stamp(path)


def simulate(latency: float, connections: int) -> Simulated:
    """From now on this process reads local records as it would those on a store."""
    storage.simulated = Simulated(latency, connections)
    return storage.simulated
