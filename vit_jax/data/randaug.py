"""RandAugment (arXiv 1909.13719) by big_vision's definition (pp/autoaugment.py), with all chance taken from a seed.

Every operation takes and returns a uint8 image [H, W, 3]. Seeds are int32 [2]. The numbers of the definition are kept
where they look odd, because results were published with them; the docstrings say where that is.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data import ops

GREY = 128  # fills what an operation leaves empty


def blend(base, image, factor: float):
    """`base` at factor 0, `image` at 1, and beyond it (away from `base`) above 1."""
    base, image = tf.cast(base, tf.float32), tf.cast(image, tf.float32)
    return ops.as_dtype(base + factor * (image - base), tf.uint8)


def autocontrast(image):
    """Stretches each channel to the full range 0 to 255; a constant channel stays."""
    pixels = tf.cast(image, tf.float32)
    low, high = tf.reduce_min(pixels, axis=[0, 1]), tf.reduce_max(pixels, axis=[0, 1])  # [3]
    scale = 255.0 / tf.maximum(high - low, 1.0)
    return tf.where(high > low, ops.as_dtype(pixels * scale - low * scale, tf.uint8), image)


def equalize(image):
    """Gives each channel a flat histogram, by Pillow's integer rule; stays where there are too few pixels for it."""
    cell = tf.cast(image, tf.int32) + tf.range(3) * 256  # each channel counts in its own 256 cells
    counts = tf.reshape(tf.math.bincount(tf.reshape(cell, [-1]), minlength=768, maxlength=768), [3, 256])
    largest = tf.gather(tf.reshape(counts, [-1]), tf.reduce_max(cell, axis=[0, 1]))  # [3]
    step = (tf.reduce_sum(counts, axis=1) - largest)[:, None] // 255  # [3, 1]
    table = (tf.cumsum(counts, axis=1, exclusive=True) + step // 2) // tf.maximum(step, 1)
    table = tf.where(step > 0, tf.minimum(table, 255), tf.range(256))  # [3, 256]
    return tf.cast(tf.gather(tf.reshape(table, [-1]), cell), tf.uint8)


def invert(image):
    """Turns each pixel into 255 minus its value."""
    return 255 - image


def posterize(image, bits: int):
    """Keeps the upper bits of each pixel, at least one. More than 8 keep one too: the shift wraps round in uint8."""
    shift = min((8 - bits) % 256, 7)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def solarize(image, threshold: int):
    """Inverts the pixels from `threshold` on. It is a uint8: 256 (magnitude 10) acts as 0 and inverts them all."""
    return tf.where(image < threshold % 256, image, 255 - image)


def solarize_add(image, addition: int):
    """Brightens the pixels below 128."""
    brighter = tf.cast(tf.minimum(tf.cast(image, tf.int32) + addition, 255), tf.uint8)
    return tf.where(image < 128, brighter, image)


def color(image, factor: float):
    """Blends from the grey image."""
    return blend(tf.image.rgb_to_grayscale(image), image, factor)


def contrast(image, factor: float):
    """Blends from one grey: H * W / 256 up to 255. The definition takes this for the mean, and so do we."""
    grey = ops.as_dtype(tf.size(image) / (3 * 256), tf.uint8)
    return blend(grey, image, factor)


def brightness(image, factor: float):
    """Blends from black."""
    return blend(0, image, factor)


def smoothed(image):
    """A 3 x 3 mean with weight 5 in the centre, truncated to uint8.

    The sum is rounded to float32 after every fused multiply-add, in row-major order, as the convolution of the
    published results did it: before the truncation the last bit counts, and convolutions differ in it by machine.
    """
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    padded = tf.cast(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), tf.float64)
    total = tf.zeros(tf.shape(image))
    for y in range(3):
        for x in range(3):
            weight = float(np.float32(5 if y == x == 1 else 1) / np.float32(13))
            product = weight * padded[y : y + height, x : x + width]
            total = tf.cast(tf.cast(total, tf.float64) + product, tf.float32)
    return ops.as_dtype(total, tf.uint8)


def sharpness(image, factor: float):
    """Blends from the smoothed image; the border of one pixel stays."""
    (row, column), last = pixel_grid(image), tf.shape(image) - 1
    inside = (row > 0) & (row < last[0]) & (column > 0) & (column < last[1])
    return blend(tf.where(inside, smoothed(image), image), image, factor)


def pixel_grid(image):
    """Row numbers [H, 1, 1] and column numbers [1, W, 1], to compare and broadcast."""
    return tf.range(tf.shape(image)[0])[:, None, None], tf.range(tf.shape(image)[1])[None, :, None]


def project(image, matrix):
    """Pixel (x, y) becomes the one nearest to (a x + b y + c, d x + e y + f), or grey; matrix: a, b, c, d, e, f."""
    out = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack([*matrix, 0.0, 0.0])[None],
        output_shape=tf.shape(image)[:2],
        fill_value=float(GREY),
        interpolation="NEAREST",
    )
    return tf.ensure_shape(out[0], image.shape)


def rotate(image, degrees):
    """Turns counter-clockwise about the centre."""
    angle = degrees * (math.pi / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2] - 1, tf.float32))
    x = (width - (cos * width - sin * height)) / 2.0
    y = (height - (sin * width + cos * height)) / 2.0
    return project(image, [cos, -sin, x, sin, cos, y])


def shear_x(image, slope):
    """Moves row y by slope * y to the left."""
    return project(image, [1.0, slope, 0.0, 0.0, 1.0, 0.0])


def shear_y(image, slope):
    """Moves column x by slope * x upwards."""
    return project(image, [1.0, 0.0, 0.0, slope, 1.0, 0.0])


def translate_x(image, pixels):
    """Moves to the left; `pixels` doesn't depend on the size of the image."""
    return project(image, [1.0, 0.0, pixels, 0.0, 1.0, 0.0])


def translate_y(image, pixels):
    """Moves upwards; `pixels` doesn't depend on the size of the image."""
    return project(image, [1.0, 0.0, 0.0, 0.0, 1.0, pixels])


def cutout(image, half: int, centre):
    """Greys the square of side 2 * half around `centre` (row, column), cut at the border (arXiv 1708.04552)."""
    row, column = pixel_grid(image)
    inside = (row >= centre[0] - half) & (row < centre[0] + half)
    inside &= (column >= centre[1] - half) & (column < centre[1] + half)
    return tf.where(inside, tf.constant(GREY, tf.uint8), image)


def random_sign(seed):
    """-1.0 or 1.0, float32 [], each with probability one half."""
    return tf.where(tf.random.stateless_uniform([], seed) < 0.5, -1.0, 1.0)


def random_centre(image, seed):
    """A pixel (row, column) of the image, int32 [2], all with equal probability."""
    return tf.cast(tf.random.stateless_uniform([2], seed) * tf.cast(tf.shape(image)[:2], tf.float32), tf.int32)


def enhance(m: float) -> float:
    """The blend factor of a magnitude: 0.1 to 1.9 for 0 to 10; the image itself at 5."""
    return m / 10 * 1.8 + 0.1


# Name -> f(image, magnitude, seed), the 16 operations that RandAugment chooses from, with their arguments by magnitude.
OPS: dict[str, Callable] = {
    "AutoContrast": lambda image, m, seed: autocontrast(image),
    "Equalize": lambda image, m, seed: equalize(image),
    "Invert": lambda image, m, seed: invert(image),
    "Rotate": lambda image, m, seed: rotate(image, random_sign(seed) * (m / 10 * 30)),
    "Posterize": lambda image, m, seed: posterize(image, int(m / 10 * 4)),
    "Solarize": lambda image, m, seed: solarize(image, int(m / 10 * 256)),
    "Color": lambda image, m, seed: color(image, enhance(m)),
    "Contrast": lambda image, m, seed: contrast(image, enhance(m)),
    "Brightness": lambda image, m, seed: brightness(image, enhance(m)),
    "Sharpness": lambda image, m, seed: sharpness(image, enhance(m)),
    "ShearX": lambda image, m, seed: shear_x(image, random_sign(seed) * (m / 10 * 0.3)),
    "ShearY": lambda image, m, seed: shear_y(image, random_sign(seed) * (m / 10 * 0.3)),
    "TranslateX": lambda image, m, seed: translate_x(image, random_sign(seed) * (m / 10 * 100)),
    "TranslateY": lambda image, m, seed: translate_y(image, random_sign(seed) * (m / 10 * 100)),
    "Cutout": lambda image, m, seed: cutout(image, int(m / 10 * 40), random_centre(image, seed)),
    "SolarizeAdd": lambda image, m, seed: solarize_add(image, int(m / 10 * 110)),
}


def randaugment(image, num_layers: int, magnitude: float, seed):
    """Applies `num_layers` operations, each drawn uniformly from `OPS` and always applied.

    The definition also draws a probability per operation, but never uses it.

    Args:
      image: uint8 [H, W, 3].
      num_layers: N of the paper, mostly 1 to 3.
      magnitude: M of the paper, 0 to 30; one for all operations.
      seed: int32 [2].

    Returns:
      uint8 [H, W, 3].
    """
    shape = image.shape
    for layer_seed in tf.unstack(tf.random.split(seed, num_layers)):
        which_seed, op_seed = tf.unstack(tf.random.split(layer_seed, 2))
        which = tf.random.stateless_uniform([], which_seed, minval=0, maxval=len(OPS), dtype=tf.int32)
        branches = [lambda op=op, x=image, s=op_seed: op(x, magnitude, s) for op in OPS.values()]
        image = tf.ensure_shape(tf.switch_case(which, branches), shape)
    return image
