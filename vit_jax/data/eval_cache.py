"""Evaluation images, decoded once: batches that fit into a budget of host memory are kept after the
first pass.
"""

from collections.abc import Callable, Iterator

from vit_jax.data.pipeline import Pipeline


class EvalCache:
    """The budget of all evaluations of a run, first come, first served."""

    def __init__(self, gib: float):
        self.left = gib * 2**30

    def batches(self, host: Pipeline) -> Callable[[], Iterator[dict]]:
        """f() that yields the batches of a pipeline from the start, and reads and decodes them
        again only where they do not fit."""
        size = host.steps * host.rows * (3 * host.size**2 + 32)
        if size > self.left:
            return host.batches
        self.left -= size
        kept: list[dict] = []

        def batches() -> Iterator[dict]:
            if len(kept) == host.steps:
                yield from kept
                return
            found = []
            for batch in host.batches():
                found.append(batch)
                yield batch
            kept[:] = found

        return batches
