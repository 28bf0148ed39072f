"""All parallelism: the mesh, the rules from logical to mesh axes, and where every parameter lives."""

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
}

# Logical axes of the parameters that tensor parallelism splits (arXiv 1909.08053 section 3), by the
# end of their path.
TENSOR_PARALLEL = (
    (r"(query|key|value)/kernel", ("embed", "heads", "kv")),
    (r"(query|key|value)/bias", ("heads", "kv")),
    (r"out/kernel", ("heads", "kv", "embed")),
    (r"Dense_0/kernel", ("embed", "mlp")),
    (r"Dense_0/bias", ("mlp",)),
    (r"Dense_1/kernel", ("mlp", "embed")),
)

# A shard along fsdp has a multiple of this many rows: with 5 or 20 of them (H/14 over 256 chips)
# the TPU compiler puts an all-reduce of zero-filled arrays in the place of every all-gather and
# reduce-scatter.
SHARD_ROWS = 8
# Below one tile of a TPU (8 x 128) a shard costs more to gather than it saves.
MIN_SHARD_ELEMENTS = 8 * 128


def spec(*axes: str | None) -> PartitionSpec:
    """Translates logical axes into a PartitionSpec; an unknown name raises ValueError."""
    for axis in axes:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}: known are {', '.join(RULES)}")
    return PartitionSpec(*(RULES[axis] if axis else None for axis in axes))


def constrain(x, *axes: str | None):
    """Pins the sharding of an activation to its logical axes; does nothing outside of
    `jax.set_mesh`.
    """
    wanted = spec(*axes)
    if len(axes) != x.ndim:
        raise ValueError(
            f"constrain needs one logical axis per dimension, got {axes} for shape {x.shape}"
        )
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, wanted)


def bernoulli(key, probability: float, shape: tuple[int, ...], *axes: str | None):
    """(booleans of logical `axes` that are true with a probability, that probability).

    Threefry gives the same ones on every mesh. XLA does not split the draws of other generators:
    each chip would make those of the whole batch. So there each device draws its own part, by a key
    of its own; and it draws bytes, which rounds the probability to 1/256: L/16 with dropout on
    v5e:8x8 takes 12.6 GiB per chip so, and 14.2 with floats.
    """
    mesh, wanted = jax.sharding.get_abstract_mesh(), spec(*axes)
    names = [
        name for part in wanted if part for name in ((part,) if isinstance(part, str) else part)
    ]
    if mesh.empty or "threefry" in str(jax.random.key_impl(key)):
        return jax.random.bernoulli(key, probability, shape), probability
    threshold = min(max(round(256 * probability), 1), 255)

    def split(part) -> int:
        return math.prod(
            mesh.shape[name] for name in ((part,) if isinstance(part, str) else part or ())
        )

    def draw(key):
        for name in names:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        parts = tuple(size // split(part) for size, part in zip(shape, wanted, strict=True))
        return jax.random.bits(key, parts, np.uint8) < threshold

    return jax.shard_map(draw, in_specs=PartitionSpec(), out_specs=wanted, check_vma=False)(
        key
    ), threshold / 256


def path_name(path) -> str:
    """ "Transformer/encoder_norm/scale" for a key path of `jax.tree_util`."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def shard_rows(name: str, shape: tuple[int, ...], taken: list, shards: int) -> int | None:
    """The axis of a leaf to split `shards` ways: the largest that is whole yet and gives shards of
    full rows, or None.

    Vectors (biases, gains) stay whole, and so does the axis of stacked layers, of which scan takes
    one at a time.
    """
    first = 1 if "encoderblock" in name.split("/") else 0
    size = math.prod(shape[first:]) // math.prod(taken)
    if shards == 1 or len(shape) - first < 2 or size // shards < MIN_SHARD_ELEMENTS:
        return None
    fits = [
        i
        for i in range(first, len(shape))
        if taken[i] == 1 and shape[i] % (SHARD_ROWS * shards) == 0
    ]
    return max(fits, key=lambda i: (shape[i], i), default=None)


def leaf_spec(
    name: str, shape: tuple[int, ...], mesh_shape: Mapping[str, int], zero: bool = False
) -> PartitionSpec:
    """Where one leaf of parameters or optimizer state lives.

    Tensor parallelism follows `TENSOR_PARALLEL`; fsdp then splits one axis more (`shard_rows`).
    With `zero` (ZeRO-1, arXiv 1910.02054 section 5.1) what the optimizer and the averaging hold is
    split over `data`, too.
    """
    axes: list = [None] * len(shape)
    for pattern, logical in TENSOR_PARALLEL:
        if (
            mesh_shape["tensor"] > 1
            and re.search(rf"(^|/){pattern}$", name)
            and len(shape) >= len(logical)
        ):
            first = len(shape) - len(logical)
            # Adafactor's moments have their parameter's path but not all of its axes: what does not
            # divide stays whole.
            divides = [size % mesh_shape["tensor"] == 0 for size in shape[first:]]
            axes[first:] = [
                axis if fits else None for axis, fits in zip(spec(*logical), divides, strict=True)
            ]
    taken = [mesh_shape["tensor"] if axis else 1 for axis in axes]
    is_held = zero and not name.startswith("params/")
    for split in (("fsdp", "data"), ("fsdp",)) if is_held else (("fsdp",),):
        row = shard_rows(name, shape, taken, math.prod(mesh_shape[axis] for axis in split))
        if row is not None:
            axes[row] = split if len(split) > 1 else split[0]
            break
    return PartitionSpec(*axes)


def param_specs(tree, mesh: Mesh, zero: bool = False):
    """NamedShardings for a tree of parameters or a whole TrainState, leaf by leaf from path and
    shape.

    `zero` takes effect on a whole state, whose parameters are below `params`.
    """

    def place(path, leaf):
        return NamedSharding(mesh, leaf_spec(path_name(path), leaf.shape, mesh.shape, zero))

    return jax.tree_util.tree_map_with_path(place, tree)


def split_share(params, mesh: Mesh) -> float:
    """The share of a tree of parameters, from 0 to 1, that no device holds as a whole."""
    leaves, placed = jax.tree.leaves(params), jax.tree.leaves(param_specs(params, mesh))
    split = sum(leaf.size for leaf, place in zip(leaves, placed, strict=True) if any(place.spec))
    return split / sum(leaf.size for leaf in leaves)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec("batch"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, accum_steps: int = 1) -> None:
    """Raises UserError when a batch, or a microbatch of it, does not divide evenly over the
    devices.
    """
    shards = math.prod(mesh.shape[axis] for axis in RULES["batch"])
    if batch_size // accum_steps % shards:
        microbatch = f" in {accum_steps} microbatches" if accum_steps > 1 else ""
        raise UserError(
            f"batch_size={batch_size}{microbatch} is not divisible by the {shards} devices along "
            f"{', '.join(RULES['batch'])}: use a multiple of {shards * accum_steps}"
        )


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Rows of the global batch that this process feeds, in ascending order.

    Where tensor parallelism spans processes, several processes feed the same rows: this is not
    batch_size divided by the number of processes.

    Raises:
      UserError: the batch does not divide evenly over the devices.
    """
    check_batch(mesh, batch_size)
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in slices]))


def check_model(model, mesh: Mesh) -> None:
    """Raises UserError when tensor parallelism does not divide the model."""
    tensor = mesh.shape["tensor"]
    for name, size in model.tensor_sizes.items():
        if size % tensor:
            raise UserError(
                f"config.mesh.tensor={tensor} does not divide the model's {name}={size}: use a "
                "divisor"
            )
