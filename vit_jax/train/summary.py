"""What a run will be, in a few lines: `--dry_run` prints it, and every run logs its head."""

import jax

from vit_jax.data.sources import catalog
from vit_jax.distributed import sharding
from vit_jax.weights import scan_layout


def schedule_line(config, schedule, total_steps: int) -> str:
    """The learning rate at the turning points of the schedule."""
    turns = {
        0,
        config.warmup_steps,
        total_steps // 2,
        total_steps - config.cooldown_steps,
        total_steps,
    }
    marks = sorted(mark for mark in turns if 0 <= mark <= total_steps)
    return ", ".join(f"{mark}: {float(schedule(mark)):.3g}" for mark in marks)


def head(config, model, params, facts, total_steps: int, schedule, mesh) -> list[str]:
    """Parameters, FLOPs, data, schedule, mesh.

    Args:
      params: ShapeDtypeStructs of the parameters.
      facts: number of examples and classes of the training data.
    """
    batch, examples = config.data.batch_size, facts.num_examples
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    forward = model.flops
    run = 3 * forward * batch * total_steps
    name = catalog.data_name(config.data)
    microbatches = f" in {config.accum_steps} microbatches" if config.accum_steps > 1 else ""
    return [
        f"model       {config.model.variant}, {count:,} parameters, {model.grid[0]} x "
        f"{model.grid[1]} patches of {model.cell[0]} x {model.cell[1]} pixels, {model.num_classes} "
        "classes",
        f"FLOPs       {forward / 1e9:.2f} G forward, {3 * forward / 1e9:.2f} G training per image; "
        f"{run:.3g} in all",
        f"data        {name}, {examples:,} examples, batch {batch}{microbatches}, "
        f"{config.data.prefetch} of {batch * 3 * config.image_size**2 / 2**20:,.1f} MiB ready on "
        "the devices",
        f"schedule    {total_steps:,} steps = {total_steps * batch / examples:.1f} epochs, "
        f"{config.optim.name}, {config.optim.schedule}; learning rate by step "
        f"{schedule_line(config.optim, schedule, total_steps)}",
        "mesh        "
        f"{', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())}{', ZeRO' * config.mesh.zero}; "
        f"{sharding.split_share(params, mesh):.0%} of the parameters are split over devices",
    ]


def sharding_lines(params, mesh) -> list[str]:
    """Where the parameters live: one line for each that is split."""
    specs = {
        name: leaf.spec
        for name, leaf in scan_layout.flatten(sharding.param_specs(params, mesh)).items()
    }
    split = {name: spec for name, spec in specs.items() if any(spec)}
    lines = [
        f"shardings   {len(split)} of {len(specs)} parameters are split over devices, the others "
        "replicated"
    ]
    return lines + [f"  {name:<76} {spec}" for name, spec in split.items()]
