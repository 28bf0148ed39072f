"""Compiles the training step of a config for a topology, without devices or data."""

import dataclasses
import math
import re
import time

import jax

from vit_jax.errors import UserError, one_line
from vit_jax.plan import topology
from vit_jax.plan.hlo import Program
from vit_jax.train.experiment import Experiment, total_bytes

GIB = 2**30
CONSTRAINT = re.compile(r"sdy\.sharding_constraint|@Sharding\(")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of a compilation; `program` is None if the chip has too little memory for it."""

    seconds: float
    sharding_constraints: int
    total_bytes: float  # of HBM per chip
    program: Program | None


def on_topology(config, topology_name: str, num_slices: int) -> Experiment:
    """Everything that `train` does before it uses a device or the data."""
    chip, _ = topology.parse(topology_name)
    devices = topology.devices(topology_name, num_slices)
    return Experiment.on_devices(config, devices, chip)


def remake(experiment: Experiment, config) -> Experiment:
    """The same pod with another config."""
    return Experiment.on_devices(
        config, experiment.mesh.devices.flatten().tolist(), experiment.chip
    )


def compile_step(experiment: Experiment) -> Compiled:
    """Runs the TPU compiler, which takes one to three minutes for a full-size model."""
    start = time.perf_counter()
    with jax.set_mesh(experiment.mesh):
        lowered = experiment.train_step.lower(experiment.abstract_state, experiment.abstract_batch)
    constraints = len(CONSTRAINT.findall(lowered.as_text()))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return Compiled(time.perf_counter() - start, constraints, needed_bytes(error), None)
    seconds = time.perf_counter() - start
    return Compiled(seconds, constraints, total_bytes(compiled), Program(text_of(compiled)))


def text_of(compiled) -> str:
    """The program that the compiler made; a UserError if it can't print it, which is its fault."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        gib = total_bytes(compiled) / GIB
        raise UserError(
            f"the step compiles for this chip, with {gib:.1f} GiB, but the compiler can't print it "
            f"for a plan ({one_line(error)[:160]}): plan another --topology or --config.mesh"
        ) from error


def needed_bytes(error: Exception) -> float:
    """Bytes that a program needs, read from the compiler's out-of-memory error. Any other error is
    raised.
    """
    text = str(error)
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", text) or re.search(
        r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", text
    )
    if "RESOURCE_EXHAUSTED" not in text or not found:
        raise error
    return float(found[1]) * 2 ** dict(K=10, M=20, G=30, T=40)[found[2]]


def shard_bytes(tree) -> int:
    """Bytes of a tree of ShapeDtypeStructs on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
