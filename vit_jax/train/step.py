"""One training step, as a pure function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.train.objectives.objective import Objective
from vit_jax.train.optim import without_gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds, and a teacher. `step` is the number of updates done."""

    step: Any  # int32 []
    params: Any
    opt_state: Any
    ema_params: Any  # like params, or {} without EMA
    skipped_steps: Any  # int32 []: updates skipped because loss or gradients were not finite
    skipped_in_row: Any  # int32 []: the latest of them, without any other update in between
    running: Any = dataclasses.field(default_factory=dict)  # statistics that the objective keeps
    teacher: Any = dataclasses.field(default_factory=dict)  # parameters that stay; not saved


def create_state(params, tx, ema_decay: float, running=None) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.copy, params) if ema_decay else {}
    return TrainState(zero, params, tx.init(params), ema, zero, zero, running or {})


def eval_params(state: TrainState):
    """The parameters to evaluate: the averaged ones if the run averages."""
    return state.ema_params or state.params


def split_microbatches(batch, accum_steps: int):
    """[batch, ...] -> [accum_steps, batch / accum_steps, ...]; each device keeps its own rows."""

    def split(x):
        rows = x.shape[0] // accum_steps
        return x.reshape(rows, accum_steps, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def merge_microbatches(batch):
    """The inverse of `split_microbatches`."""

    def merge(x):
        return x.swapaxes(0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(merge, batch)


def ema_update(ema_params, params, decay):
    """Polyak averaging."""
    return jax.tree.map(lambda e, p: e + (1.0 - decay) * (p - e), ema_params, params)


def teach(objective: Objective, state: TrainState, batch, accum_steps: int):
    """(batch with what a teacher says of it, `state.running` after it, metrics): no gradient, one
    microbatch after the other, and then over the whole batch.
    """
    if not objective.teaches:
        return batch, state.running, {}

    def answer(microbatch):
        return objective.teach(state, microbatch)

    if accum_steps == 1:
        answers = answer(batch)
    else:
        answers = jax.lax.map(answer, split_microbatches(batch, accum_steps))
        answers = merge_microbatches(answers)
    taught, running, metrics = objective.targets(answers, batch, state)
    return batch | dict(taught=taught), running, metrics


def make_loss_and_grads(loss_fn: Callable, accum_steps: int) -> Callable:
    """f(params, batch, key, step) -> ((loss, metrics), gradient): means over the examples that
    count; NaN if none counts, so that the update is skipped.

    With `accum_steps` microbatches, the sum of their parts is that of the whole batch.

    Args:
      loss_fn: `Objective.loss`.
    """

    def microbatch_loss(params, batch, key, step, count):
        def mean(x):
            return jnp.sum(x * batch["mask"]) / count

        loss, metrics = loss_fn(params, batch, key, step)
        return mean(loss), jax.tree.map(mean, metrics)

    def loss_and_grads(params, batch, key, step):
        count = batch["mask"].sum()
        value_and_grad = jax.value_and_grad(microbatch_loss, has_aux=True)
        if accum_steps == 1:
            return value_and_grad(params, batch, key, step, count)

        def part(inputs):
            microbatch, index = inputs
            return value_and_grad(params, microbatch, jax.random.fold_in(key, index), step, count)

        def add(total, inputs):
            return jax.tree.map(jnp.add, total, part(inputs)), None

        inputs = (split_microbatches(batch, accum_steps), jnp.arange(accum_steps))
        first = jax.tree.map(lambda x: x[0], inputs)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first))
        return jax.lax.scan(add, zeros, inputs)[0]

    return loss_and_grads


def make_train_step(
    objective: Objective,
    tx: optax.GradientTransformation,
    schedule: Callable,
    *,
    preprocess: Callable,
    seed: int,
    prng: str = "threefry2x32",
    frozen: str = "",
    accum_steps: int = 1,
    ema_decay: float = 0.0,
    max_skipped: int = 10,
) -> Callable:
    """Builds train_step(state, batch) -> (state, metrics).

    Args:
      objective: what is optimized; see objectives/objective.py.
      tx: optimizer; clipping happens inside it, on the gradient of the whole batch.
      schedule: learning rate by step, for the metrics.
      preprocess: (batch, key of the step) -> the batch as the objective takes it.
      prng: implementation of random numbers, as `jax.random.key` knows them.
      frozen: pattern of the parameters that get no gradient.
      accum_steps: microbatches; the update equals that of one batch.
      ema_decay: of the averaged parameters, see `Objective.ema_decay`; 0 is off.
      max_skipped: after so many skipped updates in a row nothing is updated any more, so that
        `skipped_in_row` says where they began, whenever the host looks.

    Randomness is a function of (seed, step, microbatch) and of the seeds in the batch only.
    """

    def loss_fn(params, batch, key, step):
        return objective.loss(without_gradients(params, frozen), batch, key, step)

    loss_and_grads = make_loss_and_grads(loss_fn, accum_steps)

    def train_step(state: TrainState, batch) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(seed, impl=prng), state.step)
        mix_key, dropout_key = jax.random.split(key)
        batch = preprocess(batch, mix_key)
        batch, running, watched = teach(objective, state, batch, accum_steps)
        (value, more), grads = loss_and_grads(state.params, batch, dropout_key, state.step)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        finite &= state.skipped_in_row < max_skipped

        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema_params
        if ema_decay:
            ema = ema_update(ema, params, objective.ema_decay(ema_decay, state.step))
        params, opt_state, ema, running = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, ema, running),
            (state.params, state.opt_state, state.ema_params, state.running),
        )
        skipped = state.skipped_steps + ~finite
        in_row = jnp.where(finite, 0, state.skipped_in_row + 1)
        metrics = {
            "train/loss": value,
            # The optimizer counts only the updates that it made.
            "train/lr": schedule(state.step - state.skipped_steps),
            "train/grad_norm": grad_norm,
            "train/skipped_steps": skipped,
            "train/skipped_in_row": in_row,
        }
        metrics |= {f"train/{name}": value for name, value in (more | watched).items()}
        new = dict(params=params, opt_state=opt_state, ema_params=ema, running=running)
        counts = dict(step=state.step + 1, skipped_steps=skipped, skipped_in_row=in_row)
        return dataclasses.replace(state, **new, **counts), metrics

    return train_step
