"""Which mesh, remat, scan and microbatches to try: ranked by the model of `analysis`, then
compiled.
"""

import itertools
from typing import Any

from vit_jax.distributed import hardware
from vit_jax.errors import NegativeResult, UserError
from vit_jax.models.ops import attention
from vit_jax.plan import cost_model
from vit_jax.plan.compilation import GIB
from vit_jax.plan.suggestions import MARGIN, changed, lines
from vit_jax.train.experiment import Job

FSDP = (1, 2, 4, 8, 16, 32, 64)
TENSOR = (1, 2, 4)
MICROBATCHES = (1, 2, 4, 8)
ATTENTION = ("einsum", "splash")  # of more tokens than einsum is chosen for by itself
FAMILY = ("mesh.tensor", "mesh.zero", "model.scan", "model.remat", "model.attention", "accum_steps")


def settings(job: Job):
    """Every combination worth a thought, as flat config values."""
    replicas, chips = job.mesh.shape["replica"], job.num_chips
    slices = len({hardware.slice_index(device) for device in job.mesh.devices.flat})
    layers = (False, True) if job.model.can_stack else (False,)
    tokens = job.model.grid[0] * job.model.grid[1]
    is_long = job.model.num_heads and tokens > attention.EINSUM_UP_TO
    kinds = ATTENTION if is_long else (job.config.model.attention,)
    for fsdp, tensor in itertools.product(FSDP, TENSOR):
        if chips % (replicas * fsdp * tensor):
            continue
        mesh = {
            "mesh.data": chips // (replicas * fsdp * tensor),
            "mesh.fsdp": fsdp,
            "mesh.tensor": tensor,
        }
        if replicas % slices and mesh["mesh.data"] % slices:
            continue
        zeros = (False, True) if mesh["mesh.data"] > 1 and fsdp == 1 else (False,)
        for zero, scan, remat, accum, kind in itertools.product(
            zeros, layers, job.model.remat_choices, MICROBATCHES, kinds
        ):
            model = {"model.scan": scan, "model.remat": remat, "model.attention": kind}
            yield (
                mesh
                | {"mesh.zero": zero, "accum_steps": accum}
                | (model if len(layers) > 1 else {})
            )


def family(values: dict) -> tuple:
    """What settings have in common that differ in the number of shards alone."""
    return tuple(values.get(key) for key in FAMILY)


def candidates(job: Job, limit_gib: float) -> list[tuple[dict, Any]]:
    """(settings, config) of all that should fit, the fastest first; two of a family before the
    third.

    Raises:
      NegativeResult: nothing should fit.
    """
    found, one = [], cost_model.sketch(job)
    for values in settings(job):
        config = changed(job.config, values)
        try:
            guess = cost_model.guess(cost_model.resketch(one, config))
        except UserError:  # a batch or a width that does not divide
            continue
        if guess.bytes < MARGIN * limit_gib * GIB:
            found.append((guess.ms, len(found), values, config))
    if not found:
        raise NegativeResult(
            f"no mesh, remat and microbatches fit into {limit_gib:.2f} GiB per chip on "
            f"{job.num_chips} chips: use a larger --topology, or chips with more memory"
        )
    ordered, seen = [], {}
    for _, _, values, config in sorted(found, key=lambda item: item[:2]):
        rank = seen[family(values)] = seen.get(family(values), 0) + 1
        ordered.append((rank > 2, len(ordered), values, config))
    return [(values, config) for *_, values, config in sorted(ordered, key=lambda item: item[:2])]


def middle(plan: dict) -> float:
    """Milliseconds by which plans are ranked: the middle of the bracket."""
    return (plan["step_ms"]["low"] + plan["step_ms"]["high"]) / 2


def best(tried: list[dict]) -> dict:
    """The fastest plan that fits, or where none does the smallest, with the lines to paste and all
    others in `tried`.

    Args:
      tried: `settings` with the `plan` that they led to, or the `error`.

    Raises:
      UserError: no settings led to a plan.
    """
    planned = [one for one in tried if "plan" in one]
    if not planned:
        raise UserError(f"none of the {len(tried)} settings could be planned: {tried[0]['error']}")
    fitting = sorted(
        (one for one in planned if one["plan"]["fits"]), key=lambda one: middle(one["plan"])
    )
    rest = [one for one in planned if not one["plan"]["fits"]]
    ordered = [*fitting, *sorted(rest, key=lambda one: one["plan"]["hbm_gib"]["total"])]
    return ordered[0]["plan"] | dict(
        settings=lines(ordered[0]["settings"]),
        tried=[summary(one) for one in [*ordered, *(one for one in tried if "error" in one)]],
    )


def summary(one: dict) -> dict:
    """What stands of settings in the list of those that were tried; without figures where there was
    an error.
    """
    plan = one.get("plan")
    figures = (
        dict(hbm_gib=plan["hbm_gib"]["total"], step_ms=plan["step_ms"])
        if plan
        else dict(error=one["error"])
    )
    return dict(settings=lines(one["settings"]), fits=bool(plan and plan["fits"])) | figures
