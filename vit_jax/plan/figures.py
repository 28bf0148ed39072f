"""The figures of a plan: memory by kind, time as a bracket, communication, throughput, cost, and
feeding the chips.
"""

import dataclasses
import math

import jax

from vit_jax.distributed import sharding
from vit_jax.plan import collectives, hlo, suggestions
from vit_jax.plan.compilation import GIB, Compiled, shard_bytes
from vit_jax.train.experiment import Job

# Core time of the host for an image by kind of crop, from docs/performance.md, and the mean size of
# ImageNet's JPEGs.
CORE_MS_PER_IMAGE = 1.2
BYTES_PER_IMAGE = 110e3


def compute_ms(program: hlo.Program, chip) -> tuple[float, float]:
    """(roofline, estimate): every instruction at the chip's limits, and by the compiler's own count
    of cycles.
    """
    roofline = cycles = 0.0
    for name, instruction, times in program.walk():
        cycles += times * instruction.cycles
        if collectives.kind_of(instruction) is None:
            flops, moved = program.flops(name, instruction), program.hbm_bytes(name, instruction)
            roofline += times * max(flops / chip.peak_flops, moved / chip.hbm_bandwidth)
    return 1e3 * roofline, 1e3 * cycles / chip.clock


def kernel_ms(program: hlo.Program, job: Job) -> tuple[float, float]:
    """(roofline, estimate) of splash attention, of whose kernels the compiler counts nothing: 2
    matrix products of scores forward, 5 backward, and 2 again under remat; by their static schedule
    they reach 40 % of the peak."""
    if not any(
        i.opcode == "custom-call" and '"tpu_custom_call"' in i.rest for _, i, _ in program.walk()
    ):
        return 0.0, 0.0
    model, shards = job.model, math.prod(job.mesh.shape[axis] for axis in sharding.RULES["batch"])
    products = 7 if job.config.model.remat in ("none", "names") else 9
    tokens = math.prod(model.grid) + model.num_prefix
    images = job.config.data.batch_size / shards
    flops = model.depth * products * 2 * images * tokens**2 * model.width / job.mesh.shape["tensor"]
    return 1e3 * flops / job.chip.peak_flops, 1e3 * flops / job.chip.peak_flops / 0.4


def step_ms(
    program: hlo.Program, job: Job, messages: list[collectives.Collective]
) -> dict[str, float]:
    """Time of a step. Low: the chip's limits, and all that may overlap does; high: the compiler's
    cycles, and nothing overlaps."""
    parts = compute_ms(program, job.chip), kernel_ms(program, job)
    roofline, estimate = (sum(ends) for ends in zip(*parts, strict=True))
    waiting = 1e3 * sum(c.seconds for c in messages if not c.overlapped)
    behind = 1e3 * sum(c.seconds for c in messages if c.overlapped)
    low, high = max(roofline, behind) + waiting, max(roofline, estimate) + behind + waiting
    return dict(
        compute_roofline=roofline,
        compute_estimate=estimate,
        communication=waiting + behind,
        low=low,
        high=high,
    )


def hbm_gib(job: Job, compiled: Compiled) -> dict[str, float]:
    """GiB per chip by kind; `activations` is what remains: temporaries, gradients, padding."""
    state, held = job.state, {}
    held["params"] = shard_bytes(state.params)
    held["opt_state"] = shard_bytes(state) - held["params"]
    held["batch"] = shard_bytes(job.batch) * job.config.data.prefetch
    # The compiler counts one batch; the others wait on the chip, too.
    total = compiled.total_bytes + shard_bytes(job.batch) * (job.config.data.prefetch - 1)
    held["activations"] = max(total - sum(held.values()), 0)
    return {
        kind: held[kind] / GIB for kind in ("params", "opt_state", "activations", "batch")
    } | dict(total=total / GIB)


def bracket(step: dict[str, float], of_ms) -> dict[str, float]:
    """A quantity that falls with the time of a step, at both ends of the bracket."""
    return dict(low=of_ms(step["high"]), high=of_ms(step["low"]))


def speed(job: Job, step: dict[str, float]) -> dict:
    """Throughput, utilisation, cost of the recipe, and what the hosts must deliver."""
    config, chips, flops = job.config, job.num_chips, 3 * job.model.flops
    batch = config.data.batch_size
    images = bracket(step, lambda ms: batch / ms * 1e3 / chips)
    days = dict(
        low=step["low"] * job.total_steps / 864e5, high=step["high"] * job.total_steps / 864e5
    )
    hosts = len({device.process_index for device in job.mesh.devices.flat})
    per_host = images["high"] * chips / hosts
    return dict(
        mfu=bracket(step, lambda ms: batch * flops / chips / job.chip.peak_flops / ms * 1e3),
        images_per_sec_per_chip=images,
        total_steps=job.total_steps,
        days=days,
        chip_hours={end: value * 24 * chips for end, value in days.items()},
        hosts=hosts,
        host_cores=per_host / config.data.repeats * CORE_MS_PER_IMAGE / 1e3,
        host_cores_available=job.chip.host_cores * chips // hosts // job.chip.host_chips,
        host_network_gbps=per_host / config.data.repeats * BYTES_PER_IMAGE * 8 / 1e9,
    )


def estimate(job: Job, compiled: Compiled, limit_gib: float) -> dict:
    """The JSON of a plan, but for what the command line said. What needs a program is null where
    there is none.
    """
    hbm = hbm_gib(job, compiled)
    fits = compiled.program is not None and hbm["total"] <= limit_gib
    facts = dict(
        num_chips=job.num_chips,
        mesh={axis: int(size) for axis, size in job.mesh.shape.items()},
        fits=fits,
        hbm_limit_gib=limit_gib,
        hbm_gib=hbm,
        params=sum(leaf.size for leaf in jax.tree.leaves(job.state.params)),
        params_split=sharding.split_share(job.state.params, job.mesh),
        model_flops_per_image=3 * job.model.flops,
        sharding_constraints=compiled.sharding_constraints,
        compile_s=compiled.seconds,
        suggestions=[] if fits else suggestions.suggest(job, limit_gib, compiled.total_bytes),
    )
    if compiled.program is None:
        names = "collectives step_ms mfu images_per_sec_per_chip total_steps days chip_hours hosts host_cores "
        names += "host_cores_available host_network_gbps"
        return facts | dict.fromkeys(names.split())
    messages = collectives.collectives(compiled.program, job.mesh, job.chip)
    step = step_ms(compiled.program, job, messages)
    sent = [{k: v for k, v in dataclasses.asdict(c).items() if k != "seconds"} for c in messages]
    return facts | dict(collectives=sent, step_ms=step) | speed(job, step)
