"""Schedules and optimizers, assembled from optax."""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from vit_jax.distributed.sharding import path_name
from vit_jax.errors import UserError
from vit_jax.train.schedules import make_schedule


def adam(config):
    """Adam with decoupled weight decay (AdamW, arXiv 1711.05101) once `wd` is set."""
    return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.momentum_dtype)


def sgd(config):
    """Heavy-ball or Nesterov momentum; without momentum there is no state."""
    if not config.momentum:
        return optax.identity()
    return optax.trace(
        config.momentum, nesterov=config.nesterov, accumulator_dtype=config.momentum_dtype
    )


def adafactor(config):
    """Adafactor (arXiv 1804.04235) as changed for ViT (arXiv 2106.04560 section 3.4): capped beta2,
    and momentum.

    Second moments of an array are factored over its two largest axes where both are at least 32.
    They and the clipping go by array, so with `model.scan` all layers together count as one: one
    clipping for all of them, and the biases of 32 or more layers are factored, too. So scan changes
    the numbers here, as it does in big_vision.
    """
    cap = config.beta2_cap

    def beta2(step, exponent):
        return jnp.minimum(cap, 1.0 - (step + 1.0) ** -exponent)

    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=0.8, min_dim_size_to_factor=32, epsilon=1e-30, decay_rate_fn=beta2
        ),
        optax.clip_by_block_rms(config.clipping_threshold)
        if config.clipping_threshold
        else optax.identity(),
        optax.ema(config.momentum, debias=False, accumulator_dtype=config.momentum_dtype)
        if config.momentum
        else optax.identity(),
    )


# lamb is adam with what `decay_and_mults` puts behind it.
OPTIMIZERS = {"adam": adam, "sgd": sgd, "adafactor": adafactor, "lamb": adam}


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """optax's, but by one factor: dividing each entry makes XLA on CPUs write another array, 2 % of
    B/16's step.
    """

    def update(updates, params):
        return optax.tree.scale(jnp.minimum(1.0, limit / optax.tree.norm(updates)), updates)

    return optax.stateless(update)


def value_of(path, pairs: Sequence[tuple], default):
    """The value of the first (pattern, value) whose regular expression matches the whole path of a
    parameter.
    """
    return next(
        (value for pattern, value in pairs if re.fullmatch(pattern, path_name(path))), default
    )


def check_patterns(key: str, patterns: Sequence[str], params) -> None:
    """Raises UserError, naming the config key, when a pattern is not the first to match any
    parameter.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    used = {
        value_of(path, list(zip(patterns, range(len(patterns)), strict=True)), None)
        for path in paths
    }
    for number, pattern in enumerate(patterns):
        if number not in used:
            raise UserError(
                f"config key optim.{key}: {pattern!r} matches no parameter that the patterns "
                "before it leave: patterns match whole paths such as "
                f"{path_name(paths[0]) if paths else '(the model has none)'}; correct it"
            )


def scale_by_path(mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Multiplies updates by the factor of their parameter; 1 where no pattern matches."""

    def update(updates, params):
        return jax.tree_util.tree_map_with_path(
            lambda path, u: u * value_of(path, mults, 1.0), updates
        )

    return optax.stateless(update)


def layer_of(path, depth: int):
    """The layer of a parameter, from 0, what comes before the blocks, to depth + 1, what comes
    behind them, as in BEiT (arXiv 2106.08254 section 3.2); of the blocks that are stacked for scan,
    all of them: int32 [depth]."""
    name = path_name(path)
    if found := re.search(r"(^|/)encoderblock_(\d+)/", name):
        return int(found[2]) + 1
    if re.search(r"(^|/)encoderblock/", name):
        return jnp.arange(1, depth + 1)
    return (
        depth + 1
        if re.match(r"head|pre_logits|fc_norm|MAPHead|Transformer/encoder_norm", name)
        else 0
    )


def num_blocks(params) -> int:
    """Of a tree of parameters, 0 where it has none."""
    flat = [
        (path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    stacked = [leaf.shape[0] for name, leaf in flat if "/encoderblock/" in name]
    numbers = [
        int(found[1]) + 1 for name, _ in flat if (found := re.search(r"/encoderblock_(\d+)/", name))
    ]
    return max([*stacked, *numbers], default=0)


def scale_by_layer(decay: float, depth: int) -> optax.GradientTransformation:
    """Multiplies updates by `decay` to the power of the layers that follow."""

    def scale(path, update):
        factor = jnp.asarray(decay ** (depth + 1 - layer_of(path, depth)), jnp.float32)
        return update * factor.reshape(factor.shape + (1,) * (update.ndim - 1) * bool(factor.ndim))

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def decay_by_path(wd: float, mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Adds `wd` times the factor of the parameter times the parameter; nothing where no pattern
    matches.
    """

    def add(path, update, param):
        factor = value_of(path, mults, 0.0)
        return update + wd * factor * param if factor else update

    def update(updates, params):
        return jax.tree_util.tree_map_with_path(add, updates, params)

    return optax.stateless(update)


def scale_by_trust_ratio(mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Scales each update to the norm of its parameter (LAMB, arXiv 1904.00962 algorithm 2), where
    either is not 0.

    What does not decay by `mults` passes, as in apex's FusedLAMB and timm's Lamb: gains, biases and
    tokens then take Adam's step. Layers that are stacked for scan have a ratio each.
    """
    ratio = optax.scale_by_trust_ratio()

    def scale(update, param):
        return ratio.update(update, optax.EmptyState(), param)[0]

    def by_path(path, update, param):
        if not value_of(path, mults, 0.0):
            return update
        is_stacked = "encoderblock" in path_name(path).split("/")
        return (jax.vmap(scale) if is_stacked else scale)(update, param)

    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(by_path, updates, params)
    )


def decay_and_mults(config, depth: int) -> list[optax.GradientTransformation]:
    """What follows the optimizer: weight decay, the trust ratio of lamb, and the factors of the
    learning rate.

    All of it is multiplied by the learning rate. AdamW's decay is multiplied by that of the
    parameter, so it comes before the multipliers; big_vision's by the shape of the schedule only,
    so it comes after, divided by lr. lamb's belongs to the update whose norm counts.
    """
    mults = [scale_by_path(config.lr_mults)] if config.lr_mults else []
    mults += [scale_by_layer(config.layer_decay, depth)] if config.layer_decay != 1.0 else []
    times_lr = config.name == "lamb" or config.wd_times_lr
    decay = (
        [decay_by_path(config.wd if times_lr else config.wd / config.lr, config.wd_mults)]
        if config.wd
        else []
    )
    if config.name == "lamb":
        return [*decay, scale_by_trust_ratio(config.wd_mults), *mults]
    return decay + mults if times_lr else mults + decay


def freeze(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """`tx` for what does not match `pattern`. What matches is never changed, has no state, and
    counts in no norm.
    """

    def labels(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: value_of(path, [(pattern, "frozen")], "trained"), tree
        )

    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def make_optimizer(config, params, total_steps: int):
    """Builds clip -> optimizer -> weight decay (-> trust ratio) -> learning rate, for what is not
    frozen.

    Args:
      config: the `optim` part of a config.
      params: parameter tree, shapes suffice.
      total_steps: updates of the run.

    Returns:
      (tx, schedule): the optax transformation, and the learning rate by step.

    Raises:
      ValueError: unknown optimizer or schedule.
      UserError: a pattern that matches no parameter.
    """
    if config.name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {config.name!r}: use one of {', '.join(OPTIMIZERS)}")
    extra = {
        key: config[key]
        for key in ("end_lr", "power", "timescale", "shift", "stairs")
        if key in config
    }
    schedule = make_schedule(
        config.schedule,
        config.lr,
        total_steps,
        config.warmup_steps,
        cooldown_steps=config.cooldown_steps,
        **extra,
    )
    uses_wd_mults = config.wd or config.name == "lamb"
    depth = num_blocks(params)
    if config.layer_decay != 1.0 and not depth:
        raise UserError(
            f"config key optim.layer_decay={config.layer_decay} needs a model with encoder blocks: "
            "set it to 1"
        )
    check_patterns("lr_mults", [pattern for pattern, _ in config.lr_mults], params)
    check_patterns(
        "wd_mults", [pattern for pattern, _ in config.wd_mults] if uses_wd_mults else [], params
    )
    check_patterns("frozen", [config.frozen] if config.frozen else [], params)
    tx = optax.chain(
        clip_by_global_norm(config.grad_clip_norm) if config.grad_clip_norm else optax.identity(),
        OPTIMIZERS[config.name](config),
        *decay_and_mults(config, depth),
        optax.scale_by_learning_rate(schedule),
    )
    return freeze(tx, config.frozen) if config.frozen else tx, schedule
