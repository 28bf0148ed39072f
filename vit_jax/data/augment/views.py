"""Flips and colours of the views that DINO compares, on the device.

Each view gets a jitter of its colours with probability 0.8, becomes grey with 0.2, and is blurred:
the first global view always, the second with probability 0.1, a local one with 0.5. The second
global view is solarised with probability 0.2. Source: facebookresearch/dino main_dino.py, as
arXiv 2104.14294 takes it from BYOL (arXiv 2006.07733 appendix B). DINOv2's blur is a Gaussian cut
to 9 pixels; ours is Pillow's, as in DINO and iBOT.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.augment import three_augment
from vit_jax.data.shapes import GLOBAL_VIEWS

ORDERS = tuple(itertools.permutations(range(4)))  # of brightness, contrast, saturation and hue
STRENGTH = (0.4, 0.4, 0.2, 0.1)  # of these
JITTER = 0.8  # probabilities
GREY = 0.2
BLUR = (1.0, 0.1, 0.5)  # of the two global views, and of every local one
SOLARIZE = (0.0, 0.2, 0.0)
MIN_RADIUS = 0.1  # of the blur, in pixels
DRAWS = 11


def view_keys(key, first: int, count: int):
    """Keys [batch, count] of the views from number `first` on, from keys [batch] of examples."""
    numbers = jnp.arange(first, first + count)
    return jax.vmap(lambda one: jax.vmap(jax.random.fold_in, (None, 0))(one, numbers))(key)


def choose(key, kind) -> dict:
    """Random choices about views: keys [n], of the `kind` int [n] 0, 1 (global) or 2 (local)."""
    uniform = jax.vmap(lambda one: jax.random.uniform(one, [DRAWS]))(key)
    flip, jitter, grey, blur, solarize, order, radius = uniform[:, :7].T
    change = jnp.array(STRENGTH) * (2 * uniform[:, 7:] - 1)
    spread = three_augment.MAX_RADIUS - MIN_RADIUS
    return dict(
        flip=flip < 0.5,
        jitter=jitter < JITTER,
        factors=change + jnp.array([1, 1, 1, 0]),
        order=jnp.array(ORDERS)[(order * len(ORDERS)).astype(jnp.int32)],
        grey=grey < GREY,
        blur=blur < np.array(BLUR)[kind],
        radius=MIN_RADIUS + spread * radius,
        solarize=solarize < np.array(SOLARIZE)[kind],
    )


def apply(image, chosen: dict, flips: bool):
    """Carries out the choices: uint8 [n, H, W, 3] -> uint8."""

    def where(name: str, changed):
        return jnp.where(chosen[name][:, None, None, None], changed, image)

    if flips:
        image = where("flip", image[:, :, ::-1])
    jittered = three_augment.color_jitter(image, chosen["factors"], chosen["order"])
    image = where("jitter", jittered)
    image = where("grey", three_augment.grayscale(image))
    image = where("blur", three_augment.gaussian_blur(image, chosen["radius"]))
    return where("solarize", three_augment.solarize(image))


def choices(key, first: int, count: int) -> dict:
    """Those of `count` views from number `first` on of every example, keys [batch]: arrays
    [batch * count, ...].
    """
    kind = np.minimum(np.arange(first, first + count), GLOBAL_VIEWS)
    kinds = np.tile(kind, len(key))
    return choose(view_keys(key, first, count).reshape(-1), kinds)


def augment(key, image, first: int, flips: bool):
    """Augments the views from number `first` on of a batch.

    Args:
      key: PRNG keys [batch]; the result for a view depends on its key and number only.
      image: uint8 [batch, views, side, side, 3].
      flips: whether views are flipped left and right with probability 0.5.
    """
    chosen = choices(key, first, image.shape[1])
    flat = image.reshape(-1, *image.shape[2:])
    return apply(flat, chosen, flips).reshape(image.shape)


def augment_views(key, batch: dict, flips: bool) -> dict:
    """`image` and `local` of a batch, augmented; see `augment`."""
    result = dict(image=augment(key, batch["image"], 0, flips))
    if "local" in batch:
        result["local"] = augment(key, batch["local"], GLOBAL_VIEWS, flips)
    return result
