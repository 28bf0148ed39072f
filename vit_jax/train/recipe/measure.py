"""What a training step costs on this device: memory, to choose microbatches, and seconds."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from vit_jax.data.sources import catalog
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import messages, sharding
from vit_jax.errors import NegativeResult, memory_problem
from vit_jax.train import run_data
from vit_jax.train.experiment import Experiment, total_bytes
from vit_jax.train.timer import timed

ENOUGH_S = 4.0  # of steps that are timed
MOST_STEPS = 22  # likewise, with those before
FIRST = 1  # steps that are not counted: they wait for the first images
BACKWARD = 2.0  # the backward pass takes twice as long as the forward pass


@dataclasses.dataclass(frozen=True)
class Measured:
    """A training step of a config that fits the memory; seconds are those of process 0."""

    step_s: float  # seconds of a step, with its images
    eval_s: float  # seconds to evaluate one image
    compile_s: float
    accum_steps: int
    step_bytes: int  # on each device


def measure(config, source, start: Mapping, limit: int | None) -> Measured:
    """Compiles the step, with as many microbatches as the memory needs, and times it on the images
    of `source`.

    Args:
      start: fields of the model of the weights.
      limit: bytes that a step may take on each device; None: unknown.

    Raises:
      NegativeResult: it does not fit with one image on each device.
    """
    mesh = meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        compiled, experiment, compile_s = compile_to_fit(config, source, start, limit, mesh)
        step_s = seconds_of_step(compiled, experiment, source)
    forward = 1.0 if config.optim.frozen else 1.0 / (1.0 + BACKWARD)
    measured = Measured(
        step_s=step_s,
        eval_s=forward * step_s / config.data.batch_size,
        compile_s=compile_s,
        accum_steps=experiment.config.accum_steps,
        step_bytes=total_bytes(compiled),
    )
    return of_process_0(measured)


def of_process_0(measured: Measured) -> Measured:
    """What process 0 has measured: all processes must choose the same by it."""
    text = json.dumps(dataclasses.asdict(measured))
    texts = messages.all_gather("the measurement of the step", text, messages.PATIENCE_S)
    return Measured(**json.loads(texts[0]))


def compile_to_fit(config, source, start: Mapping, limit: int | None, mesh):
    """(compiled step, its experiment, seconds of compilation)."""
    facts = catalog.found(config, source)
    shards = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
    while True:
        experiment = Experiment.build(config, facts, mesh, start=start)
        compiled, compile_s = timed(try_to_compile, experiment)
        used = total_bytes(compiled) if compiled else None
        if fits_everywhere(used, limit):
            return compiled, experiment, compile_s
        accum_steps = more_microbatches(config.accum_steps, config.data.batch_size // shards)
        if accum_steps is None:
            gib = f" ({used / 2**30:.1f} of {limit / 2**30:.1f} GiB)" if used and limit else ""
            raise NegativeResult(
                f"a step with one image at a time does not fit into the memory{gib}: choose "
                "smaller weights, or a lower --config.image_size"
            )
        config = with_microbatches(config, accum_steps)


def more_microbatches(accum_steps: int, rows: int) -> int | None:
    """The next number of microbatches to try: at least twice as many, and a divisor of the `rows`
    of a batch on each device. None if a microbatch has one row already.
    """
    numbers = range(2 * accum_steps, rows + 1)
    return next((number for number in numbers if rows % number == 0), None)


def try_to_compile(experiment: Experiment):
    """The compiled step; None if the compiler says that it does not fit."""
    try:
        lowered = experiment.train_step.lower(experiment.abstract_state, experiment.abstract_batch)
        return lowered.compile()
    except Exception as error:
        if memory_problem(error) is None:
            raise
        return None


def fits_everywhere(used: int | None, limit: int | None) -> bool:
    """Whether a step fits on the devices of all processes, which compile the same one next."""
    fits = used is not None and (limit is None or used <= limit)
    answers = messages.all_gather("the choice of microbatches", str(fits), messages.PATIENCE_S)
    return all(answer == str(True) for answer in answers)


def with_microbatches(config, accum_steps: int):
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.accum_steps = accum_steps
    return config.lock()


def seconds_of_step(compiled, experiment: Experiment, source) -> float:
    """Seconds of a step on real images, with parameters of zero."""
    from vit_jax.data import pipeline

    config = experiment.config
    rows = sharding.local_rows(experiment.mesh, config.data.batch_size)
    host = pipeline.train_pipeline(config, source, rows, MOST_STEPS)
    batches = run_data.device_batches(experiment, host, 0)
    state = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), experiment.abstract_state
    )
    ends = []
    for batch in batches:
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        ends.append(time.perf_counter())
        if len(ends) > FIRST and ends[-1] - ends[FIRST - 1] > ENOUGH_S:
            break
    counted = ends[FIRST - 1 :]
    return (counted[-1] - counted[0]) / (len(counted) - 1)
