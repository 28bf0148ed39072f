"""3-Augment of DeiT III (arXiv 2204.07118) for a batch on the device, with Pillow's definitions.

One of greyscale, solarisation and Gaussian blur, each with equal probability; then a jitter of
brightness, contrast and saturation, as in torchvision's ColorJitter. Every function takes and
returns uint8 [batch, H, W, 3].
"""

import itertools

import jax
import jax.numpy as jnp

ORDERS = tuple(itertools.permutations(range(3)))  # of brightness, contrast and saturation
MAX_RADIUS = 2.0  # of the blur


def luma(image):
    """uint8 [batch, H, W, 3] -> int32 [batch, H, W, 1]: ITU-R 601 in Pillow's integers."""
    weighted = image.astype(jnp.int32) * jnp.array([19595, 38470, 7471])
    return (weighted.sum(-1, keepdims=True) + 32768) >> 16


def grayscale(image):
    """The luma in all three channels."""
    return jnp.broadcast_to(luma(image), image.shape).astype(jnp.uint8)


def solarize(image):
    """Inverts the pixels from 128 on."""
    return jnp.where(image < 128, image, 255 - image)


def box_weights(radius):
    """Weights of the box filter that approximates a Gaussian when applied three times.

    A box may have a fractional radius r + f: 2 r + 1 pixels count fully, and one more on each side
    with weight f (Gwosdek et al. 2011, "Theoretical foundations of Gaussian convolution by extended
    box filtering", eq. 13). Here r is 0 or 1.

    Args:
      radius: of the Gaussian, float32 [...] up to 2.

    Returns:
      Weights of the pixels at distance 0, 1 and 2, uint32 [...] each, in units of 2 ** -24.
    """
    variance = radius**2 / 3
    r = jnp.floor((jnp.sqrt(12 * variance + 1) - 1) / 2)
    f = (2 * r + 1) * (r * (r + 1) - 3 * variance) / (6 * (variance - (r + 1) ** 2))
    full = (2**24 / (2 * (r + f) + 1)).astype(jnp.uint32)
    part = (2**24 - (2 * r.astype(jnp.uint32) + 1) * full) // 2
    return full, jnp.where(r > 0, full, part), jnp.where(r > 0, part, 0)


def box(image, weights, axis: int):
    """One box filter along one axis, rounded to uint8; pixels of the border are repeated."""
    size = image.shape[axis]
    border = [(0, 0)] * 4
    border[axis] = (2, 2)
    padded = jnp.pad(image, border, mode="edge").astype(jnp.uint32)
    shifted = [jax.lax.slice_in_dim(padded, i, i + size, axis=axis) for i in range(5)]
    at0, at1, at2 = (weight[:, None, None, None] for weight in weights)
    total = at0 * shifted[2] + at1 * (shifted[1] + shifted[3]) + at2 * (shifted[0] + shifted[4])
    return (total + 2**23 >> 24).astype(jnp.uint8)


def gaussian_blur(image, radius):
    """Pillow's ImageFilter.GaussianBlur: three boxes per axis, each rounded to uint8.

    Within one level of Pillow, and mostly equal to it. A true Gaussian would differ by up to 6
    levels on smooth images and 33 on noise, so that the boxes are the definition.

    Args:
      image: uint8 [batch, H, W, 3].
      radius: float32 [batch] up to 2, in pixels.
    """
    weights = box_weights(radius)
    for axis in (2, 1):
        for _ in range(3):
            image = box(image, weights, axis)
    return image


def blend(base, image, factor):
    """`base` at factor 0, `image` at 1, and extrapolated above 1; clipped and truncated. factor:
    float32 [batch].
    """
    base = base.astype(jnp.float32)
    image = image.astype(jnp.float32)
    return jnp.clip(base + factor[:, None, None, None] * (image - base), 0, 255).astype(jnp.uint8)


def mean(grey):
    """The rounded mean of each image: int32 [batch, H, W, 1] -> int32 [batch, 1, 1, 1]."""
    count = grey.shape[1] * grey.shape[2]
    return (2 * grey.sum((1, 2, 3), keepdims=True) + count) // (2 * count)


def jitter(image, factors, which):
    """One of the three changes of `color_jitter` to each image: which, int32 [batch]."""
    grey = luma(image)
    factor = jnp.take_along_axis(factors, which[:, None], 1)[:, 0]
    which = which[:, None, None, None]
    base = jnp.where(which == 0, 0, jnp.where(which == 1, mean(grey), grey))
    return blend(base, image, factor)


def color_jitter(image, factors, order):
    """Brightness, contrast and saturation in a given order, each by its factor; 1 changes nothing.

    They blend the image with black, with its mean grey, and with its greyscale version.

    Args:
      image: uint8 [batch, H, W, 3].
      factors: float32 [batch, 3].
      order: int32 [batch, 3], a permutation of 0 (brightness), 1 (contrast) and 2 (saturation).
    """
    for which in order.T:
        image = jitter(image, factors, which)
    return image


def choose(key, jitter: float):
    """Random choices: operation [batch] 0 to 2, radius [batch], factors [batch, 3], order [batch,
    3].
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(key, [6]))(key)
    operation = (uniform[:, 0] * 3).astype(jnp.int32)
    order = (uniform[:, 1] * 6).astype(jnp.int32)
    radius = 0.1 + (MAX_RADIUS - 0.1) * uniform[:, 2]
    factors = 1 + jitter * (2 * uniform[:, 3:] - 1)
    return operation, radius, factors, jnp.array(ORDERS)[order]


def three_augment(key, image, jitter: float = 0.3):
    """One of three operations on each image, then a jitter of its colours.

    Args:
      key: PRNG keys [batch]; the result for an image depends on its own key only.
      image: uint8 [batch, H, W, 3].
      jitter: brightness, contrast and saturation are multiplied by 1 - jitter to 1 + jitter; 0 is
        off.

    Returns:
      uint8 [batch, H, W, 3].
    """
    operation, radius, factors, order = choose(key, jitter)
    operation = operation[:, None, None, None]
    solarized_or_blurred = jnp.where(operation == 1, solarize(image), gaussian_blur(image, radius))
    image = jnp.where(operation == 0, grayscale(image), solarized_or_blurred)
    if jitter:
        image = color_jitter(image, factors, order)
    return image
