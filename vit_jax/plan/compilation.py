"""Compiles the training step of a config for a topology, without devices or data."""

import dataclasses
import math
import os
import re
import time
import zlib

import jax
import numpy as np

from vit_jax.data.sources import index_cache
from vit_jax.distributed import hardware
from vit_jax.errors import UserError, one_line
from vit_jax.plan import topology
from vit_jax.plan.hlo import Program
from vit_jax.train.experiment import Experiment, total_bytes

GIB = 2**30
CONSTRAINT = re.compile(r"sdy\.sharding_constraint|@Sharding\(")
VERSION = 1  # of what is saved of a compilation; raise it when that changes
VARIABLES = re.compile(r"(JAX|XLA|LIBTPU|TPU)_")  # environment variables that change a compilation


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of a compilation; `program` is None if the chip has too little memory for it."""

    seconds: float  # that tracing and compilation took
    sharding_constraints: int
    total_bytes: float  # of HBM per chip
    program: Program | None
    is_cached: bool = False


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
    """Compiles the step, or reads from the user's cache what the same compiler made of the same
    step before. The TPU compiler takes minutes for a full-size model.
    """
    start = time.perf_counter()
    with jax.set_mesh(experiment.mesh):
        lowered = experiment.train_step.lower(experiment.abstract_state, experiment.abstract_batch)
    text = lowered.as_text()
    path = index_cache.path_of("plan", identity(text, experiment.mesh))
    found = index_cache.read(path)
    is_cached = found is not None
    if not is_cached:
        found = compiled_arrays(lowered) | dict(seconds=np.array(time.perf_counter() - start))
        index_cache.write(path, found)
    program = zlib.decompress(found["program"].tobytes()).decode()
    return Compiled(
        seconds=float(found["seconds"]),
        sharding_constraints=len(CONSTRAINT.findall(text)),
        total_bytes=float(found["total_bytes"]),
        program=Program(program) if program else None,
        is_cached=is_cached,
    )


def identity(text: str, mesh: jax.sharding.Mesh) -> str:
    """All that decides what the compiler makes of a lowered step: the step, the compiler, its
    options and the devices.

    JAX's own cache of programs is of no use here: without a TPU it can't load what it has saved.
    """
    devices = mesh.devices.flatten().tolist()
    variables = {name: value for name, value in os.environ.items() if VARIABLES.match(name)}
    parts = dict(
        compiler=(jax.__version__, jax.lib.__version__, devices[0].client.platform_version),
        options=sorted(hardware.compiler_options(mesh).items()),
        variables=sorted(variables.items()),
        devices=(mesh.devices.shape, devices[0].device_kind, devices),
        version=VERSION,
    )
    return f"{parts}\n{text}"


def compiled_arrays(lowered) -> dict[str, np.ndarray]:
    """`total_bytes` of HBM per chip and the printed `program`, compressed; an empty one if the chip
    has too little memory for it.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        size, text = needed_bytes(error), ""
    else:
        size, text = total_bytes(compiled), text_of(compiled)
    program = np.frombuffer(zlib.compress(text.encode(), level=1), np.uint8)
    return dict(total_bytes=np.array(size), program=program)


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
