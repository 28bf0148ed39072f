"""The figures of a plan: memory by kind, step time as a range, communication, throughput, cost, and
the load on the hosts.
"""

import dataclasses
import math
import re

import jax

from vit_jax.data import shapes
from vit_jax.distributed import sharding
from vit_jax.models.ops import short_attention
from vit_jax.plan import collectives, cost_model, hlo, suggestions
from vit_jax.plan.compilation import GIB, Compiled, shard_bytes
from vit_jax.train.experiment import Experiment

CORE_MS_PER_IMAGE = 1.2  # of the host, with inception crops; docs/performance.md
# Of each further view of the same image: ten took 3.9 times as long as one, by `benchmark data`.
CORE_MS_PER_VIEW = 0.4
BYTES_PER_IMAGE = 110e3  # the mean size of ImageNet's JPEGs
# Of `short_attention`: matrix products of the size of the scores, and bundles for each register of
# scores (8 x 128) of a head of up to 64 channels, by the static schedules for v5e. Wider heads take
# more, about in proportion. v6e takes a third less; v4 and v5p, whose chips have two cores, half.
SHORT_FORWARD = (2, 5.6)
SHORT_BACKWARD = (5, 13.1)
NARROW_HEAD = 64
SPLASH_SHARE = 0.4  # of the peak that splash attention reaches by its static schedule
# What needs a compiled program; null if the step does not fit in memory.
PROGRAM_FIGURES = ("collectives", "step_ms", "mfu", "images_per_sec_per_chip", "total_steps")
PROGRAM_FIGURES += ("days", "chip_hours", "hosts", "host_cores", "host_cores_available")
PROGRAM_FIGURES += ("host_network_gbps",)


def compute_ms(program: hlo.Program, chip) -> tuple[float, float]:
    """(roofline, estimate): every instruction at the chip's limits, and by the compiler's own
    cycle counts.
    """
    roofline = cycles = 0.0
    for name, instruction, times in program.walk():
        cycles += times * instruction.cycles
        if collectives.kind_of(instruction) is None:
            flops = program.flops(name, instruction)
            moved = program.hbm_bytes(name, instruction)
            roofline += times * max(flops / chip.peak_flops, moved / chip.hbm_bandwidth)
    return 1e3 * roofline, 1e3 * cycles / chip.clock


def kernel_ms(program: hlo.Program, experiment: Experiment) -> tuple[float, float]:
    """(roofline, estimate) of the kernels of attention, which the compiler does not count."""
    calls = [
        (program.computations[name], call, times)
        for name, call, times in program.walk()
        if call.opcode == "custom-call" and '"tpu_custom_call"' in call.rest
    ]
    short = [call for call in calls if short_attention.NAME in call[1].rest]
    roofline, estimate = short_ms(short, experiment.chip)
    if len(short) < len(calls):
        of_splash = splash_ms(experiment)
        roofline += of_splash
        estimate += of_splash / SPLASH_SHARE
    return roofline, estimate


def short_ms(calls, chip) -> tuple[float, float]:
    """(roofline, estimate) of `short_attention`: matrix products of the size of the scores, and the
    bundles that the compiler schedules for each register of scores.
    """
    flops = bundles = 0.0
    for values, call, times in calls:
        shapes = [hlo.sizes(shape) for shape in hlo.operand_shapes(call, values)]
        (batch, length, embed), (_, other, _) = shapes[:2]
        kv = int(re.search(rf"{short_attention.NAME}(\d+)", call.rest)[1])
        heads = embed / kv * max(kv / NARROW_HEAD, 1)
        products, of_a_register = SHORT_FORWARD if len(shapes) == 3 else SHORT_BACKWARD
        registers = math.ceil(length / 8) * math.ceil(other / 128)
        flops += times * products * 2 * batch * length * other * embed
        bundles += times * of_a_register * batch * heads * registers
    return 1e3 * flops / chip.peak_flops, 1e3 * bundles / chip.clock


def splash_ms(experiment: Experiment) -> float:
    """Roofline of splash attention's kernels: 2 matrix products of the size of the scores in the
    forward pass, 5 in the backward pass, and 2 more under remat.
    """
    config = experiment.config
    shards = math.prod(experiment.mesh.shape[axis] for axis in sharding.RULES["batch"])
    products = 7 if config.model.remat in ("none", "names") else 9
    scores = sum(
        stack.depth * stack.length**2 * stack.width
        for stack in experiment.objective.stacks
        if cost_model.way_of_attention(config, stack, experiment.mesh.shape) == "splash"
    )
    images = config.data.batch_size / shards
    flops = products * 2 * images * scores / experiment.mesh.shape["tensor"]
    return 1e3 * flops / experiment.chip.peak_flops


def step_ms(
    program: hlo.Program, experiment: Experiment, messages: list[collectives.Collective]
) -> dict[str, float]:
    """Time of a step. Low: the chip's limits, and everything that may overlap does. High: the
    compiler's cycles, and nothing overlaps.
    """
    roofline, estimate = compute_ms(program, experiment.chip)
    kernel_roofline, kernel_estimate = kernel_ms(program, experiment)
    roofline += kernel_roofline
    estimate += kernel_estimate
    exposed = 1e3 * sum(c.seconds for c in messages if not c.overlapped)
    overlapped = 1e3 * sum(c.seconds for c in messages if c.overlapped)
    return dict(
        compute_roofline=roofline,
        compute_estimate=estimate,
        communication=exposed + overlapped,
        low=max(roofline, overlapped) + exposed,
        high=max(roofline, estimate) + overlapped + exposed,
    )


def hbm_gib(experiment: Experiment, compiled: Compiled) -> dict[str, float]:
    """GiB per chip by kind; `activations` is what remains: temporaries, gradients, padding."""
    prefetch = experiment.config.data.prefetch
    state = experiment.abstract_state
    params = shard_bytes(state.params)
    teacher = shard_bytes(state.teacher)
    opt_state = shard_bytes(state) - params - teacher
    batch = shard_bytes(experiment.abstract_batch)
    # The compiler counts one batch; the prefetched ones are on the chip, too.
    total = compiled.total_bytes + batch * (prefetch - 1)
    sizes = dict(
        params=params,
        opt_state=opt_state,
        activations=max(total - params - opt_state - teacher - batch * prefetch, 0),
        batch=batch * prefetch,
        total=total,
    )
    if teacher:
        sizes["teacher"] = teacher
    return {kind: size / GIB for kind, size in sizes.items()}


def bracket(step: dict[str, float], of_ms) -> dict[str, float]:
    """The range of a quantity that decreases with the time of a step."""
    return dict(low=of_ms(step["high"]), high=of_ms(step["low"]))


def core_ms(config) -> float:
    """Time of a host's core for an image and all of its views."""
    return CORE_MS_PER_IMAGE + CORE_MS_PER_VIEW * (shapes.num_views(config) - 1)


def speed(experiment: Experiment, step: dict[str, float]) -> dict:
    """Throughput, utilisation, cost of the recipe, and what the hosts must deliver."""
    config = experiment.config
    chips = experiment.num_chips
    batch = config.data.batch_size
    flops = experiment.objective.train_flops
    images = bracket(step, lambda ms: batch / ms * 1e3 / chips)
    days = {end: step[end] * experiment.total_steps / 864e5 for end in ("low", "high")}
    hosts = len({device.process_index for device in experiment.mesh.devices.flat})
    per_host = images["high"] * chips / hosts
    return dict(
        mfu=bracket(step, lambda ms: batch * flops / chips / experiment.chip.peak_flops / ms * 1e3),
        images_per_sec_per_chip=images,
        total_steps=experiment.total_steps,
        days=days,
        chip_hours={end: value * 24 * chips for end, value in days.items()},
        hosts=hosts,
        host_cores=per_host / config.data.repeats * core_ms(config) / 1e3,
        host_cores_available=experiment.chip.host_cores
        * chips
        // hosts
        // experiment.chip.host_chips,
        host_network_gbps=per_host / config.data.repeats * BYTES_PER_IMAGE * 8 / 1e9,
    )


def estimate(experiment: Experiment, compiled: Compiled, limit_gib: float) -> dict:
    """The JSON of a plan, without what the command line gives."""
    hbm = hbm_gib(experiment, compiled)
    fits = compiled.program is not None and hbm["total"] <= limit_gib
    suggested = []
    if not fits:
        suggested = suggestions.suggest(experiment, limit_gib, compiled.total_bytes)
    facts = dict(
        num_chips=experiment.num_chips,
        mesh={axis: int(size) for axis, size in experiment.mesh.shape.items()},
        fits=fits,
        hbm_limit_gib=limit_gib,
        hbm_gib=hbm,
        params=sum(leaf.size for leaf in jax.tree.leaves(experiment.abstract_state.params)),
        params_split=sharding.split_share(experiment.abstract_state.params, experiment.mesh),
        model_flops_per_image=experiment.objective.train_flops,
        sharding_constraints=compiled.sharding_constraints,
        compile_s=compiled.seconds,
        compile_cached=compiled.is_cached,
        suggestions=suggested,
    )
    if compiled.program is None:
        return facts | dict.fromkeys(PROGRAM_FIGURES)
    messages = collectives.collectives(compiled.program, experiment.mesh, experiment.chip)
    step = step_ms(compiled.program, experiment, messages)
    sent = [dataclasses.asdict(message) for message in messages]
    for message in sent:
        del message["seconds"]
    return facts | dict(collectives=sent, step_ms=step) | speed(experiment, step)
