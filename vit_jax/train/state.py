"""The state of a run: its shapes first, then placed; nothing is ever whole on one device. And where
it starts.
"""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.train import step, workdir
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights import load as pretrained

log = logging.getLogger(__name__)


def init_params(model, seed):
    """Fresh parameters; traceable. The loop layout is initialised first, so that scan changes no
    number.
    """
    params = model.with_scan(False).init(
        jax.random.key(seed), jnp.zeros((1, *model.image_size, 3))
    )["params"]
    return scan_layout.relayout(params, model.scan, jnp.stack)


def init_state(config, model, tx) -> step.TrainState:
    """A fresh state; traceable."""
    return step.create_state(init_params(model, config.seed), tx, config.optim.ema_decay)


def abstract_state(config, model, tx, mesh) -> step.TrainState:
    """Shapes, dtypes and shardings of the state, without memory."""
    create = functools.partial(step.create_state, tx=tx, ema_decay=config.optim.ema_decay)
    shapes = jax.eval_shape(create, adapt.abstract_params(model))
    place = sharding.param_specs(shapes, mesh, config.mesh.zero)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, place
    )


def shardings(abstract):
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def fresh_state(config, model, tx, abstract) -> step.TrainState:
    """A fresh state, where `abstract` says."""
    return jax.jit(lambda: init_state(config, model, tx), out_shardings=shardings(abstract))()


def as_dict(state: step.TrainState) -> dict:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


@jax.jit
def is_finite(state: step.TrainState):
    """bool []: whether every number in a state is finite. It reads the state once."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


def to_this_layout(state: dict, model, abstract) -> step.TrainState:
    """A restored state in the layer layout of this run, and where it belongs."""
    if jax.tree.structure(state) == jax.tree.structure(as_dict(abstract)):
        return step.TrainState(**state)
    change = functools.partial(scan_layout.relayout, scan=model.scan, stack=jnp.stack)
    return step.TrainState(**jax.jit(change, out_shardings=shardings(as_dict(abstract)))(state))


def branched_state(
    config, total_steps: int, saved_as, model, abstract
) -> tuple[int, step.TrainState]:
    """The whole state of the checkpoint `config.branch_from` as (step, state).

    Raises:
      UserError: it is no checkpoint of such a run, is damaged, or not before the end of this run.
    """
    folder = checkpoint.absolute(config.branch_from)
    if not (folder / "state").exists():
        raise UserError(
            f"config key branch_from={config.branch_from} is no checkpoint: give one by its step, "
            f"as {checkpoint.find(config.branch_from)}"
        )
    meta = checkpoint.read_meta(folder)
    if "step" not in meta:
        raise UserError(
            f"config key branch_from={config.branch_from} names weights alone: use init_from for "
            "them"
        )
    different = workdir.differences(config, meta["config"], configs.shapes_state)
    decays = meta["config"]["optim"]["ema_decay"], config.optim.ema_decay
    if bool(decays[0]) != bool(decays[1]):
        different.append(f"optim.ema_decay: {decays[0]} -> {decays[1]}")
    if different:
        raise UserError(
            f"config key branch_from={config.branch_from} names a run with another state "
            f"({'; '.join(different)}): undo these differences, or start from its weights alone "
            "with init_from"
        )
    if meta["step"] >= total_steps:
        raise UserError(
            f"config key branch_from={config.branch_from} is a checkpoint of step {meta['step']}, "
            f"where this run of {total_steps} steps has ended: set total_steps to the steps of "
            "both together"
        )
    state = checkpoint.read_state(folder, saved_as)
    log.info("branches off from %s", folder)
    return meta["step"], to_this_layout(state, model, abstract)


def pretrained_state(config, model, tx, abstract) -> step.TrainState:
    """A state that starts from the weights of `config.init_from`, with a new head."""
    weights = pretrained.read(config.init_from, image_size=config.image_size)
    adapt.check_same_function(weights, model)
    params = scan_layout.relayout(
        adapt.adapt(weights, model, True, config.init_allow), model.scan, jnp.stack
    )
    params = jax.tree.map(
        lambda x, a: jax.device_put(x.astype(a.dtype), a.sharding), params, abstract.params
    )
    create = functools.partial(step.create_state, tx=tx, ema_decay=config.optim.ema_decay)
    return jax.jit(create, out_shardings=shardings(abstract))(params)


def start_state(
    config, model, tx, mesh, abstract, total_steps: int, checkpointer
) -> tuple[int, step.TrainState]:
    """(updates done, state): of this workdir's newest checkpoint, else of `branch_from`, else of
    `init_from` or the seed."""

    def saved_as(meta):
        return as_dict(
            abstract_state(config, model.with_scan(meta["model"].get("scan", False)), tx, mesh)
        )

    if restored := checkpointer.restore(saved_as):
        return restored[0], to_this_layout(restored[1], model, abstract)
    if config.branch_from:
        return branched_state(config, total_steps, saved_as, model, abstract)
    if config.init_from:
        return 0, pretrained_state(config, model, tx, abstract)
    return 0, fresh_state(config, model, tx, abstract)
