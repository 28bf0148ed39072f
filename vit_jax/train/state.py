"""The state of a run: its shapes first, then placed; nothing is ever whole on one device. And where
it starts.
"""

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.distributed import hardware, runtime, sharding
from vit_jax.errors import UserError
from vit_jax.train import step, workdir
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights import load as pretrained

log = logging.getLogger(__name__)


def init_state(config, objective, tx) -> step.TrainState:
    """A fresh state; traceable."""
    return create_state(config, objective, tx, objective.init(config.seed))


def create_state(config, objective, tx, params) -> step.TrainState:
    """A state before the first update; traceable."""
    return step.create_state(params, tx, config.optim.ema_decay, objective.running())


def abstract_state(config, objective, tx, mesh) -> step.TrainState:
    """Shapes, dtypes and shardings of the state, without memory."""
    create = functools.partial(create_state, config, objective, tx)
    shapes = jax.eval_shape(create, objective.abstract_params())
    shapes = dataclasses.replace(shapes, teacher=objective.abstract_teacher())
    place = sharding.param_specs(shapes, mesh, config.mesh.zero)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, place
    )


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Of the shards on the devices of this process."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shard) * leaf.dtype.itemsize * len(leaf.sharding.addressable_devices)


def check_fits(abstract) -> None:
    """Raises UserError if a state needs more memory than is free; other devices than CPUs find that
    themselves.
    """
    if hardware.is_cpu():
        size = sum(map(local_bytes, jax.tree.leaves(abstract)))
        runtime.check_fits(size, "the state of this run", runtime.SMALLER)


def shardings(abstract):
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def fresh_state(experiment) -> step.TrainState:
    """A fresh state, placed on the mesh."""

    def init():
        return init_state(experiment.config, experiment.objective, experiment.tx)

    return with_teacher(jax.jit(init, out_shardings=trained_shardings(experiment))(), experiment)


def trained_shardings(experiment) -> step.TrainState:
    """Shardings of a state without a teacher."""
    return shardings(dataclasses.replace(experiment.abstract_state, teacher={}))


def with_teacher(state: step.TrainState, experiment) -> step.TrainState:
    """The state with the parameters of the teacher, if the run has one."""
    if experiment.teacher is None:
        return state
    teacher = experiment.teacher.place(experiment.abstract_state.teacher)
    return dataclasses.replace(state, teacher=teacher)


def as_dict(state: step.TrainState) -> dict:
    """What a checkpoint holds."""
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    del values["teacher"]
    if not values["running"]:  # as in all checkpoints of objectives without it
        del values["running"]
    return values


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


def saved_layout(experiment, meta: dict) -> dict:
    """The state of an experiment as the checkpoint with these facts has it: its layer layout."""
    model = experiment.model.with_scan(meta["model"].get("scan", False))
    objective = dataclasses.replace(experiment.objective, model=model)
    return as_dict(abstract_state(experiment.config, objective, experiment.tx, experiment.mesh))


def check_branch(experiment, meta: dict) -> None:
    """Raises UserError if the checkpoint with these facts does not go on as this experiment."""
    config = experiment.config
    name = f"config key branch_from={config.branch_from}"
    if "step" not in meta:
        raise UserError(f"{name} has only weights: use init_from for them")
    different = workdir.differences(config, meta["config"], configs.shapes_state)
    before = meta["config"]["optim"]["ema_decay"]
    now = config.optim.ema_decay
    if bool(before) != bool(now):
        different.append(f"optim.ema_decay: {before} -> {now}")
    if different:
        raise UserError(
            f"{name} is of a run with another state ({'; '.join(different)}): undo these "
            "differences, or start from its weights alone with init_from"
        )
    if meta["step"] >= experiment.total_steps:
        raise UserError(
            f"{name} is a checkpoint of step {meta['step']}, but this run ends at step "
            f"{experiment.total_steps}: set total_steps to the steps of both together"
        )


def branch_folder(path: str):
    """The checkpoint `config.branch_from`; a UserError if it is none."""
    folder = checkpoint.absolute(path)
    if not (folder / "state").exists():
        raise UserError(
            f"config key branch_from={path} is not a checkpoint: give one by its step, such as "
            f"{checkpoint.find(path)}"
        )
    return folder


def find_start(config, folder) -> tuple[dict, pretrained.Weights | None]:
    """(fields of the model that a run in the workdir `folder` starts from, its weights if they are
    those of `init_from`); {} if it starts from the seed.
    """
    meta = workdir.sealed(folder)
    if meta is None and config.branch_from:
        meta = checkpoint.read_meta(branch_folder(config.branch_from))
    if meta is not None:
        return meta["model"], None
    if not config.init_from:
        return {}, None
    weights = read_weights(config)
    return pretrained.pooled_as(weights, config.model.pool), weights


def read_weights(config) -> pretrained.Weights:
    """The weights of `init_from`."""
    return pretrained.read(
        config.init_from,
        image_size=config.image_size,
        num_heads=config.model.num_heads or None,
        posemb=config.model.posemb,
    )


def branched_state(experiment) -> tuple[int, step.TrainState]:
    """The whole state of the checkpoint `config.branch_from`, as (step, state).

    Raises:
      UserError: it is not a checkpoint of such a run, is damaged, or is after the end of this run.
    """
    folder = branch_folder(experiment.config.branch_from)
    meta = checkpoint.read_meta(folder)
    check_branch(experiment, meta)
    state = checkpoint.read_state(folder, functools.partial(saved_layout, experiment))
    log.info("branches from %s", folder)
    state = to_this_layout(state, experiment.model, experiment.abstract_state)
    return meta["step"], with_teacher(state, experiment)


def pretrained_state(experiment, weights) -> step.TrainState:
    """A state that starts from loaded weights, with a new head, and with what the weights have of
    the objective.
    """
    config = experiment.config
    model = experiment.model
    objective = experiment.objective
    adapt.check_same_function(weights, model)
    params = adapt.adapt(weights, model, True, config.init_allow)
    params = scan_layout.relayout(params, model.scan, jnp.stack)
    abstract = experiment.abstract_state
    extra = objective.extra_of(weights)
    fresh = [name for name in objective.extra if name not in extra]
    for name in objective.extra:
        log.info("%s: %s", name, "fresh" if name in fresh else "that of the weights")

    def put(value, goal):
        return jax.device_put(value.astype(goal.dtype), goal.sharding)

    params |= extra
    params = jax.tree.map(put, params, {name: abstract.params[name] for name in params})

    def create(params):
        new = {name: objective.init(config.seed)[name] for name in fresh}
        return create_state(config, objective, experiment.tx, params | new)

    return with_teacher(
        jax.jit(create, out_shardings=trained_shardings(experiment))(params), experiment
    )


def start_state(experiment, checkpointer, weights=None) -> tuple[int, step.TrainState]:
    """(updates done, state) of the newest checkpoint in the workdir, else of `branch_from`, else of
    `init_from` or the seed.

    Args:
      weights: those of `init_from`, if they were read before.
    """
    config = experiment.config
    model = experiment.model
    abstract = experiment.abstract_state
    restored = checkpointer.restore(functools.partial(saved_layout, experiment))
    if restored:
        number, state = restored
        return number, with_teacher(to_this_layout(state, model, abstract), experiment)
    if config.branch_from:
        return branched_state(experiment)
    if config.init_from:
        weights = weights or read_weights(config)
        return 0, pretrained_state(experiment, weights)
    return 0, fresh_state(experiment)
