"""From the rows that this process has read to global arrays on the mesh.

The last stage of the pipeline; augment/ continues on the device.
"""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.shapes import Shapes
from vit_jax.data.stage_times import StageTimes
from vit_jax.distributed import sharding


def global_batch(batch: dict, mesh: Mesh, rows: np.ndarray, batch_size: int) -> dict:
    """Builds arrays [batch_size, ...] sharded over the mesh from local arrays [len(rows), ...]."""
    placement = sharding.batch_sharding(mesh)

    def build(local):
        def shard(index):
            start, stop, _ = index[0].indices(batch_size)
            first = np.searchsorted(rows, start)
            return local[first : first + stop - start]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), placement, shard)

    return {name: build(local) for name, local in batch.items()}


def abstract_batch(mesh: Mesh, batch_size: int, shapes: Shapes, set_size: int = 0) -> dict:
    """Shapes, dtypes and shardings of a global batch of training.

    Args:
      shapes: of an example's images.
      set_size: the most labels that an image may have, if it may have several.
    """
    placement = sharding.batch_sharding(mesh)
    label_shape = (set_size,) if set_size else ()

    def abstract(shape, dtype):
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=placement)

    return {name: abstract(shape, np.uint8) for name, shape in shapes.items()} | dict(
        label=abstract(label_shape, np.int32),
        mask=abstract((), np.float32),
        seed=abstract((2,), np.int32),
    )


def for_device(batch: dict) -> dict:
    """A batch of the pipeline without what only the host needs."""
    return {name: values for name, values in batch.items() if name != "id"}


def to_device(
    batches: Iterable[dict],
    mesh: Mesh,
    rows: np.ndarray,
    batch_size: int,
    prefetch: int,
    stages: StageTimes | None = None,
) -> Iterator[dict]:
    """Yields global batches of images, `label`, `mask` and `seed`.

    Args:
      batches: of this process, with `rows` of the global batch.
      prefetch: number of batches on the device ahead of use.
      stages: receives the time of the transfer.
    """
    batches = iter(batches)
    ready = collections.deque()

    def fill(count: int) -> None:
        for batch in itertools.islice(batches, count):
            local = for_device(batch)
            with stages.time("transfer", len(rows)) if stages else contextlib.nullcontext():
                ready.append(global_batch(local, mesh, rows, batch_size))

    fill(prefetch)
    while ready:
        yield ready.popleft()
        fill(1)
