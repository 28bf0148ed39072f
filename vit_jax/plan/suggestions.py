"""What would make a job fit, by the model of `analysis`."""

import copy
import math

from vit_jax.errors import UserError
from vit_jax.plan import cost_model
from vit_jax.plan.compilation import GIB
from vit_jax.train.experiment import Job

MARGIN = 0.95  # of the memory, for what the model does not see


def changed(config, settings: dict):
    """A copy of a config with other values: {"model.remat": "full"}."""
    config = copy.deepcopy(config)
    with config.unlocked():
        config.update_from_flattened_dict(settings)
    return config


def lines(settings: dict) -> str:
    """As on the command line."""
    return " ".join(f"--config.{key}={value}" for key, value in settings.items())


def levers(job: Job) -> list[dict]:
    """Changes that save memory, from those that cost little time to those that cost much."""
    config, mesh, found = job.config, job.mesh.shape, []
    if mesh["fsdp"] == 1 and not config.mesh.zero and mesh["data"] > 1:
        found.append({"mesh.zero": True})
    spare = mesh["data"]
    for fsdp in (2, 4, 8, 16, 32, 64):
        if fsdp > mesh["fsdp"] and spare % (fsdp // mesh["fsdp"]) == 0:
            found.append({"mesh.fsdp": fsdp, "mesh.data": spare * mesh["fsdp"] // fsdp})
    if config.optim.name != "adafactor" and config.optim.momentum_dtype == "float32":
        found.append({"optim.momentum_dtype": "bfloat16"})
    if config.model.dtype == "float32":
        found.append({"model.dtype": "bfloat16"})
    if len(job.model.remat_choices) > 1:
        if config.model.scan and config.model.remat == "none":
            found.append({"model.scan": False})
        order = job.model.remat_choices
        found += [{"model.remat": remat} for remat in order[order.index(config.model.remat) + 1 :]]
    found += [{"accum_steps": n} for n in (2, 4, 8, 16, 32) if n > config.accum_steps]
    return found


def suggest(job: Job, limit_gib: float, total_bytes: float) -> list[str]:
    """Command-line settings with which the job should fit: single ones first, else all that help,
    one after another.
    """
    singles, combined, one = [], {}, cost_model.sketch(job)
    before = cost_model.guess(one).bytes
    scale = (
        total_bytes / before / GIB
    )  # the compiler's word on this job counts more than the model's

    def gib(change: dict) -> float:
        try:
            return (
                cost_model.guess(cost_model.resketch(one, changed(job.config, change))).bytes
                * scale
            )
        except UserError:  # microbatches that do not divide
            return math.inf

    for lever in levers(job):
        size = gib(lever)
        if size < MARGIN * limit_gib:
            singles.append(f"{lines(lever)} (about {size:.1f} GiB per chip)")
    if singles:
        return singles
    for lever in levers(job):
        settings = combined | lever
        size = gib(settings)
        if size < before * scale:
            combined, before = settings, size / scale
        if size < MARGIN * limit_gib:
            return [f"{lines(settings)} (about {size:.1f} GiB per chip)"]
    return [
        f"no setting of this config makes it fit into {limit_gib:.2f} GiB per chip: use a larger "
        "--topology, chips with more memory, or a smaller data.batch_size"
    ]
