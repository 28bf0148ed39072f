"""Which mesh, remat, scan and microbatches to try: ranked by `cost_model`, then compiled."""

import collections
import itertools
from typing import Any

from vit_jax.distributed import hardware
from vit_jax.errors import NegativeResult, UserError
from vit_jax.plan import cost_model
from vit_jax.plan.compilation import GIB
from vit_jax.plan.suggestions import MARGIN, changed, lines
from vit_jax.train.experiment import Experiment

FSDP = (1, 2, 4, 8, 16, 32, 64)
TENSOR = (1, 2, 4)
MICROBATCHES = (1, 2, 4, 8)
ATTENTION = ("auto", "einsum")  # for sequences that "auto" gives to splash
FAMILY = ("mesh.tensor", "mesh.zero", "model.scan", "model.remat", "model.attention", "accum_steps")


def kinds_of_attention(experiment: Experiment) -> tuple[str, ...]:
    """The values of `model.attention` to try."""
    auto = changed(experiment.config, {"model.attention": "auto"})
    for stack in experiment.objective.stacks:
        if cost_model.way_of_attention(auto, stack, experiment.mesh.shape) == "splash":
            return ATTENTION
    return (experiment.config.model.attention,)


def settings(experiment: Experiment):
    """Every plausible combination, as flat config values."""
    chips = experiment.num_chips
    replicas = experiment.mesh.shape["replica"]
    slices = len({hardware.slice_index(device) for device in experiment.mesh.devices.flat})
    layers = (False, True) if experiment.model.can_stack else (False,)
    kinds = kinds_of_attention(experiment)
    for fsdp, tensor in itertools.product(FSDP, TENSOR):
        data, remainder = divmod(chips, replicas * fsdp * tensor)
        if remainder or (replicas % slices and data % slices):
            continue
        mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
        zeros = [False]
        if data > 1 and fsdp == 1:
            zeros.append(True)
        choices = itertools.product(
            zeros, layers, experiment.model.remat_choices, MICROBATCHES, kinds
        )
        for zero, scan, remat, accum, kind in choices:
            values = mesh | {"mesh.zero": zero, "accum_steps": accum}
            if len(layers) > 1:
                values |= {"model.scan": scan, "model.remat": remat, "model.attention": kind}
            yield values


def family(values: dict) -> tuple:
    """What is equal in settings that differ only in the number of shards."""
    return tuple(values.get(key) for key in FAMILY)


def candidates(experiment: Experiment, limit_gib: float) -> list[tuple[dict, Any]]:
    """(settings, config) of all that should fit, the fastest first; the third and later ones of a
    family come after all others.
    """
    found = []
    one = cost_model.sketch(experiment)
    for values in settings(experiment):
        config = changed(experiment.config, values)
        try:
            guess = cost_model.guess(cost_model.resketch(one, config))
        except UserError:  # a batch or a width that does not divide
            continue
        if guess.bytes < MARGIN * limit_gib * GIB:
            found.append((guess.ms, len(found), values, config))
    if not found:
        raise NegativeResult(
            f"no mesh, remat and microbatches fit into {limit_gib:.2f} GiB per chip on "
            f"{experiment.num_chips} chips: use a larger --topology, or chips with more memory"
        )
    first, rest = [], []
    seen = collections.Counter()
    for _, _, values, config in sorted(found, key=lambda item: item[:2]):
        seen[family(values)] += 1
        if seen[family(values)] <= 2:
            first.append((values, config))
        else:
            rest.append((values, config))
    return first + rest


def midpoint(plan: dict) -> float:
    """Milliseconds by which plans are ranked: the midpoint of the range."""
    return (plan["step_ms"]["low"] + plan["step_ms"]["high"]) / 2


def best(tried: list[dict]) -> dict:
    """The fastest plan that fits, or the smallest if none does, with the lines to paste and the
    summaries of all in `tried`.

    Args:
      tried: `settings` with the `plan` or the `error` that they led to.
    """
    planned = [one for one in tried if "plan" in one]
    if not planned:
        raise UserError(f"none of the {len(tried)} settings could be planned: {tried[0]['error']}")
    failed = [one for one in tried if "error" in one]
    fitting = [one for one in planned if one["plan"]["fits"]]
    rest = [one for one in planned if not one["plan"]["fits"]]
    fitting.sort(key=lambda one: midpoint(one["plan"]))
    rest.sort(key=lambda one: one["plan"]["hbm_gib"]["total"])
    chosen, *others = fitting + rest
    return chosen["plan"] | dict(
        settings=lines(chosen["settings"]),
        tried=[summary(one) for one in (chosen, *others, *failed)],
    )


def summary(one: dict) -> dict:
    """Settings, and the main figures of their plan or the error."""
    settings = lines(one["settings"])
    if "error" in one:
        return dict(settings=settings, fits=False, error=one["error"])
    plan = one["plan"]
    return dict(
        settings=settings,
        fits=plan["fits"],
        hbm_gib=plan["hbm_gib"]["total"],
        step_ms=plan["step_ms"],
    )
