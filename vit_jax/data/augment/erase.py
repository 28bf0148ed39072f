"""Random erasing on the device, after normalisation."""

import math

import jax
import jax.numpy as jnp


def inside(box, height: int, width: int):
    """bool [H, W], whether a pixel is inside the box (top, bottom, left, right)."""
    top, bottom, left, right = box
    row = jnp.arange(height)[:, None]
    column = jnp.arange(width)
    return (row >= top) & (row < bottom) & (column >= left) & (column < right)


def erased_box(key, probability: float, height: int, width: int):
    """The box (top, bottom, left, right) to erase; empty with probability 1 - `probability`.

    As in timm 0.3.2 to 1.0.31, its share of the area is uniform in [0.02, 1/3], and the logarithm
    of its aspect ratio is uniform in [log 0.3, -log 0.3]. Of 10 such boxes, the first is used that
    is smaller than the image in both directions.
    """
    box_key, corner_key, erases_key = jax.random.split(key, 3)
    area, aspect = jax.random.uniform(box_key, [2, 10])
    area = (0.02 + (1 / 3 - 0.02) * area) * (height * width)
    aspect = jnp.exp(math.log(0.3) * (1 - 2 * aspect))
    heights = jnp.round(jnp.sqrt(area * aspect))
    widths = jnp.round(jnp.sqrt(area / aspect))
    fits = (heights < height) & (widths < width)
    first = fits.argmax()
    erases = jax.random.bernoulli(erases_key, probability) & fits[first]
    size = jnp.where(erases, jnp.stack([heights[first], widths[first]]), 0).astype(jnp.int32)
    top, left = jax.random.randint(corner_key, [2], 0, jnp.array([height, width]) - size + 1)
    return top, top + size[0], left, left + size[1]


def erase(key, image, probability: float):
    """Random erasing (arXiv 1708.04896) with the settings of timm 0.3.2 for DeiT: one rectangle is
    replaced by standard normal noise per pixel.

    Args:
      key: PRNG keys [batch]; the result for an image depends on its own key only.
      image: [batch, H, W, C] float, normalised.
      probability: of erasing a rectangle of an image.
    """

    def one(key, image):
        box_key, noise_key = jax.random.split(key)
        box = erased_box(box_key, probability, *image.shape[:2])
        noise = jax.random.normal(noise_key, image.shape, image.dtype)
        return jnp.where(inside(box, *image.shape[:2])[:, :, None], noise, image)

    return jax.vmap(one)(key, image)
