"""From the rows that this process read to global arrays on the mesh."""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.stage_times import Stages
from vit_jax.distributed import sharding


def global_batch(batch: dict, mesh: Mesh, rows: np.ndarray, batch_size: int) -> dict:
    """Builds arrays [batch_size, ...] sharded over the mesh from local arrays [len(rows), ...]."""
    place = sharding.batch_sharding(mesh)

    def build(local):
        def shard(index):
            start, stop, _ = index[0].indices(batch_size)
            first = np.searchsorted(rows, start)
            return local[first : first + stop - start]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), place, shard)

    return {name: build(local) for name, local in batch.items()}


def abstract_batch(mesh: Mesh, batch_size: int, image_size: int, set_size: int = 0) -> dict:
    """Shapes, dtypes and shardings of a global batch of training; images have sets of labels with a
    `set_size`.
    """
    label = (set_size,) if set_size else ()
    kinds = dict(
        image=((image_size, image_size, 3), np.uint8),
        label=(label, np.int32),
        mask=((), np.float32),
    )
    kinds["seed"] = (2,), np.int32
    place = sharding.batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=place)
        for name, (shape, dtype) in kinds.items()
    }


def to_device(
    batches: Iterable[dict],
    mesh: Mesh,
    rows: np.ndarray,
    batch_size: int,
    prefetch: int,
    stages: Stages | None = None,
) -> Iterator[dict]:
    """Yields global batches of `image`, `label`, `mask` and `seed`, `prefetch` of them on the
    device ahead of use.

    `stages` is told of the time that the transfer takes.
    """
    batches = iter(batches)
    ready = collections.deque()

    def fill(count: int) -> None:
        for batch in itertools.islice(batches, count):
            wanted = {name: batch[name] for name in ("image", "label", "mask", "seed")}
            with stages.time("transfer", len(rows)) if stages else contextlib.nullcontext():
                ready.append(global_batch(wanted, mesh, rows, batch_size))

    fill(prefetch)
    while ready:
        yield ready.popleft()
        fill(1)
