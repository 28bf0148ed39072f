"""Evaluations of the user's own: `evals.NAME.type` = MODULE:FUNCTION, which gets what it has
parameters for and returns metrics, a dict of numbers.
"""

import numbers
from collections.abc import Callable, Mapping

import numpy as np

from vit_jax.config import is_own, own_parts
from vit_jax.errors import UserError

# Arguments for which it is called before there are any results: anything may be in them.
TRIED = {"logits", "features", "label", "train_features", "train_label", "num_classes"}
TRIED |= {"settings", "config"}
FROM_TRAIN = {"train_features", "train_label"}
EXAMPLES = 512  # of the trial; more if there are many classes
MOST_EXAMPLES = 4096
CLASSES = 10  # of the data, if the model has no head
LABELS = 3  # of an image that has several


def part_of(config, name: str) -> own_parts.OwnPart:
    """The evaluation `evals.NAME`, of the user's own."""
    return own_parts.part(f"evals.{name}.type", config.evals[name].type, config)


def is_classified(part: own_parts.OwnPart) -> bool:
    """Whether labels are classes of the model; otherwise they are those of the data alone, as for
    evaluations that learn from features.
    """
    reads_features = part.wanted & (FROM_TRAIN | {"features"})
    return "logits" in part.wanted or not reads_features


def run(part: own_parts.OwnPart, ready: Mapping, later: Mapping[str, Callable]) -> dict:
    """The metrics of an evaluation.

    Args:
      ready: arguments by name.
      later: others, as functions that compute them if they are wanted.
    """
    computed = {name: make() for name, make in later.items() if name in part.wanted}
    return check_metrics(part, part(**ready, **computed))


def check_metrics(part: own_parts.OwnPart, result) -> dict[str, float]:
    """The result as floats by name; a UserError if it is anything else."""
    if not isinstance(result, Mapping) or not result:
        raise part.error(
            f"returns {own_parts.shown(result)}, but it must return a dict of numbers by name"
        )
    for name, value in result.items():
        is_number = isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
        if not isinstance(name, str) or not name.isprintable() or not is_number:
            raise part.error(
                f"returns {name!r}: {own_parts.shown(value)} in its dict, but it must return "
                "numbers by name"
            )
    return {name: float(value) for name, value in result.items()}


def check(config, model, set_size: int = 0) -> None:
    """Tries every evaluation of the user's own on random numbers, if it wants nothing else.

    Args:
      set_size: labels of an example of the training data at most, if it may have several; else 0,
        also if it is not known.

    Raises:
      UserError: one fails, or returns no metrics, or not the one that ranks checkpoints.
    """
    best = config.checkpoint.keep_best
    for name, entry in config.evals.items():
        if not is_own(entry.type):
            continue
        part = part_of(config, name)
        if not part.wanted <= TRIED:
            continue
        metrics = try_out(part, entry, model, set_size)
        known = [f"eval/{name}/{metric}" for metric in metrics]
        if best.startswith(f"eval/{name}/") and best not in known:
            raise UserError(
                f"config key checkpoint.keep_best={best!r} is not a metric of evals: {part.name} "
                f"has {', '.join(known)}"
            )


def try_out(part: own_parts.OwnPart, entry, model, set_size: int) -> dict[str, float]:
    """The metrics of random numbers. An evaluation of data that may have one label or several is
    right if it takes one of both.
    """
    if set_size and not entry.data.name:
        return check_metrics(part, part(**trial(entry, model, part, set_size)))
    try:
        return check_metrics(part, part(**trial(entry, model, part)))
    except UserError:
        if not is_classified(part):  # which has one label
            raise
        try:
            return check_metrics(part, part(**trial(entry, model, part, LABELS)))
        except UserError:
            pass
        raise


def trial(entry, model, part: own_parts.OwnPart, set_size: int = 0) -> dict:
    """Arguments of random numbers, with every class in the labels if there are not too many."""
    classes = model.num_classes or CLASSES
    count = min(max(EXAMPLES, 4 * classes), MOST_EXAMPLES)
    rng = np.random.default_rng(0)
    label = (rng.permutation(count) % classes).astype(np.int32)
    if set_size:
        label = several(label, classes, set_size)
    given = dict(label=label, train_label=label, num_classes=classes, settings=entry)
    widths = dict(logits=classes, features=model.width, train_features=model.width)
    for name, width in widths.items():
        if name in part.wanted:
            given[name] = rng.standard_normal((count, width), np.float32)
    return given


def several(label: np.ndarray, classes: int, set_size: int) -> np.ndarray:
    """int32 [N, set_size], padded with -1: each label, and up to `set_size` - 1 others."""
    offset = np.arange(set_size)
    most = min(set_size, classes)
    amount = 1 + np.arange(len(label)) % most
    return np.where(offset < amount[:, None], (label[:, None] + offset) % classes, -1).astype("i4")
