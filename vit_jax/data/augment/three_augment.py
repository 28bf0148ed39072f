"""3-Augment of DeiT III (arXiv 2204.07118) for a batch on the device, by the definitions of Pillow.

One of grey, solarisation and Gaussian blur, each with equal probability, and then a jitter of
brightness, contrast and saturation, as in torchvision's ColorJitter. Every function takes and
returns uint8 [batch, H, W, 3].
"""

import jax
import jax.numpy as jnp

ORDERS = (
    (0, 1, 2),
    (0, 2, 1),
    (1, 0, 2),
    (1, 2, 0),
    (2, 0, 1),
    (2, 1, 0),
)  # of brightness, contrast and saturation
MAX_RADIUS = 2.0  # of the blur


def luma(image):
    """uint8 [batch, H, W, 3] -> int32 [batch, H, W, 1]: ITU-R 601 in Pillow's integers."""
    return (
        (image.astype(jnp.int32) * jnp.array([19595, 38470, 7471])).sum(-1, keepdims=True) + 32768
    ) >> 16


def grayscale(image):
    """Three times the luma."""
    return jnp.broadcast_to(luma(image), image.shape).astype(jnp.uint8)


def solarize(image):
    """Inverts the pixels from 128 on."""
    return jnp.where(image < 128, image, 255 - image)


def box_weights(radius):
    """Weights of the box whose threefold application approximates a Gaussian: radius [...] up to 2
    -> four times [...].

    A box may have a fractional radius r + f: 2 r + 1 pixels count fully, and one more on each side
    with weight f (Gwosdek et al. 2011, "Theoretical foundations of Gaussian convolution by extended
    box filtering", eq. 13). Here r is 0 or 1; returned are the weights of the pixels at distance 0,
    1 and 2, in units of 2 ** -24.
    """
    variance = radius**2 / 3
    r = jnp.floor((jnp.sqrt(12 * variance + 1) - 1) / 2)
    f = (2 * r + 1) * (r * (r + 1) - 3 * variance) / (6 * (variance - (r + 1) ** 2))
    full = (2**24 / (2 * (r + f) + 1)).astype(jnp.uint32)
    part = (2**24 - (2 * r.astype(jnp.uint32) + 1) * full) // 2
    return full, jnp.where(r > 0, full, part), jnp.where(r > 0, part, 0)


def box(image, weights, axis: int):
    """One box along one axis, rounded to uint8; the border repeats."""
    size = image.shape[axis]
    padded = jnp.pad(
        image, [(2, 2) if i == axis else (0, 0) for i in range(4)], mode="edge"
    ).astype(jnp.uint32)
    shifted = [jax.lax.slice_in_dim(padded, i, i + size, axis=axis) for i in range(5)]
    at0, at1, at2 = (weight[:, None, None, None] for weight in weights)
    total = at0 * shifted[2] + at1 * (shifted[1] + shifted[3]) + at2 * (shifted[0] + shifted[4])
    return (total + 2**23 >> 24).astype(jnp.uint8)


def gaussian_blur(image, radius):
    """Pillow's ImageFilter.GaussianBlur: three boxes per axis, each rounded to uint8; radius
    float32 [batch] up to 2.

    Within one level of Pillow, and mostly equal to it. A true Gaussian would be up to 6 levels off
    on smooth images and 33 on noise, so that these boxes are the definition.
    """
    weights = box_weights(radius)
    for axis in (2, 1):
        for _ in range(3):
            image = box(image, weights, axis)
    return image


def blend(base, image, factor):
    """`base` at factor 0, `image` at 1, and beyond it above 1; clipped and truncated. factor:
    float32 [batch].
    """
    base, image = base.astype(jnp.float32), image.astype(jnp.float32)
    return jnp.clip(base + factor[:, None, None, None] * (image - base), 0, 255).astype(jnp.uint8)


def mean(grey):
    """The rounded mean of each image: int32 [batch, H, W, 1] -> int32 [batch, 1, 1, 1]."""
    count = grey.shape[1] * grey.shape[2]
    return (2 * grey.sum((1, 2, 3), keepdims=True) + count) // (2 * count)


def color_jitter(image, factors, order):
    """Brightness, contrast and saturation, each by its factor (1 changes nothing), one after the
    other.

    All three blend the image with another: with black, with its mean grey, and with its grey
      version.

    Args:
      image: uint8 [batch, H, W, 3].
      factors: float32 [batch, 3].
      order: int32 [batch, 3], a permutation of 0 (brightness), 1 (contrast) and 2 (saturation).
    """
    for which in order.T:
        grey, which = luma(image), which[:, None]
        factor = jnp.take_along_axis(factors, which, 1)[:, 0]
        which = which[:, :, None, None]
        image = blend(
            jnp.where(which == 0, 0, jnp.where(which == 1, mean(grey), grey)), image, factor
        )
    return image


def choose(key, jitter: float):
    """What chance decides: operation [batch] 0 to 2, radius [batch], factors [batch, 3], order
    [batch, 3].
    """
    uniform = jax.vmap(lambda key: jax.random.uniform(key, [6]))(key)
    operation, order = (uniform[:, 0] * 3).astype(jnp.int32), (uniform[:, 1] * 6).astype(jnp.int32)
    radius = 0.1 + (MAX_RADIUS - 0.1) * uniform[:, 2]
    return operation, radius, 1 + jitter * (2 * uniform[:, 3:] - 1), jnp.array(ORDERS)[order]


def three_augment(key, image, jitter: float = 0.3):
    """One of three operations on each image, then a jitter of its colours.

    Args:
      key: PRNG keys [batch]; what happens to an image depends on its own key only.
      image: uint8 [batch, H, W, 3].
      jitter: brightness, contrast and saturation are multiplied by up to 1 - jitter and 1 + jitter;
        0 is off.

    Returns:
      uint8 [batch, H, W, 3].
    """
    operation, radius, factors, order = choose(key, jitter)
    operation = operation[:, None, None, None]
    blurred = gaussian_blur(image, radius)
    image = jnp.where(
        operation == 0, grayscale(image), jnp.where(operation == 1, solarize(image), blurred)
    )
    return color_jitter(image, factors, order) if jitter else image
