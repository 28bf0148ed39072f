"""Optimizers, assembled from optax."""

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import is_own
from vit_jax.distributed.sharding import path_name
from vit_jax.errors import UserError
from vit_jax.train import muon
from vit_jax.train.own_optimizer import own_optimizer
from vit_jax.train.schedules import half_cosine, make_schedule, own_schedule

LARS_TRUST = 0.001  # of the published code
# Starts of the paths of what follows the encoder, such as head, patch_head, and all of a decoder.
AFTER_ENCODER = re.compile(
    r"decoder/|(\w+_)?head|pre_logits|fc_norm|MAPHead|Transformer/encoder_norm"
)


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

    Second moments of an array are factored over its two largest axes if both are at least 32.
    Factors and clipping are per array, so with `model.scan` all layers count as one array: they
    share one clipping, and the biases of 32 or more layers are factored, too. So scan changes the
    numbers here, as it does in big_vision.
    """
    cap = config.beta2_cap

    def beta2(step, exponent):
        return jnp.minimum(cap, 1.0 - (step + 1.0) ** -exponent)

    scale = optax.scale_by_factored_rms(
        decay_rate=0.8, min_dim_size_to_factor=32, epsilon=1e-30, decay_rate_fn=beta2
    )
    clip = optax.identity()
    if config.clipping_threshold:
        clip = optax.clip_by_block_rms(config.clipping_threshold)
    momentum = optax.identity()
    if config.momentum:
        dtype = config.momentum_dtype
        momentum = optax.ema(config.momentum, debias=False, accumulator_dtype=dtype)
    return optax.chain(scale, clip, momentum)


def lars(config):
    """LARS (arXiv 1708.03888) as in MoCo v3 and MAE: the momentum of gradients, those of decaying
    parameters with their decay and at the scale of the parameter.
    """
    decay = decay_by_path(config.wd, config.wd_mults) if config.wd else optax.identity()
    return optax.chain(decay, scale_by_trust_ratio(config.wd_mults, LARS_TRUST), sgd(config))


def muon_and_adam(config):
    return muon.muon(config, adam(config))


# lamb is adam with what `decay_and_mults` adds after it.
OPTIMIZERS = {"adam": adam, "sgd": sgd, "adafactor": adafactor, "lamb": adam, "lars": lars}
OPTIMIZERS["muon"] = muon_and_adam


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Like optax's, but multiplies by one factor: if each entry is divided, XLA on CPUs writes
    another array, which takes 2 % of a step of B/16.
    """

    def update(updates, params):
        return optax.tree.scale(jnp.minimum(1.0, limit / optax.tree.norm(updates)), updates)

    return optax.stateless(update)


def value_of(path, pairs: Sequence[tuple], default):
    """The value of the first (pattern, value) that matches the whole path of a parameter."""
    name = path_name(path)
    return next((value for pattern, value in pairs if re.fullmatch(pattern, name)), default)


def check_patterns(key: str, patterns: Sequence[str], params) -> None:
    """Raises UserError if a pattern is not the first to match any parameter."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    numbered = [(pattern, number) for number, pattern in enumerate(patterns)]
    used = {value_of(path, numbered, None) for path in paths}
    example = path_name(paths[0]) if paths else "(the model has none)"
    for pattern, number in numbered:
        if number not in used:
            raise UserError(
                f"config key optim.{key}: {pattern!r} matches no parameter that the patterns "
                f"before it leave: patterns match whole paths such as {example}; correct it"
            )


def scale_by_path(mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Multiplies updates by the factor of their parameter; 1 if no pattern matches."""

    def scale(path, update):
        return update * value_of(path, mults, 1.0)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def layer_of(path, depth: int):
    """The layer of a parameter, as in BEiT (arXiv 2106.08254 section 3.2).

    In timm 1.0.31, Transformer/encoder_norm belongs to the last block.

    Returns:
      0 before the blocks, depth + 1 after them; for blocks stacked for scan, int32 [depth].
    """
    name = path_name(path)
    if AFTER_ENCODER.match(name):
        return depth + 1
    block = re.search(r"(^|/)encoderblock_(\d+)/", name)
    if block:
        return int(block[2]) + 1
    if re.search(r"(^|/)encoderblock/", name):
        return jnp.arange(1, depth + 1)
    return 0


def num_blocks(params) -> int:
    """Encoder blocks in a tree of parameters."""
    depth = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = path_name(path)
        if AFTER_ENCODER.match(name):
            continue
        block = re.search(r"/encoderblock_(\d+)/", name)
        if block:
            depth = max(depth, int(block[1]) + 1)
        if "/encoderblock/" in name:
            depth = max(depth, leaf.shape[0])
    return depth


def scale_by_layer(decay: float, depth: int) -> optax.GradientTransformation:
    """Multiplies updates by `decay` to the power of the layers that follow."""

    def scale(path, update):
        factor = jnp.asarray(decay ** (depth + 1 - layer_of(path, depth)), jnp.float32)
        return update * factor.reshape(factor.shape + (1,) * (update.ndim - 1) * bool(factor.ndim))

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates))


def decay_by_path(wd: float, mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Adds `wd` times the factor of the parameter times the parameter; 0 if no pattern matches."""

    def add(path, update, param):
        factor = value_of(path, mults, 0.0)
        return update + wd * factor * param if factor else update

    def update(updates, params):
        return jax.tree_util.tree_map_with_path(add, updates, params)

    return optax.stateless(update)


def rising_decay(wd: Callable, mults: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """`decay_by_path` with `wd` by the number of updates."""

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates, state, params):
        decay = decay_by_path(wd(state.count), mults)
        updates, _ = decay.update(updates, optax.EmptyState(), params)
        return updates, optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(init, update)


def weight_decay(config, total_steps: int, divisor: float) -> optax.GradientTransformation:
    """Adds the decay of the config, divided by `divisor`."""
    if not config.wd_end:
        return decay_by_path(config.wd / divisor, config.wd_mults)

    def wd(count):
        return half_cosine(config.wd, config.wd_end, count / total_steps) / divisor

    return rising_decay(wd, config.wd_mults)


def scale_by_trust_ratio(
    mults: Sequence[tuple[str, float]], trust: float = 1.0
) -> optax.GradientTransformation:
    """Scales each update to the norm of its parameter (LAMB, arXiv 1904.00962 algorithm 2), times
    `trust`.

    Parameters that do not decay by `mults` are left out, as in apex's FusedLAMB and the Lamb of
    timm 1.0.31: gains, biases and tokens take Adam's step. Layers that are stacked for scan have a
    ratio each.
    """
    ratio = optax.scale_by_trust_ratio(trust_coefficient=trust)

    def scale(update, param):
        return ratio.update(update, optax.EmptyState(), param)[0]

    def by_path(path, update, param):
        if not value_of(path, mults, 0.0):
            return update
        if "encoderblock" in path_name(path).split("/"):
            return jax.vmap(scale)(update, param)
        return scale(update, param)

    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(by_path, updates, params)
    )


def decay_and_mults(config, depth: int, total_steps: int) -> list[optax.GradientTransformation]:
    """What follows the optimizer: weight decay, the trust ratio of lamb, and learning-rate factors.

    All of it is multiplied by the learning rate. AdamW's decay is multiplied by that of the
    parameter, so it comes before the factors; big_vision's by the shape of the schedule only, so it
    comes after them, divided by lr. lamb's is a part of the update whose norm counts; without decay
    there is no trust ratio, and lamb is adam. lars has decayed before its momentum.
    """
    mults = []
    if config.lr_mults:
        mults.append(scale_by_path(config.lr_mults))
    if config.layer_decay != 1.0:
        mults.append(scale_by_layer(config.layer_decay, depth))
    times_lr = config.name in ("lamb", "lars") or config.wd_times_lr
    decay = []
    if (config.wd or config.wd_end) and config.name != "lars":
        divisor = 1.0 if times_lr else config.lr
        decay.append(weight_decay(config, total_steps, divisor))
        if config.name == "lamb":
            decay.append(scale_by_trust_ratio(config.wd_mults))
    return decay + mults if times_lr else mults + decay


def freeze(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """`tx` for parameters that do not match `pattern`. Those that do never change, have no state,
    and count in no norm.

    optax.selective_transform does the same under other names, which saved states do not have.
    """

    def label(path, _):
        return value_of(path, [(pattern, "frozen")], "trained")

    def labels(tree):
        return jax.tree_util.tree_map_with_path(label, tree)

    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def without_gradients(params, pattern: str):
    """`params`, of which those that match `pattern` get no gradient: what leads only to them in the
    backward pass is not computed.
    """
    if not pattern:
        return params

    def stop(path, param):
        is_frozen = value_of(path, [(pattern, True)], False)
        return jax.lax.stop_gradient(param) if is_frozen else param

    return jax.tree_util.tree_map_with_path(stop, params)


def schedule_of(config, total_steps: int, whole=None):
    """The learning rate by step; arguments as for `make_optimizer`."""
    if whole is not None and is_own(config.schedule):
        return own_schedule(whole, total_steps)
    options = ("end_lr", "power", "timescale", "shift", "stairs", "stairs_after")
    return make_schedule(
        config.schedule,
        config.lr,
        total_steps,
        config.warmup_steps,
        cooldown_steps=config.cooldown_steps,
        **{key: config[key] for key in options if key in config},
    )


def make_optimizer(config, params, total_steps: int, whole=None):
    """Builds clip -> optimizer -> weight decay (-> trust ratio) -> learning rate, for what is not
    frozen.

    Args:
      config: the `optim` part of a config.
      params: parameter tree, shapes suffice.
      total_steps: updates of the run.
      whole: the config, for an optimizer or schedule of the user's own.

    Returns:
      (tx, schedule): the optax transformation, and the learning rate by step.

    Raises:
      ValueError: unknown optimizer or schedule.
      UserError: a pattern that matches no parameter.
    """
    is_ours = whole is None or not is_own(config.name)
    if is_ours and config.name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {config.name!r}: use one of {', '.join(OPTIMIZERS)}")
    schedule = schedule_of(config, total_steps, whole)
    if is_ours:
        optimizer = OPTIMIZERS[config.name](config)
    else:
        optimizer = own_optimizer(whole, params, schedule, total_steps)
    depth = num_blocks(params)
    if config.layer_decay != 1.0 and not depth:
        raise UserError(
            f"config key optim.layer_decay={config.layer_decay} needs a model with encoder blocks: "
            "set it to 1"
        )
    if config.name == "muon" and not depth:
        raise UserError(
            "config key optim.name=muon needs a model with encoder blocks: use adam for this one"
        )
    check_patterns("lr_mults", [pattern for pattern, _ in config.lr_mults], params)
    if config.wd or config.wd_end or config.name == "lars":  # whose trust ratio they choose
        check_patterns("wd_mults", [pattern for pattern, _ in config.wd_mults], params)
    clip = optax.identity()
    if config.grad_clip_norm:
        clip = clip_by_global_norm(config.grad_clip_norm)
    tx = optax.chain(
        clip,
        optimizer,
        *decay_and_mults(config, depth, total_steps),
        optax.scale_by_learning_rate(schedule),
    )
    if config.frozen:
        check_patterns("frozen", [config.frozen], params)
        tx = freeze(tx, config.frozen)
    return tx, schedule
