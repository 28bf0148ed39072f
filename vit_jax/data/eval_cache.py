"""Decoded evaluation images in host memory: batches that fit into a budget are decoded only once.

Stands between pipeline.py and to_device.py.
"""

from collections.abc import Callable, Iterator

from vit_jax.data import shapes
from vit_jax.data.pipeline import Pipeline


class EvalCache:
    """The memory for all evaluations of a run, first come, first served."""

    def __init__(self, gib: float):
        self.bytes_left = gib * 2**30

    def batches(self, host: Pipeline) -> Callable[[], Iterator[dict]]:
        """f() that yields the batches of a pipeline from the start; those that don't fit are read
        and decoded again each time.
        """
        size = host.steps * host.rows * (shapes.num_bytes(host.shapes) + 32)
        if size > self.bytes_left:
            return host.batches
        self.bytes_left -= size
        cached: list[dict] = []

        def batches() -> Iterator[dict]:
            if len(cached) == host.steps:
                yield from cached
                return
            decoded = []
            for batch in host.batches():
                decoded.append(batch)
                yield batch
            cached[:] = decoded  # only after a complete pass

        return batches
