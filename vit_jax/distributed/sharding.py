"""Sharding rules: which axes of activations, parameters and batches are split along which axes of
the mesh.
"""

import math
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError

# Logical axis of an activation or parameter -> mesh axes. `batch` is split over all axes that do
# not split the model.
RULES = {
    "batch": ("replica", "data", "fsdp"),
    "length": None,
    "embed": None,
    "mlp": "tensor",
    "heads": "tensor",
    "kv": None,
    "layers": None,
    "classes": None,
    "prototypes": "tensor",
}

# Logical axes of the parameters that tensor parallelism splits (arXiv 1909.08053 section 3), by the
# end of their path.
TENSOR_PARALLEL = (
    (r"(query|key|value)/kernel", ("embed", "heads", "kv")),
    (r"(query|key|value)/bias", ("heads", "kv")),
    (r"out/kernel", ("heads", "kv", "embed")),
    (r"(Dense_0|gate)/kernel", ("embed", "mlp")),
    (r"(Dense_0|gate)/bias", ("mlp",)),
    (r"Dense_1/kernel", ("mlp", "embed")),
    (r"prototypes/kernel", ("embed", "prototypes")),
)

# A shard along fsdp has a multiple of this many rows: with 5 or 20 of them (H/14 over 256 chips)
# the TPU compiler replaces every all-gather and reduce-scatter by an all-reduce of zero-filled
# arrays.
SHARD_ROWS = 8
# Below one tile of a TPU (8 x 128) a shard costs more to gather than it saves.
MIN_SHARD_ELEMENTS = 8 * 128


def spec(*axes: str | None) -> PartitionSpec:
    """Translates logical axes into a PartitionSpec; an unknown name raises ValueError."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}: known are {', '.join(RULES)}")
    return PartitionSpec(*(RULES[axis] if axis else None for axis in axes))


def mesh_axes(part) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec, which is a tuple, a single axis or None."""
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else part


def constrain(x, *axes: str | None):
    """Pins the sharding of an activation to its logical axes; does nothing outside of
    `jax.set_mesh`.
    """
    sharding = spec(*axes)
    if len(axes) != x.ndim:
        raise ValueError(
            f"constrain needs one logical axis per dimension, got {axes} for shape {x.shape}"
        )
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


def path_name(path) -> str:
    """The name of a key path of `jax.tree_util`, such as "Transformer/encoder_norm/scale"."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def shard_rows(name: str, shape: tuple[int, ...], taken: list, shards: int) -> int | None:
    """The axis of a leaf to split `shards` ways, or None: the largest axis that is not split yet
    and gives shards of full rows.

    Vectors (biases, gains) are not split, nor is the axis of stacked layers, since scan takes one
    layer at a time.
    """
    first = 1 if "encoderblock" in name.split("/") else 0
    size = math.prod(shape[first:]) // math.prod(taken)
    if shards == 1 or len(shape) - first < 2 or size // shards < MIN_SHARD_ELEMENTS:
        return None
    fits = [
        axis
        for axis in range(first, len(shape))
        if taken[axis] == 1 and shape[axis] % (SHARD_ROWS * shards) == 0
    ]
    return max(fits, key=lambda axis: (shape[axis], axis), default=None)


def tensor_axes(name: str, shape: tuple[int, ...], shards: int) -> list[str | None]:
    """For each axis of a leaf, "tensor" if tensor parallelism splits it, else None."""
    axes: list[str | None] = [None] * len(shape)
    if shards == 1:
        return axes
    for pattern, logical in TENSOR_PARALLEL:
        first = len(shape) - len(logical)
        if first < 0 or not re.search(rf"(^|/){pattern}$", name):
            continue
        for i, axis in enumerate(spec(*logical), start=first):
            # Adafactor's moments have their parameter's path but not all of its axes.
            if shape[i] % shards == 0:
                axes[i] = axis
    return axes


def leaf_spec(
    name: str, shape: tuple[int, ...], mesh_shape: Mapping[str, int], zero: bool = False
) -> PartitionSpec:
    """How one leaf of parameters or optimizer state is split.

    Tensor parallelism follows `TENSOR_PARALLEL`; fsdp then splits one more axis (`shard_rows`).
    With `zero` (ZeRO-1, arXiv 1910.02054 section 5.1) the optimizer state and the averaged
    parameters are split over `data`, too, but not a teacher, which every step needs whole.
    """
    axes: list = tensor_axes(name, shape, mesh_shape["tensor"])
    taken = [mesh_shape["tensor"] if axis else 1 for axis in axes]
    splits: list = ["fsdp"]
    if zero and not name.startswith(("params/", "teacher/")):
        splits.insert(0, ("fsdp", "data"))
    for split in splits:
        shards = math.prod(mesh_shape[axis] for axis in mesh_axes(split))
        row = shard_rows(name, shape, taken, shards)
        if row is not None:
            axes[row] = split
            break
    return PartitionSpec(*axes)


def param_specs(tree, mesh: Mesh, zero: bool = False):
    """NamedShardings for a tree of parameters or a whole TrainState, from the path and shape of
    each leaf.

    `zero` takes effect on a whole state, whose parameters are below `params`.
    """

    def leaf_sharding(path, leaf):
        return NamedSharding(mesh, leaf_spec(path_name(path), leaf.shape, mesh.shape, zero))

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def split_share(params, mesh: Mesh) -> float:
    """The share of parameters, from 0 to 1, that is split over devices."""
    leaves = jax.tree.leaves(params)
    shardings = jax.tree.leaves(param_specs(params, mesh))
    pairs = zip(leaves, shardings, strict=True)
    split = sum(leaf.size for leaf, sharding in pairs if any(sharding.spec))
    return split / sum(leaf.size for leaf in leaves)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec("batch"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """How many parts a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, accum_steps: int = 1) -> None:
    """Raises UserError if a batch, or a microbatch of it, is not divisible by the devices."""
    shards = batch_shards(mesh)
    if batch_size // accum_steps % shards:
        microbatch = f" in {accum_steps} microbatches" if accum_steps > 1 else ""
        raise UserError(
            f"batch_size={batch_size}{microbatch} is not divisible by the {shards} devices along "
            f"{', '.join(RULES['batch'])}: use a multiple of {shards * accum_steps}"
        )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Rows of the global batch that this process feeds, in ascending order.

    If tensor parallelism spans processes, several of them feed the same rows: the number is not
    batch_size divided by the number of processes.
    """
    check_batch(mesh, batch_size)
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def check_model(model, mesh: Mesh) -> None:
    """Raises UserError if tensor parallelism does not divide the model."""
    tensor = mesh.shape["tensor"]
    for name, size in model.tensor_sizes.items():
        if size % tensor:
            raise UserError(
                f"config.mesh.tensor={tensor} does not divide the model's {name}={size}: use a "
                "divisor"
            )
