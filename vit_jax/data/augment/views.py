"""Flips and colours of the views that DINO compares, on the device.

Each view gets a jitter of its colours with probability 0.8, becomes grey with 0.2, and is blurred:
the first global view always, the second with probability 0.1, a local one with 0.5. The second
global view is solarised with probability 0.2. Source: facebookresearch/dino main_dino.py, as
arXiv 2104.14294 takes it from BYOL (arXiv 2006.07733 appendix B). The blur is Pillow's, as in DINO
and iBOT; that of DINOv2 is a Gaussian cut to 9 pixels.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.augment import hue, three_augment
from vit_jax.data.shapes import GLOBAL_VIEWS

HUE = 3  # after brightness, contrast and saturation
ORDERS = np.array(list(itertools.permutations(range(4))))
STRENGTH = np.float32([0.4, 0.4, 0.2, 0.1])
JITTER = 0.8  # probabilities
GREY = 0.2
BLUR = (1.0, 0.1, 0.5)  # of the first, the second, and every local view
SOLARIZE = (0.0, 0.2, 0.0)
MIN_RADIUS = 0.1  # of the blur, in pixels
DRAWS = 11  # random numbers about a view


def of_views(values: tuple, count: int) -> np.ndarray:
    """Values of the first, the second, and every local view, for `count` views."""
    return np.array(values)[np.minimum(np.arange(count), GLOBAL_VIEWS)]


def choose(key, count: int) -> dict:
    """Random choices about `count` views of every example: keys [batch] -> arrays [batch, count,
    ...]. Those about a view depend on its number, but not on how many there are.
    """

    def draw(key, number):
        return jax.random.uniform(jax.random.fold_in(key, number), [DRAWS])

    of_example = jax.vmap(draw, (None, 0))
    uniform = jax.vmap(of_example, (0, None))(key, jnp.arange(count))
    flip, jitter, grey, blur, solarize, order, radius = jnp.moveaxis(uniform[..., :7], -1, 0)
    change = STRENGTH * (2 * uniform[..., 7:] - 1)
    return dict(
        flip=flip < 0.5,
        jitter=jitter < JITTER,
        factors=change + np.float32([1, 1, 1, 0]),
        order=jnp.array(ORDERS)[(order * len(ORDERS)).astype(jnp.int32)],
        grey=grey < GREY,
        blur=blur < of_views(BLUR, count),
        radius=MIN_RADIUS + (three_augment.MAX_RADIUS - MIN_RADIUS) * radius,
        solarize=solarize < of_views(SOLARIZE, count),
    )


def color_jitter(image, factors, order):
    """Brightness, contrast, saturation and hue in a given order.

    Args:
      image: uint8 [n, H, W, 3].
      factors: float32 [n, 4]; the last is added to the hue, as a share of the colour circle.
      order: int32 [n, 4], a permutation of 0 to 3.
    """

    def change(image, which):
        turned = hue.turn(image, factors[:, HUE])
        blended = three_augment.jitter(image, factors, which)
        return jnp.where(which[:, None, None, None] == HUE, turned, blended), None

    # Not unrolled: XLA would fuse the four, and compute each once for every use of its result.
    return jax.lax.scan(change, image, order.T)[0]


def carry_out(chosen: dict, image, flips: bool):
    """The choices [n, ...] about views uint8 [n, H, W, 3]."""

    def choose_from(name: str, changed, image):
        return jnp.where(chosen[name][:, None, None, None], changed, image)

    if flips:
        image = choose_from("flip", image[:, :, ::-1], image)
    jittered = color_jitter(image, chosen["factors"], chosen["order"])
    image = choose_from("jitter", jittered, image)
    image = choose_from("grey", three_augment.grayscale(image), image)
    blurred = three_augment.gaussian_blur(image, chosen["radius"])
    image = choose_from("blur", blurred, image)
    return choose_from("solarize", three_augment.solarize(image), image)


def augment_views(key, image, local, flips: bool) -> tuple:
    """(image, local) with flips and changes of colours.

    Args:
      key: PRNG keys [batch]; the result for a view depends on its key and number only.
      image: the global views, uint8 [batch, 2, side, side, 3].
      local: likewise [batch, views, side, side, 3]; None: there are none.
      flips: whether views are flipped left and right with probability 0.5.
    """
    count = GLOBAL_VIEWS + (0 if local is None else local.shape[1])
    chosen = choose(key, count)

    def augment(views, numbers: slice):
        of_these = {name: x[:, numbers].reshape(-1, *x.shape[2:]) for name, x in chosen.items()}
        flat = views.reshape(-1, *views.shape[2:])
        return carry_out(of_these, flat, flips).reshape(views.shape)

    image = augment(image, slice(GLOBAL_VIEWS))
    if local is not None:
        local = augment(local, slice(GLOBAL_VIEWS, None))
    return image, local
