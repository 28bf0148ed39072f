"""The part of the images that is held out, and how well it measures an accuracy. Pure functions."""

import math

import numpy as np

from vit_jax.data.sources import splits
from vit_jax.errors import UserError
from vit_jax.train.recipe.choose import Choice, Sizes, up_to
from vit_jax.train.recipe.facts import Data

# Up to so many images, this share of them in percent. arXiv 2010.11929 appendix B.1.1 holds out
# 10 % of small data sets, 2 % of CIFAR, 1 % of ImageNet; fewer images need a larger share.
HELD_OUT = ((1_000, 20), (20_000, 10), (math.inf, 2))
LARGER = (25, 33, 40, 50)  # shares to try, in percent, if a class would have no image in it
DRAWS = 10  # of the part, likewise


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` independent images (Wilson 1927)."""
    z2 = 1.96**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * share * (1 - share) / count + z2**2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def uncertainty(count: int) -> str:
    """How well so many images measure an accuracy, such as "+-6 points"."""
    low, high = interval(0.9, count)
    points = max(1, round(100 * (high - low) / 2))
    images = "1 image measures" if count == 1 else f"{count:,} images measure"
    return f"{images} an accuracy of 90 % to about +-{points} points"


def part_without(labels: np.ndarray, percent: float, seed: int, where: str) -> np.ndarray:
    """bool [images]: what `data.subset` trains on if so much is held out."""
    chosen = splits.stratified(labels, f"{100 - percent:g}%", seed, where)
    return np.isin(np.arange(len(labels)), chosen)


def find_part(data: Data) -> tuple[float, int, np.ndarray]:
    """(percent, seed, bool [images] to train on): the smallest share to hold out with which every
    class has an image to train on and, if it has two, one that is held out.

    Raises:
      UserError: there is none with images of all classes to train on.
    """
    smallest = up_to(HELD_OUT, len(data.labels))
    present = data.counts > 0
    several = data.counts > 1
    second_best = None
    for percent in (smallest, *(share for share in LARGER if share > smallest)):
        for seed in range(DRAWS):
            trained = part_without(data.labels, percent, seed, data.name)
            counts = data.count(data.labels[trained])
            if (counts[present] == 0).any() or trained.all():
                continue
            if (counts < data.counts)[several].all():
                return percent, seed, trained
            second_best = second_best or (percent, seed, trained)
    if second_best:
        return second_best
    alone = np.flatnonzero(data.counts == 1)
    names = [data.class_names[i] for i in alone[:3].tolist()]
    raise UserError(
        f"{len(alone)} classes of {data.name} {data.split} have one image each ({', '.join(names)}"
        "...): add images of them, or remove the classes"
    )


def hold_out(data: Data, wanted: str = "") -> tuple[Choice, Sizes]:
    """What decides about learning rates, length and checkpoint.

    Args:
      wanted: such as "20%" by the user; "": a split for validation, else by the number of images.
    """
    count = len(data.labels)
    if data.val and not wanted:
        sizes = Sizes(count, data.num_val)
        values = {"evals.held_out.data.split": data.val}
        return Choice("held out", f"split {data.val}", uncertainty(data.num_val), values), sizes
    if wanted:
        percent = float(wanted.rstrip("%"))
        seed = 0
        trained = part_without(data.labels, percent, seed, data.name)
    else:
        percent, seed, trained = find_part(data)
    sizes = Sizes(int(trained.sum()), int(count - trained.sum()))
    if not sizes.held_out:
        raise UserError(f"{percent:g}% of {count} images is none: hold out more, or add images")
    values = {
        "data.subset": f"{100 - percent:g}%",
        "data.subset_seed": seed,
        "evals.held_out.data.rest": True,
    }
    chosen = f"{sizes.held_out:,} of {count:,} images"
    return Choice("held out", chosen, uncertainty(sizes.held_out), values), sizes
