"""Schedules and optimizers, assembled from optax."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.sharding import path_name


def cosine(progress, steps, *, lr, **_):
    """Half a cosine from lr to 0."""
    return lr * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def linear(progress, steps, *, lr, end_lr, **_):
    """A line from lr to end_lr."""
    return end_lr + (lr - end_lr) * (1.0 - progress)


def rsqrt(progress, steps, *, lr, timescale, **_):
    """lr / sqrt(1 + steps / timescale) (arXiv 2106.04560 section 3.5)."""
    return lr / jnp.sqrt(1.0 + jnp.maximum(steps, 0.0) / timescale)


def constant(progress, steps, *, lr, **_):
    return jnp.asarray(lr)


SCHEDULES = {"cosine": cosine, "linear": linear, "rsqrt": rsqrt, "constant": constant}


def make_schedule(
    name: str,
    lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    cooldown_steps: int = 0,
    end_lr: float = 0.0,
    timescale: int = 10_000,
) -> Callable:
    """The learning rate as a function of updates done: linear warm-up from 0, decay, linear cooldown to 0.

    A run that is shorter than its warm-up (a try of a few steps) ends inside it.

    Args:
      name: a key of `SCHEDULES`.
      lr: base learning rate.
      total_steps: updates of the whole run; the decay spans those after the warm-up.
      end_lr: where `linear` ends.
      timescale: steps in which `rsqrt` falls to lr / sqrt(2).

    Raises:
      ValueError: unknown name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}")

    def schedule(step):
        steps = jnp.asarray(step, jnp.float32) - warmup_steps
        progress = jnp.clip(steps / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        rate = SCHEDULES[name](progress, steps, lr=lr, end_lr=end_lr, timescale=timescale)
        if warmup_steps:
            rate *= jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            rate *= jnp.minimum(1.0, (total_steps - step) / cooldown_steps)
        return jnp.asarray(rate, jnp.float32)

    return schedule


def adam(config):
    """Adam with decoupled weight decay (AdamW, arXiv 1711.05101) once `wd` is set."""
    return optax.scale_by_adam(config.b1, config.b2, mu_dtype=config.momentum_dtype)


def sgd(config):
    return optax.trace(config.momentum, accumulator_dtype=config.momentum_dtype)


OPTIMIZERS = {"adam": adam, "sgd": sgd}


def decay_mask(params, pattern: str):
    """True for the parameters whose path matches `pattern` to its end."""
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(re.search(f"({pattern})$", path_name(path))), params)


def make_optimizer(config, params, total_steps: int):
    """Builds clip -> optimizer -> weight decay -> learning rate.

    Args:
      config: the `optim` part of a config.
      params: parameter tree, shapes suffice.
      total_steps: updates of the run.

    Returns:
      (tx, schedule): the optax transformation, and the learning rate by step.
    """
    if config.name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {config.name!r}: use one of {', '.join(OPTIMIZERS)}")
    extra = {key: config[key] for key in ("end_lr", "timescale") if key in config}
    schedule = make_schedule(
        config.schedule, config.lr, total_steps, config.warmup_steps, cooldown_steps=config.cooldown_steps, **extra
    )
    # Everything below is multiplied by the learning rate; big_vision's decay is by the schedule's shape only.
    wd = config.wd if config.wd_times_lr else config.wd / config.lr
    chain = [
        optax.clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        OPTIMIZERS[config.name](config),
        optax.add_decayed_weights(wd, decay_mask(params, config.wd_mask)) if wd else optax.identity(),
        optax.scale_by_learning_rate(schedule),
    ]
    return optax.chain(*chain), schedule
