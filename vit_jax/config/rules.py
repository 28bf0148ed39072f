"""Rules that tie several keys of a config together."""

import itertools
import re

import ml_collections

from vit_jax.config.defaults import KEYS, flatten
from vit_jax.config.key import is_own
from vit_jax.config.objectives import OF_LABELS, has_views, uses_labels
from vit_jax.errors import UserError


def check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"config key {key} has {pattern!r}, which is not a valid regular expression "
            f"({error}): correct it"
        ) from None


def check_optim(optim: ml_collections.ConfigDict) -> None:
    """Patterns are regular expressions, lars has one weight decay, and a stair schedule has stairs
    in ascending order.
    """
    check_pattern("optim.frozen", optim.frozen)
    for key in ("lr_mults", "wd_mults"):
        for pattern, _ in optim[key]:
            check_pattern(f"optim.{key}", pattern)
    if optim.name == "lars" and optim.wd_end:
        raise UserError(
            f"config key optim.wd_end={optim.wd_end} has no effect with optim.name=lars, whose "
            "weight decay is constant: set it to 0"
        )
    if optim.schedule == "stair":
        steps = [step for step, _ in optim.stairs]
        if not steps or steps[0] < 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise UserError(
                f"config key optim.stairs={optim.stairs} must hold (step, factor) pairs with "
                "ascending steps: correct it, or choose another optim.schedule"
            )


def check_data(data: ml_collections.ConfigDict) -> None:
    """A mixture needs parts, a subset is a share or a number, timm's magnitudes end at 10, and
    repeats divide the batch.
    """
    if data.name == "mixture" and not data.mixture:
        raise UserError(
            "config key data.mixture is empty with data.name=mixture: give (NAME@SPLIT, weight) "
            "pairs"
        )
    if data.name == "mixture" and data.subset:
        raise UserError(
            "config key data.subset has no effect on a mixture: choose parts by slices, such as "
            "NAME@train[:10%]"
        )
    if data.name == "mixture" and data.class_balance:
        raise UserError(
            f"config key data.class_balance={data.class_balance} has no effect on a mixture, whose "
            "weights say how often each part is seen: set it to 0"
        )
    parts = data.get("mixture", ())
    total = sum(weight for _, weight in parts)
    small = [name for name, weight in parts if weight < total / 10_000]
    if small:
        raise UserError(
            f"config key data.mixture gives {small[0]} less than 1/10,000 of the weight: give it "
            "more"
        )
    if data.subset and not re.fullmatch(r"\d+(\.\d+)?%|\d+", data.subset):
        raise UserError(
            f"config key data.subset={data.subset!r} is neither a share such as 10% nor a number: "
            "correct it"
        )
    if data.get("randaug_ops", "big_vision") != "big_vision" and data.randaug_magnitude > 10:
        raise UserError(
            f"config key data.randaug_magnitude={data.randaug_magnitude} is more than 10, to which "
            f"data.randaug_ops={data.randaug_ops} is limited: lower it"
        )
    if data.batch_size % data.repeats:
        raise UserError(
            f"config key data.batch_size={data.batch_size} is not divisible by "
            f"data.repeats={data.repeats}: change one of them"
        )


def check_views(views: ml_collections.ConfigDict) -> None:
    """The areas of crops are ranges."""
    for name in ("global_area", "local_area"):
        area = views[name]
        if len(area) != 2 or area[0] > area[1]:
            raise UserError(
                f"config key data.views.{name}={area} must be the smallest and the largest share "
                "of an image, such as (0.32, 1.0): correct it"
            )


def metrics_of(evals: ml_collections.ConfigDict) -> list[str]:
    """The metrics NAME/KEY of evaluations by which checkpoints can be ranked."""
    names = []
    for name, entry in evals.items():
        if is_own(entry.type):
            continue
        keys = dict(classification=("top1", "loss"), knn=("knn",), linear_probe=("linear_probe",))
        if entry.type == "fewshot":
            keys["fewshot"] = [f"fewshot_{shots}" for shots in entry.shots]
        names += [f"{name}/{key}" for key in keys[entry.type]]
    return names


def check_without_labels(objective: str, name: str, entry: ml_collections.ConfigDict) -> None:
    """The evaluation `evals.NAME` needs nothing that a run without labels does not have."""
    if entry.type == "classification":
        raise UserError(
            f"config key evals.{name}.type=classification needs a head, but objective={objective} "
            "trains without labels: choose knn, linear_probe or fewshot"
        )
    if entry.data.rest:
        raise UserError(
            f"config key evals.{name}.data.rest=True needs the labels of the training data, which "
            f"objective={objective} does not read: choose a part by slices, such as train[90%:]"
        )


def check_evals(config: ml_collections.ConfigDict) -> None:
    """Every evaluation has a data set, and checkpoints are ranked by a metric that is measured."""
    for name, entry in config.evals.items():
        if not uses_labels(config):
            check_without_labels(config.objective, name, entry)
        if entry.data.rest and entry.data.name:
            raise UserError(
                f"config key evals.{name}.data.name={entry.data.name} has no effect with "
                "data.rest=True, which is the rest of the training data: set one of them"
            )
        if config.data.name == "mixture" and not entry.data.name:
            raise UserError(
                f"config key evals.{name}.data.name is empty: name its data set, for training has "
                "several"
            )
    best = config.checkpoint.keep_best
    if best:
        check_metric(config, f"config key checkpoint.keep_best={best!r}", best)


def check_metric(config: ml_collections.ConfigDict, what: str, metric: str) -> None:
    """Raises UserError, which begins with `what`, if no evaluation measures a metric.

    Those of an evaluation of the user's own are known when it is tried.
    """
    own = [f"eval/{name}/" for name, entry in config.evals.items() if is_own(entry.type)]
    measured = [f"eval/{name}" for name in metrics_of(config.evals)]
    if metric not in measured and not metric.startswith(tuple(own)):
        known = ", ".join(measured) or "none, for evals is empty"
        raise UserError(f"{what} is not a metric of evals: possible are {known}")


def check_early_stopping(config: ml_collections.ConfigDict) -> None:
    """It needs checkpoints, and a metric that says which is the best."""
    checkpoint = config.checkpoint
    if config.early_stopping and not (checkpoint.keep_best and checkpoint.every):
        raise UserError(
            f"config key early_stopping={config.early_stopping} needs checkpoint.keep_best, such "
            "as eval/val/top1, and checkpoint.every, the steps between checkpoints: set both"
        )


def check_model(config: ml_collections.ConfigDict) -> None:
    """A way to compute attention supports dtype and position embedding, and a loss the labels."""
    model = config.model
    if model.attention == "cudnn" and model.dtype == "float32":
        raise UserError(
            "config key model.attention=cudnn does not compute in float32: set model.dtype=bfloat16"
        )
    if model.posemb == "relative" and model.attention not in ("auto", "einsum"):
        raise UserError(
            f"config key model.attention={model.attention} does not support "
            "model.posemb=relative: use einsum or auto"
        )
    if config.label_smoothing and config.loss == "multilabel_xent":
        raise UserError(
            f"config key label_smoothing={config.label_smoothing} gives every class a part of the "
            "label, which loss=multilabel_xent counts in full: set it to 0"
        )


def check_objective(config: ml_collections.ConfigDict) -> None:
    """`data.unlabelled` is for an objective of the user's own. Without labels, no key is about
    them, their loss or a head.
    """
    if config.data.unlabelled and not is_own(config.objective):
        raise UserError(
            f"config key data.unlabelled=True is for an objective of your own, but objective="
            f"{config.objective} decides itself: leave it out"
        )
    if uses_labels(config):
        return
    values = dict(flatten(config))
    for name in OF_LABELS:
        if values[name] != KEYS[name].default:
            raise UserError(
                f"config key {name}={values[name]} has no effect with objective="
                f"{config.objective}, which uses no labels: leave it out"
            )


def check_spikes(config: ml_collections.ConfigDict) -> None:
    """A spike is above the median, and there are checkpoints to go back to."""
    factor = config.spikes.factor
    if 0 < factor <= 1:
        raise UserError(
            f"config key spikes.factor={factor} calls half of all losses high: set it above 1, or "
            "to 0 for off"
        )
    if factor and not config.checkpoint.every:
        raise UserError(
            f"config key spikes.factor={factor} needs checkpoints to go back to, but "
            "checkpoint.every=0: set both, or none"
        )


def check_whole(config: ml_collections.ConfigDict) -> None:
    """All rules that tie several keys together."""
    if config.total_steps and config.total_epochs:
        raise UserError(
            f"config keys total_steps={config.total_steps} and total_epochs={config.total_epochs} "
            "are both set: set one of them to 0"
        )
    if config.init_from and config.branch_from:
        raise UserError(
            f"config keys init_from={config.init_from} and branch_from={config.branch_from} are "
            "both set: a run starts from one of them"
        )
    if config.data.batch_size % config.accum_steps:
        raise UserError(
            f"config key data.batch_size={config.data.batch_size} is not divisible by "
            f"accum_steps={config.accum_steps}: change one of them"
        )
    if config.topology and not re.fullmatch(r"\w+:\d+(x\d+){1,2}", config.topology):
        raise UserError(
            f"config key topology={config.topology!r} is not a pod: write it like v5e:16x16, or "
            "leave it empty"
        )
    check_model(config)
    check_objective(config)
    check_data(config.data)
    if has_views(config):
        check_views(config.data.views)
    check_evals(config)
    check_optim(config.optim)
    check_spikes(config)
    check_early_stopping(config)
