"""Which values a config may have: choices, ranges, the branches that keys belong to, and what ties
keys together.
"""

import itertools
import re

import ml_collections

from vit_jax.errors import UserError

# Key -> the choice that it belongs to. A key that is given while another choice is made is an
# error.
BRANCHES = {
    "model.remat_names": ("model.remat", ("names",)),
    "model.posemb_at": ("model.posemb", ("learn", "learn2d")),
    "optim.wd_times_lr": ("optim.name", ("adam", "sgd", "adafactor")),
    "optim.b1": ("optim.name", ("adam", "lamb")),
    "optim.b2": ("optim.name", ("adam", "lamb")),
    "optim.eps": ("optim.name", ("adam", "lamb")),
    "optim.momentum": ("optim.name", ("sgd", "adafactor")),
    "optim.nesterov": ("optim.name", ("sgd",)),
    "optim.beta2_cap": ("optim.name", ("adafactor",)),
    "optim.clipping_threshold": ("optim.name", ("adafactor",)),
    "optim.end_lr": ("optim.schedule", ("linear", "polynomial")),
    "optim.power": ("optim.schedule", ("polynomial",)),
    "optim.timescale": ("optim.schedule", ("rsqrt",)),
    "optim.shift": ("optim.schedule", ("rsqrt",)),
    "optim.stairs": ("optim.schedule", ("stair",)),
    "data.mixture": ("data.name", ("mixture",)),
    "data.area_min": ("data.crop", ("inception",)),
    "data.color_jitter": ("data.three_augment", (True,)),
    "data.randaug_magnitude": ("data.randaug_layers", (1, 2, 3, 4)),
    "evals.*.data.fraction": ("evals.*.data.crop", ("central",)),
    "evals.*.data.train_split": ("evals.*.type", ("fewshot", "knn", "linear_probe")),
    "evals.*.among": ("evals.*.type", ("classification",)),
    "evals.*.shots": ("evals.*.type", ("fewshot",)),
    "evals.*.seeds": ("evals.*.type", ("fewshot",)),
    "evals.*.l2": ("evals.*.type", ("fewshot",)),
    "evals.*.neighbours": ("evals.*.type", ("knn",)),
    "evals.*.temperature": ("evals.*.type", ("knn",)),
}

CHOICES = {
    "prng": ("threefry2x32", "rbg"),
    "loss": ("softmax_xent", "sigmoid_xent", "multilabel_xent"),
    "model.pool": ("tok", "gap", "map"),
    "model.posemb": ("learn", "learn2d", "relative", "sincos2d", "none"),
    "model.posemb_at": ("stem", "every", "shared"),
    "model.gelu": ("tanh", "erf"),
    "model.droppath_shape": ("linear", "constant"),
    "model.remat": ("none", "names", "dots", "full"),
    "model.dtype": ("float32", "bfloat16"),
    "model.softmax_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "einsum", "splash", "cudnn", "blockwise"),
    "data.crop": ("inception", "random", "simple", "resize"),
    "data.method": ("bilinear", "bicubic"),
    "data.randaug_layers": (0, 1, 2, 3, 4),
    "data.on_corrupt": ("error", "skip"),
    "optim.name": ("adam", "sgd", "adafactor", "lamb"),
    "optim.schedule": ("cosine", "linear", "polynomial", "rsqrt", "stair", "constant"),
    "optim.momentum_dtype": ("float32", "bfloat16"),
    "evals.*.type": ("classification", "fewshot", "knn", "linear_probe"),
    "vtab.protocol": ("vit", "lightweight"),
    "vtab.score": ("mean", "median"),
    "evals.*.among": ("all", "present"),
    "evals.*.data.crop": ("resize", "central"),
    "evals.*.data.method": ("", "bilinear", "bicubic"),
}

# Key -> type of its numbers, the smallest and the largest.
NUMBERS = {
    "vtab.lrs": (float, 0.0, 1e6),
    "vtab.steps": (int, 1, 2**31 - 1),
    "evals.*.shots": (int, 1, 2**31 - 1),
}

# Key -> the two types in each of its pairs. The second is a number with a range below.
PAIRS = {
    "data.mixture": (str, float),
    "optim.lr_mults": (str, float),
    "optim.wd_mults": (str, float),
    "optim.stairs": (int, float),
}

# Key -> (smallest, largest) allowed value; numbers that are not listed: 0 to 2^31 - 1.
RANGES = {
    "seed": (0, 2**31 - 1),
    "image_size": (0, 65_536),
    "accum_steps": (1, 2**31),
    "label_smoothing": (0.0, 0.999),
    "log_every": (1, 2**31),
    "max_skipped": (1, 2**31 - 1),
    "model.head_bias": (-1e6, 1e6),
    "model.dropout": (0.0, 0.999),
    "model.droppath": (0.0, 0.999),
    "data.batch_size": (1, 2**31),
    "data.mixture": (1e-9, 1e9),
    "data.repeats": (1, 64),
    "data.threads": (0, 1024),
    "data.area_min": (1e-6, 1.0),
    "data.color_jitter": (0.0, 1.0),
    "data.erase": (0.0, 1.0),
    "data.randaug_magnitude": (0.0, 30.0),
    "data.prefetch": (1, 1000),
    "optim.lr": (1e-12, 1e6),
    "optim.lr_mults": (1e-12, 1e6),
    "optim.layer_decay": (1e-3, 1.0),
    "optim.power": (1e-3, 1e3),
    "optim.timescale": (1, 2**31 - 1),
    "optim.ema_decay": (0.0, 1.0 - 1e-9),
    "optim.eps": (1e-30, 1.0),
    "optim.b1": (0.0, 1.0 - 1e-9),
    "optim.b2": (0.0, 1.0 - 1e-9),
    "optim.momentum": (0.0, 1.0 - 1e-9),
    "optim.beta2_cap": (0.0, 1.0 - 1e-9),
    "mesh.replica": (-1, 2**31),
    "mesh.data": (-1, 2**31),
    "mesh.fsdp": (-1, 2**31),
    "mesh.tensor": (-1, 2**31),
    "checkpoint.keep_last": (1, 2**31),
    "checkpoint.max_failures": (1, 2**31),
    "evals.*.data.fraction": (1e-3, 1.0),
    "evals.*.seeds": (1, 1000),
    "evals.*.l2": (1e-12, 1e12),
    "evals.*.neighbours": (1, 2**31),
    "evals.*.temperature": (1e-3, 1e3),
    "vtab.seeds": (1, 1000),
}


def check_optim(optim: ml_collections.ConfigDict) -> None:
    """Patterns must be regular expressions, and a stair schedule needs stairs in the order of their
    steps.
    """
    for key in ("lr_mults", "wd_mults", "frozen"):
        patterns = [optim.frozen] if key == "frozen" else [pattern for pattern, _ in optim[key]]
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(
                    f"config key optim.{key} has {pattern!r}, no regular expression ({error}): "
                    "correct it"
                ) from None
    if optim.schedule == "stair":
        steps = [step for step, _ in optim.stairs]
        if not steps or steps[0] < 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise UserError(
                f"config key optim.stairs={optim.stairs} must hold (step, factor) pairs with "
                "ascending steps: correct it, or choose another optim.schedule"
            )


def check_data(data: ml_collections.ConfigDict) -> None:
    """A mixture needs parts, a subset is a share or a number, and repeats divide the batch."""
    if data.name == "mixture" and not data.mixture:
        raise UserError(
            "config key data.mixture is empty with data.name=mixture: give (NAME@SPLIT, weight) "
            "pairs"
        )
    if data.name == "mixture" and data.subset:
        raise UserError(
            "config key data.subset has no effect on a mixture: choose parts by slices, as "
            "NAME@train[:10%]"
        )
    total = sum(weight for _, weight in data.get("mixture", ()))
    if small := [name for name, weight in data.get("mixture", ()) if weight < total / 10_000]:
        raise UserError(
            f"config key data.mixture gives {small[0]} less than 1/10,000 of the weight: give it "
            "more"
        )
    if data.subset and not re.fullmatch(r"\d+(\.\d+)?%|\d+", data.subset):
        raise UserError(
            f"config key data.subset={data.subset!r} is neither a share as 10% nor a number: "
            "correct it"
        )
    if data.batch_size % data.repeats:
        raise UserError(
            f"config key data.batch_size={data.batch_size} is not divisible by "
            f"data.repeats={data.repeats}: change one of them"
        )


def metrics_of(evals: ml_collections.ConfigDict) -> list[str]:
    """The metrics NAME/KEY of evaluations by which checkpoints can be ranked."""
    keys = dict(classification=("top1", "loss"), knn=("knn",), linear_probe=("linear_probe",))
    found = []
    for name, entry in evals.items():
        own = (
            [f"fewshot_{shots}" for shots in entry.shots]
            if entry.type == "fewshot"
            else keys[entry.type]
        )
        found += [f"{name}/{key}" for key in own]
    return found


def check_whole(config: ml_collections.ConfigDict) -> None:
    """Rules that tie several keys together."""
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
    if config.label_smoothing and config.loss == "multilabel_xent":
        raise UserError(
            f"config key label_smoothing={config.label_smoothing} gives every class a part of the "
            "label, which loss=multilabel_xent counts in full: set it to 0"
        )
    if config.model.attention == "cudnn" and config.model.dtype == "float32":
        raise UserError(
            "config key model.attention=cudnn does not compute in float32: set model.dtype=bfloat16"
        )
    if config.model.posemb == "relative" and config.model.attention not in ("auto", "einsum"):
        raise UserError(
            f"config key model.attention={config.model.attention} knows no model.posemb=relative: "
            "use einsum or auto"
        )
    if config.topology and not re.fullmatch(r"\w+:\d+(x\d+){1,2}", config.topology):
        raise UserError(
            f"config key topology={config.topology!r} is no pod: write it as v5e:16x16, or leave "
            "it empty"
        )
    check_data(config.data)
    for name, entry in config.evals.items():
        if config.data.name == "mixture" and not entry.data.name:
            raise UserError(
                f"config key evals.{name}.data.name is empty: name its data set, for training has "
                "several"
            )
    check_optim(config.optim)
    best, measured = (
        config.checkpoint.keep_best,
        [f"eval/{key}" for key in metrics_of(config.evals)],
    )
    if best and best not in measured:
        known = ", ".join(measured) or "none, for evals is empty"
        raise UserError(
            f"config key checkpoint.keep_best={best!r} names no metric of evals: possible are "
            f"{known}"
        )
