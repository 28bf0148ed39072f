"""Compiles the training step of a config for a topology, without devices and without data."""

import dataclasses
import math
import re
import time
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax import state as states
from vit_jax import train
from vit_jax.data import to_device
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.plan import topology
from vit_jax.plan.hlo import Program

GIB = 2**30
CONSTRAINT = re.compile(r"sdy\.sharding_constraint|@Sharding\(")


@dataclasses.dataclass(frozen=True)
class Job:
    """What a config would be on a pod: shapes and places alone."""

    config: Any
    chip: hardware.Tpu | None  # None: the devices at hand
    mesh: Mesh
    model: Any
    optimizer: Any
    num_examples: int
    total_steps: int
    state: Any  # of ShapeDtypeStructs with shardings
    batch: Any
    train_step: Any  # jitted

    @property
    def num_chips(self) -> int:
        return self.mesh.devices.size


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of it; without `program` where it found that memory does not suffice."""

    seconds: float
    sharding_constraints: int
    total_bytes: float  # of HBM per chip
    program: Program | None


def make_job(config, topology_name: str, num_slices: int) -> Job:
    """Everything that `train` does before it touches a device or the data.

    Raises:
      UserError: config and topology do not fit together.
    """
    chip, _ = topology.parse(topology_name)
    return on_devices(config, chip, topology.devices(topology_name, num_slices))


def remake(job: Job, config) -> Job:
    """The same pod with another config."""
    return on_devices(config, job.chip, job.mesh.devices.reshape(-1).tolist())


def on_devices(config, chip: hardware.Tpu | None, devices: list) -> Job:
    """What a config is on those devices, which may be described ones."""
    facts = catalog.declared(config)
    total_steps = train.plan_steps(config, facts.num_examples)
    mesh = meshes.make_mesh(config.mesh, sorted(devices, key=lambda device: device.id))
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    model = train.make_model(config, facts.num_classes)
    sharding.check_model(model, mesh)
    tx, schedule = train.make_optimizer(config, model, total_steps)
    with jax.set_mesh(mesh):
        state = states.abstract_state(config, model, tx, mesh)
    batch = to_device.abstract_batch(mesh, config.data.batch_size, config.image_size)
    train_step = train.make_train_step(config, mesh, model, tx, schedule, state)
    return Job(config, chip, mesh, model, tx, facts.num_examples, total_steps, state, batch, train_step)


def compile_job(job: Job) -> Compiled:
    """Runs the TPU compiler, which takes one to three minutes at full size."""
    start = time.perf_counter()
    with jax.set_mesh(job.mesh):
        lowered = job.train_step.lower(job.state, job.batch)
    constraints = len(CONSTRAINT.findall(lowered.as_text()))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return Compiled(time.perf_counter() - start, constraints, needed_bytes(error), None)
    return Compiled(time.perf_counter() - start, constraints, total_bytes(compiled), Program(compiled.as_text()))


def total_bytes(compiled) -> int:
    """Memory of one device while a compiled step runs: state, batch, and what it holds meanwhile."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return total + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def needed_bytes(error: Exception) -> float:
    """What the compiler says that a program takes for which memory does not suffice; any other error is raised."""
    text = str(error)
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", text) or re.search(
        r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", text
    )
    if "RESOURCE_EXHAUSTED" not in text or not found:
        raise error
    return float(found[1]) * 2 ** dict(K=10, M=20, G=30, T=40)[found[2]]


def shard_bytes(tree) -> int:
    """Bytes of a tree of ShapeDtypeStructs on one chip."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
