"""The length of a run, what happens at which step, and learning rates as functions of the step."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.config import own_parts
from vit_jax.config.key import LARGEST
from vit_jax.errors import UserError


def plan_steps(config, num_examples: int) -> int:
    """The number of updates of the run."""
    if not config.total_steps and not config.total_epochs:
        raise UserError("config keys total_steps and total_epochs are both 0: set one of them")
    epochs = config.total_epochs
    total = config.total_steps or round(epochs * num_examples / config.data.batch_size)
    if total < 1:
        raise UserError(
            f"total_epochs={epochs} of {num_examples} examples is less than one batch of "
            f"{config.data.batch_size}: train longer or use a smaller batch"
        )
    if total > LARGEST:
        raise UserError(
            f"total_epochs={epochs} of {num_examples} examples is {total} steps: give at most "
            f"{LARGEST} steps"
        )
    return total


def due(number: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens after `number`
    updates.
    """
    return number == total or (every > 0 and number % every == 0)


def half_cosine(start: float, end: float, progress):
    """From `start` to `end`, at a progress from 0 to 1."""
    return end + (start - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(progress, 1.0)))


def cosine(progress, steps, *, lr, **_):
    """Half a cosine from lr to 0."""
    return lr * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def linear(progress, steps, *, lr, end_lr, **_):
    """A line from lr to end_lr."""
    return polynomial(progress, steps, lr=lr, end_lr=end_lr, power=1.0)


def polynomial(progress, steps, *, lr, end_lr, power, **_):
    """From lr to end_lr by a power of what remains of the run."""
    return end_lr + (lr - end_lr) * (1.0 - progress) ** power


def rsqrt(progress, steps, *, lr, timescale, shift, **_):
    """lr / sqrt(1 + (steps + shift) / timescale) (arXiv 2106.04560 section 3.5)."""
    return lr / jnp.sqrt(1.0 + (jnp.maximum(steps, 0.0) + shift) / timescale)


def stair(progress, steps, *, lr, stairs, stairs_after, warmup_steps, **_):
    """lr, and from each step of `stairs` on, or after it, lr times its factor (of lr itself, not of
    the stair before).
    """
    factors = jnp.array([1.0, *(factor for _, factor in stairs)])
    starts = jnp.array([start - warmup_steps for start, _ in stairs], jnp.float32)
    return lr * factors[jnp.searchsorted(starts, steps, side="left" if stairs_after else "right")]


def constant(progress, steps, *, lr, **_):
    return jnp.asarray(lr)


SCHEDULES = {
    "cosine": cosine,
    "linear": linear,
    "polynomial": polynomial,
    "rsqrt": rsqrt,
    "stair": stair,
    "constant": constant,
}


def make_schedule(
    name: str,
    lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    *,
    cooldown_steps: int = 0,
    end_lr: float = 0.0,
    power: float = 1.0,
    timescale: int = 10_000,
    shift: int = 0,
    stairs: Sequence[tuple[int, float]] = (),
    stairs_after: bool = False,
) -> Callable:
    """The learning rate as a function of updates done: linear warm-up from 0, decay, linear
    cooldown to 0.

    A run that is shorter than its warm-up, such as a trial of a few steps, ends inside it.

    Args:
      name: a key of `SCHEDULES`.
      lr: base learning rate.
      total_steps: updates of the whole run; the decay spans those after the warm-up.
      end_lr: where `linear` and `polynomial` end.
      power: exponent of `polynomial`.
      timescale: steps in which `rsqrt` falls to lr / sqrt(2).
      shift: steps by which `rsqrt` starts further along, counting the warm-up (to continue with
        another batch size).
      stairs: of `stair`, ascending (step of the run, factor of lr from there on).
      stairs_after: the update at the step itself has the rate from before.

    Raises:
      ValueError: unknown name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    decay = SCHEDULES[name]
    options = dict(lr=lr, end_lr=end_lr, power=power, warmup_steps=warmup_steps)
    options |= dict(timescale=timescale, shift=shift, stairs=stairs, stairs_after=stairs_after)

    def rate(step):
        steps = jnp.asarray(step, jnp.float32) - warmup_steps
        progress = jnp.clip(steps / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        return decay(progress, steps, **options)

    return with_ends(rate, total_steps, warmup_steps, cooldown_steps)


def with_ends(
    decay: Callable, total_steps: int, warmup_steps: int, cooldown_steps: int
) -> Callable:
    """`decay`, a function of updates done, with linear warm-up and cooldown."""

    def schedule(step):
        rate = decay(step)
        if warmup_steps:
            rate *= jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            rate *= jnp.minimum(1.0, (total_steps - step) / cooldown_steps)
        return jnp.asarray(rate, jnp.float32)

    return schedule


def own_schedule(config, total_steps: int) -> Callable:
    """The learning rate by `config.optim.schedule`, a part of the user's own, with warm-up and
    cooldown.

    Raises:
      UserError: it does not fit.
    """
    optim = config.optim
    part = own_parts.part("optim.schedule", optim.schedule, config)
    decay = part(total_steps=total_steps)
    if not callable(decay):
        raise part.error(
            f"returns {own_parts.shown(decay)}, but it must return a function of the step"
        )
    rate = part.guard(decay)
    result = jax.eval_shape(lambda step: jnp.asarray(rate(step)), 0)
    if result.shape:
        raise part.error(
            f"gives {own_parts.shown(result)} for a step, but it must give one number, the "
            "learning rate"
        )
    return with_ends(rate, total_steps, optim.warmup_steps, optim.cooldown_steps)
