"""A model of memory and time without the compiler: good enough to rank settings and to say what
would make a job fit.

Its constants were fitted to what the TPU compiler said of L/16 with 64 images per chip, and checked
on B/16 and H/14.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models.ops import attention
from vit_jax.train.experiment import Job

# Bytes per token and layer that wait for the backward pass, as a multiple of the width; bf16
# activations. Scan without remat keeps what the compiler else computes again by itself.
KEPT = {
    ("none", False): 22,
    ("none", True): 115,
    ("dots", False): 20,
    ("dots", True): 24,
    ("names", False): 18,
}
KEPT |= {("names", True): 22, ("full", False): 2, ("full", True): 2}
# Bytes per token of the one layer that is being computed, again as a multiple of the width.
WORKING = 100
# Time relative to unrolled layers without remat, by the compiler's cycles.
SLOWER = {
    ("none", False): 1.0,
    ("none", True): 1.3,
    ("dots", False): 1.15,
    ("dots", True): 1.28,
    ("full", False): 1.33,
}
SLOWER |= {("names", False): 1.15, ("names", True): 1.3, ("full", True): 1.38}
UTILISATION = 0.53  # of unrolled layers without remat
PER_MICROBATCH = 0.01  # of the step, for each after the first


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A config on a pod, by shapes alone: made in no time, so that thousands can be compared."""

    config: Any
    chip: hardware.Tpu
    model: Any
    mesh: dict[str, int]
    leaves: tuple[
        tuple[str, tuple[int, ...], int], ...
    ]  # of the state: name, shape, bytes of an element

    @property
    def num_chips(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def batch_shards(self) -> int:
        return math.prod(self.mesh[axis] for axis in sharding.RULES["batch"])


@dataclasses.dataclass(frozen=True)
class Guess:
    bytes: float  # of HBM per chip
    ms: float  # of a step


def sketch(job: Job) -> Sketch:
    leaves = jax.tree_util.tree_flatten_with_path(job.state)[0]
    leaves = tuple(
        (sharding.path_name(path), leaf.shape, leaf.dtype.itemsize) for path, leaf in leaves
    )
    return Sketch(job.config, job.chip, job.model, dict(job.mesh.shape), leaves)


def resketch(one: Sketch, config) -> Sketch:
    """The same pod with another config.

    Raises:
      UserError: mesh, batch and model do not fit together.
    """
    shape, _ = meshes.mesh_sizes(config.mesh)
    fixed = math.prod(size for size in shape if size != -1)
    shape = [one.num_chips // fixed if size == -1 else size for size in shape]
    mesh = meshes.abstract_mesh(dict(zip(meshes.AXES, shape, strict=True)))
    if mesh.size != one.num_chips:
        raise UserError(f"a mesh of {mesh.size} does not fill {one.num_chips} chips")
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    sharding.check_model(one.model, mesh)
    return dataclasses.replace(one, config=config, mesh=dict(mesh.shape))


def state_bytes(one: Sketch) -> tuple[float, float]:
    """(state, gradients) in bytes per chip."""
    held_in = 2 if one.config.optim.momentum_dtype == "bfloat16" else 4
    return held_bytes(one.leaves, tuple(one.mesh.items()), one.config.mesh.zero, held_in)


@functools.lru_cache(1024)  # a search asks for the same few meshes again and again
def held_bytes(leaves, mesh_items, zero: bool, momentum_itemsize: int) -> tuple[float, float]:
    mesh: Mapping[str, int] = dict(mesh_items)
    total = gradients = 0.0
    for name, shape, itemsize in leaves:
        spec = sharding.leaf_spec(name, shape, mesh, zero)
        axes = [
            axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))
        ]
        itemsize = momentum_itemsize if "mu" in name.split("/") else itemsize
        size = math.prod(shape) * itemsize / math.prod(mesh[axis] for axis in axes)
        total += size
        gradients += size * name.startswith("params/")
    return total, gradients


def layer_bytes(one: Sketch) -> float:
    """Bytes per token and layer that wait for the backward pass."""
    model, settings = one.model, one.config.model
    itemsize = np.dtype(settings.dtype if settings.dtype != "bfloat16" else "float16").itemsize
    length = tokens_of(model)
    keeps_scores = (
        settings.remat == "none"
        and length <= attention.EINSUM_UP_TO
        and settings.attention in ("auto", "einsum")
    )
    scores = itemsize * model.num_heads * 128 * math.ceil(length / 128) if keeps_scores else 0
    return KEPT[settings.remat, settings.scan] * model.width * itemsize / 2 + scores


def tokens_of(model) -> int:
    return math.prod(model.grid) + model.num_prefix


def activation_bytes(one: Sketch) -> float:
    """Bytes per chip of activations at the height of a step."""
    model = one.model
    images = one.config.data.batch_size / one.config.accum_steps / one.batch_shards
    if not model.depth:  # a ResNet: its FLOPs stand for the size of its maps
        return images * model.flops / 60
    tokens = images * tokens_of(model)
    split = min(one.mesh["tensor"], 2)  # heads and MLP are split, the residual stream is not
    stem = images * 12e6 if model.stem_units else 0
    return tokens * (model.depth * layer_bytes(one) + WORKING * model.width) / split + stem


def communication_ms(one: Sketch) -> float:
    """Gradients in bf16 over everything, parameters twice over fsdp, two sums per block over
    tensor.
    """
    mesh, link = one.mesh, 2 * one.chip.link_bandwidth
    size = (
        2
        * sum(math.prod(shape) for name, shape, _ in one.leaves if name.startswith("params/"))
        / mesh["tensor"]
    )
    waits = 0.0
    if mesh["data"] * mesh["replica"] > 1:
        waits += 2 * size / mesh["fsdp"] / link
    if mesh["fsdp"] > 1:
        waits += 0.5 * 3 * size / link  # half of it hides behind computation
    if mesh["tensor"] > 1 and one.model.depth:
        tokens = one.config.data.batch_size / one.batch_shards * tokens_of(one.model)
        waits += 4 * one.model.depth * 2 * 2 * tokens * one.model.width / link
    return 1e3 * waits


def guess(one: Sketch) -> Guess:
    """Memory and time of a step by this model."""
    config, settings = one.config, (one.config.model.remat, one.config.model.scan)
    held, gradients = state_bytes(one)
    images = config.data.batch_size / one.batch_shards
    held += config.data.prefetch * images * 3 * config.image_size**2
    flops = 3 * one.model.flops * config.data.batch_size / one.num_chips
    precision = 1 if config.model.dtype == "bfloat16" else 2
    compute = 1e3 * flops * precision / one.chip.peak_flops / UTILISATION * SLOWER[settings]
    compute *= 1 + PER_MICROBATCH * (config.accum_steps - 1)
    # Gradients come as activations go; those of microbatches add to a sum that stays.
    held += gradients if config.accum_steps > 1 else 0
    return Guess(held + max(gradients, activation_bytes(one)), compute + communication_ms(one))
