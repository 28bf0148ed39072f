"""A model of memory and time without the compiler: good enough to rank settings and to suggest what
would make a experiment fit.

Its constants were fitted to the TPU compiler's figures for L/16 with 64 images per chip, and
checked on B/16, H/14 and a masked autoencoder of L/16.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.data import shapes
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier
from vit_jax.models.ops import attention
from vit_jax.train.experiment import Experiment
from vit_jax.train.objectives.objective import Objective, Stack

# (remat, scan) -> bytes per token and layer that are saved for the backward pass, as a multiple of
# the width, for bf16 activations. Scan without remat saves values that the compiler would otherwise
# recompute by itself.
SAVED = {
    ("none", False): 17,
    ("none", True): 115,
    ("names", False): 18,
    ("names", True): 22,
    ("dots", False): 17,
    ("dots", True): 24,
    ("full", False): 2,
    ("full", True): 2,
}
# Query, key, value and the attended values, unless attention is short: TPUs pad their heads, which
# takes as much more without remat, and a head narrower than those of L/16 takes as much as theirs.
PADDING = 5
BY_HEAD = 8
HEAD_WIDTH = 64
# Bytes per token of the one layer that is being computed, again as a multiple of the width.
WORKING = 100
# (remat, scan) -> time relative to unrolled layers without remat, by the compiler's cycles.
SLOWDOWN = {
    ("none", False): 1.0,
    ("none", True): 1.3,
    ("names", False): 1.26,
    ("names", True): 1.3,
    ("dots", False): 1.13,
    ("dots", True): 1.28,
    ("full", False): 1.33,
    ("full", True): 1.38,
}
# Of unrolled layers without remat: with short attention, and without.
UTILISATION = {True: 0.72, False: 0.53}
PER_MICROBATCH = 0.01  # share of the step's time, for each after the first


@dataclasses.dataclass(frozen=True)
class Sketch:
    """A config on a pod, by shapes alone: so cheap to make that thousands can be compared."""

    config: Any
    chip: hardware.Tpu
    objective: Objective
    mesh: dict[str, int]
    # Of the state: name, shape, bytes per element.
    leaves: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def model(self) -> Classifier:
        return self.objective.model

    @property
    def num_chips(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def batch_shards(self) -> int:
        return math.prod(self.mesh[axis] for axis in sharding.RULES["batch"])


@dataclasses.dataclass(frozen=True)
class Guess:
    bytes: float  # of HBM per chip
    ms: float  # per step


def sketch(experiment: Experiment) -> Sketch:
    paths, _ = jax.tree_util.tree_flatten_with_path(experiment.abstract_state)
    leaves = [(sharding.path_name(path), leaf.shape, leaf.dtype.itemsize) for path, leaf in paths]
    return Sketch(
        experiment.config,
        experiment.chip,
        experiment.objective,
        dict(experiment.mesh.shape),
        tuple(leaves),
    )


def resketch(one: Sketch, config) -> Sketch:
    """The same pod with another config.

    Raises:
      UserError: mesh, batch and model do not match.
    """
    shape, _ = meshes.mesh_sizes(config.mesh)
    fixed = math.prod(size for size in shape if size != -1)
    shape = [one.num_chips // fixed if size == -1 else size for size in shape]
    mesh = meshes.abstract_mesh(dict(zip(meshes.AXES, shape, strict=True)))
    if mesh.size != one.num_chips:
        raise UserError(f"a mesh of {mesh.size} does not fill {one.num_chips} chips")
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    sharding.check_model(one.objective, mesh)
    return dataclasses.replace(one, config=config, mesh=dict(mesh.shape))


def state_bytes(one: Sketch) -> tuple[float, float]:
    """(state, gradients) in bytes per chip."""
    momentum_itemsize = jnp.dtype(one.config.optim.momentum_dtype).itemsize
    mesh_items = tuple(one.mesh.items())
    return sharded_bytes(one.leaves, mesh_items, one.config.mesh.zero, momentum_itemsize)


@functools.lru_cache(1024)  # a search asks for the same few meshes again and again
def sharded_bytes(leaves, mesh_items, zero: bool, momentum_itemsize: int) -> tuple[float, float]:
    mesh: Mapping[str, int] = dict(mesh_items)
    total = gradients = 0.0
    for name, shape, itemsize in leaves:
        if "mu" in name.split("/"):
            itemsize = momentum_itemsize
        spec = sharding.leaf_spec(name, shape, mesh, zero)
        size = math.prod(shape) * itemsize / num_shards(spec, mesh)
        total += size
        if name.startswith("params/"):
            gradients += size
    return total, gradients


def num_shards(spec, mesh: Mapping[str, int]) -> int:
    """The number of parts that a partition spec divides an array into."""
    axes = [part if isinstance(part, tuple) else (part,) for part in spec if part]
    return math.prod(mesh[axis] for group in axes for axis in group)


def way_of_attention(config, stack: Stack, mesh: Mapping[str, int]) -> str:
    """The way in which a TPU computes attention in a stack, "" if it has none."""
    if not stack.num_heads:
        return ""
    if config.model.posemb == "relative":
        return "einsum"
    heads = stack.num_heads
    if heads % mesh["tensor"] == 0:
        heads //= mesh["tensor"]
    shape = (1, stack.length, heads, stack.width // stack.num_heads)
    x = jax.ShapeDtypeStruct(shape, config.model.dtype)
    return attention.choose(config.model.attention, x, x, "tpu")


def layer_bytes(one: Sketch, stack: Stack) -> float:
    """Bytes per token and layer that are saved for the backward pass."""
    settings = one.config.model
    itemsize = jnp.dtype(settings.dtype).itemsize
    way = way_of_attention(one.config, stack, one.mesh)
    multiple = SAVED[settings.remat, settings.scan and stack.may_scan]
    scores = 0
    if way not in ("", "short") and settings.remat != "full":
        multiple += BY_HEAD * max(HEAD_WIDTH * stack.num_heads / stack.width - 1, 0)
    if way not in ("", "short") and settings.remat == "none":
        multiple += PADDING
    if way == "einsum" and settings.remat == "none":
        scores = itemsize * stack.num_heads * 128 * math.ceil(stack.length / 128)
    return multiple * stack.width * itemsize / 2 + scores


def rows_of(stack: Stack) -> float:
    """Rows of an image's tokens in memory, whose tiles of bf16 have 16 rows. The constants, fitted
    to 197 tokens, contain their padding to 208.
    """
    return 16 * math.ceil(stack.length / 16) * 197 / 208


def activation_bytes(one: Sketch) -> float:
    """Bytes per chip of activations at the peak of a step."""
    model = one.model
    images = one.config.data.batch_size / one.config.accum_steps / one.batch_shards
    stacks = one.objective.stacks
    if not stacks:  # a ResNet: its FLOPs approximate the size of its feature maps
        return images * model.flops / 60
    saved = sum(rows_of(stack) * stack.depth * layer_bytes(one, stack) for stack in stacks)
    working = max(WORKING * rows_of(stack) * stack.width for stack in stacks)
    split = min(one.mesh["tensor"], 2)  # heads and MLP are split, the residual stream is not
    stem = images * 12e6 if model.stem_units else 0
    return images * (saved + working) / split + stem


def communication_ms(one: Sketch) -> float:
    """Gradients in bf16 over everything, parameters twice over fsdp, two sums per block over
    tensor.
    """
    mesh = one.mesh
    link = 2 * one.chip.link_bandwidth
    params = sum(math.prod(shape) for name, shape, _ in one.leaves if name.startswith("params/"))
    size = 2 * params / mesh["tensor"]
    waits = 0.0
    if mesh["data"] * mesh["replica"] > 1:
        waits += 2 * size / mesh["fsdp"] / link
    if mesh["fsdp"] > 1:
        waits += 0.5 * 3 * size / link  # half of it overlaps with computation
    if mesh["tensor"] > 1:
        images = one.config.data.batch_size / one.batch_shards
        sent = sum(stack.depth * stack.length * stack.width for stack in one.objective.stacks)
        waits += 4 * 2 * 2 * images * sent / link
    return 1e3 * waits


def guess(one: Sketch) -> Guess:
    """Memory and time of a step by this model."""
    config = one.config
    images = config.data.batch_size / one.batch_shards
    memory, gradients = state_bytes(one)
    memory += config.data.prefetch * images * shapes.num_bytes(shapes.of_training(config))
    if config.accum_steps > 1:  # the sum over microbatches stays in memory
        memory += gradients
    # Activations are freed while gradients are computed.
    memory += max(gradients, activation_bytes(one))

    flops = one.objective.train_flops * config.data.batch_size / one.num_chips
    precision = 1 if config.model.dtype == "bfloat16" else 2
    slowdown = SLOWDOWN[config.model.remat, config.model.scan]
    ways = {way_of_attention(config, stack, one.mesh) for stack in one.objective.stacks}
    slowdown /= UTILISATION[ways == {"short"}]
    compute = 1e3 * flops * precision / one.chip.peak_flops * slowdown
    compute *= 1 + PER_MICROBATCH * (config.accum_steps - 1)
    return Guess(memory, compute + communication_ms(one))
