"""What a run will be, in a few lines: `--dry_run` prints it, and every run logs its head."""

import jax

from vit_jax.config import is_own
from vit_jax.data import shapes
from vit_jax.data.sources import catalog
from vit_jax.distributed import sharding
from vit_jax.errors import printable
from vit_jax.weights import adapt, scan_layout


def schedule_text(config, schedule, total_steps: int) -> str:
    """The learning rate at the turning points of the schedule."""
    cooldown = total_steps - config.cooldown_steps
    turns = {0, config.warmup_steps, total_steps // 2, cooldown, total_steps}
    marks = sorted(mark for mark in turns if 0 <= mark <= total_steps)
    rate = jax.jit(schedule)  # one program instead of one per operation
    return ", ".join(f"{mark}: {float(rate(mark)):.3g}" for mark in marks)


def model_line(experiment, params) -> str:
    model = experiment.model
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    patches = ""
    if not is_own(model.architecture):  # whose patches are not known
        patches = (
            f"{model.grid[0]} x {model.grid[1]} patches of {model.cell[0]} x {model.cell[1]} "
            "pixels, "
        )
    classes = f"{model.num_classes or 'no'} classes"
    return (
        f"model       {experiment.config.model.variant}, {count:,} parameters, {patches}{classes}"
    )


def flops_line(experiment) -> str:
    forward = experiment.model.flops
    training = experiment.objective.train_flops
    run = training * experiment.config.data.batch_size * experiment.total_steps
    return (
        f"FLOPs       {forward / 1e9:.2f} G forward, {training / 1e9:.2f} G training per image; "
        f"{run:.3g} in all"
    )


def data_line(experiment) -> str:
    config = experiment.config
    batch = config.data.batch_size
    microbatches = f" in {config.accum_steps} microbatches" if config.accum_steps > 1 else ""
    mib = batch * shapes.num_bytes(shapes.of_training(config)) / 2**20
    name = catalog.data_name(config.data)
    return (
        f"data        {name}, {experiment.facts.num_examples:,} examples, batch {batch}"
        f"{microbatches}, {config.data.prefetch} of {mib:,.1f} MiB ready on the devices"
    )


def schedule_line(experiment) -> str:
    optim = experiment.config.optim
    total = experiment.total_steps
    epochs = total * experiment.config.data.batch_size / experiment.facts.num_examples
    return (
        f"schedule    {total:,} steps = {epochs:.1f} epochs, {optim.name}, {optim.schedule}; "
        f"learning rate by step {schedule_text(optim, experiment.schedule, total)}"
    )


def mesh_line(experiment, params) -> str:
    mesh = experiment.mesh
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    zero = ", ZeRO" if experiment.config.mesh.zero else ""
    share = sharding.split_share(params, mesh)
    return f"mesh        {sizes}{zero}; {share:.0%} of the parameters are split over devices"


def teacher_lines(experiment) -> list[str]:
    """The teacher of a distillation, if there is one."""
    if experiment.teacher is None:
        return []
    settings = experiment.config.distill
    model = experiment.teacher.model
    count = sum(leaf.size for leaf in jax.tree.leaves(experiment.abstract_state.teacher))
    height, width = model.image_size
    name = settings.teacher or settings.teacher_variant
    return [
        f"teacher     {name}, {count:,} parameters, images of {height} x {width} pixels, "
        f"{model.flops / 1e9:.2f} G forward, teacher_every={settings.teacher_every}"
    ]


def head(experiment, params) -> list[str]:
    """Parameters, FLOPs, data, schedule, mesh; `params`: ShapeDtypeStructs."""
    return [
        model_line(experiment, params),
        *teacher_lines(experiment),
        flops_line(experiment),
        data_line(experiment),
        schedule_line(experiment),
        mesh_line(experiment, params),
    ]


def sharding_lines(params, mesh) -> list[str]:
    """Where the parameters live: one line for each that is split."""
    placed = scan_layout.flatten(sharding.param_specs(params, mesh))
    split = {name: leaf.spec for name, leaf in placed.items() if any(leaf.spec)}
    first = (
        f"shardings   {len(split)} of {len(placed)} parameters are split over devices, the others "
        "replicated"
    )
    return [first, *(f"  {name:<76} {spec}" for name, spec in split.items())]


def show(experiment) -> None:
    """Prints what a run would be, with the parameters of each layer apart."""
    params = adapt.abstract_params(experiment.model.with_scan(False))
    lines = head(experiment, params) + sharding_lines(params, experiment.mesh)
    print(printable("\n".join(lines)))
