"""What would make a experiment fit, by `cost_model`."""

import copy
import math

from vit_jax.errors import UserError
from vit_jax.plan import cost_model
from vit_jax.plan.compilation import GIB
from vit_jax.train.experiment import Experiment

MARGIN = 0.95  # share of the memory to use: the model does not see everything


def changed(config, settings: dict):
    """A copy of a config with other values: {"model.remat": "full"}."""
    config = copy.deepcopy(config)
    with config.unlocked():
        config.update_from_flattened_dict(settings)
    return config


def lines(settings: dict) -> str:
    """Settings as command-line arguments."""
    return " ".join(f"--config.{key}={value}" for key, value in settings.items())


def levers(experiment: Experiment) -> list[dict]:
    """Changes that save memory; those that cost little time come first."""
    config = experiment.config
    mesh = experiment.mesh.shape
    found = []
    if mesh["fsdp"] == 1 and not config.mesh.zero and mesh["data"] > 1:
        found.append({"mesh.zero": True})
    for fsdp in (2, 4, 8, 16, 32, 64):
        if fsdp > mesh["fsdp"] and mesh["data"] % (fsdp // mesh["fsdp"]) == 0:
            found.append({"mesh.fsdp": fsdp, "mesh.data": mesh["data"] * mesh["fsdp"] // fsdp})
    if config.optim.name != "adafactor" and config.optim.momentum_dtype == "float32":
        found.append({"optim.momentum_dtype": "bfloat16"})
    if config.model.dtype == "float32":
        found.append({"model.dtype": "bfloat16"})
    if len(experiment.model.remat_choices) > 1:
        if config.model.scan and config.model.remat == "none":
            found.append({"model.scan": False})
        order = experiment.model.remat_choices
        found += [{"model.remat": remat} for remat in order[order.index(config.model.remat) + 1 :]]
    found += [{"accum_steps": n} for n in (2, 4, 8, 16, 32) if n > config.accum_steps]
    return found


def suggest(experiment: Experiment, limit_gib: float, total_bytes: float) -> list[str]:
    """Command-line settings with which the experiment should fit: every single one that suffices,
    or else a combination of those that help.

    Args:
      total_bytes: per chip, by the compiler. The model only gives the factor of each change.
    """
    one = cost_model.sketch(experiment)
    before = cost_model.guess(one).bytes
    scale = total_bytes / before / GIB

    def gib(change: dict) -> float:
        try:
            sketch = cost_model.resketch(one, changed(experiment.config, change))
        except UserError:  # the batch does not divide into these microbatches
            return math.inf
        return cost_model.guess(sketch).bytes * scale

    singles = []
    for lever in levers(experiment):
        size = gib(lever)
        if size < MARGIN * limit_gib:
            singles.append(suggestion(lever, size))
    if singles:
        return singles
    combined = {}
    for lever in levers(experiment):
        settings = combined | lever
        size = gib(settings)
        if size < before * scale:
            combined = settings
            before = size / scale
        if size < MARGIN * limit_gib:
            return [suggestion(settings, size)]
    return [
        f"no setting of this config makes it fit into {limit_gib:.2f} GiB per chip: use a larger "
        "--topology, chips with more memory, or a smaller data.batch_size"
    ]


def suggestion(settings: dict, gib: float) -> str:
    """Settings to paste, with the memory that they should take."""
    return f"{lines(settings)} (about {gib:.1f} GiB per chip)"
