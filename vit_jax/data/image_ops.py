"""Operations on one image, [H, W, C], on the host: resizing, cropping, value ranges.

They give the pixels of big_vision and vision_transformer. The result has the dtype of the input;
uint8 stays uint8.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data.pillow import MAX_RESIZED

LARGEST_ASPECT = 4 / 3  # of a random crop, either way round
TRIES = 10  # of torchvision's crop to fit into the image
# Methods of Pillow, antialiased, by the name that TensorFlow has for the kernel.
ROUNDED = {"bilinear_pillow": "bilinear", "bicubic_pillow": "bicubic"}


def require(condition, message: str, value):
    """An operation to depend on, which fails with `message` and `value` if `condition` is false.

    tf.debugging.Assert contains a branch, which costs more than the checks made here.
    """
    return tf.raw_ops.Assert(condition=condition, data=[message, value])


def pair(size) -> tuple[int, int]:
    """(height, width) of a size, which is one number for a square."""
    if isinstance(size, int):
        return size, size
    return tuple(size)


def as_dtype(image, dtype):
    """Back to the dtype of the input. As in big_vision, uint8 is clipped and truncated, not
    rounded.
    """
    if dtype == tf.uint8:
        image = tf.clip_by_value(image, 0, 255)
    return tf.cast(image, dtype)


def interpolate(image, size, method, antialias):
    """tf.image.resize; with method "bilinear_tf1" that of TensorFlow 1, which has no half-pixel
    centres; with one of `ROUNDED` that of Pillow.

    Pillow rounds to uint8 after each axis, which changes a result by one level at most. Of noise,
    bicubic interpolation goes beyond 0 and 255, to which Pillow clips after each axis: there ten
    levels were seen.
    """
    if method == "bilinear_tf1":
        resized = tf.raw_ops.ResizeBilinear(images=tf.cast(image, tf.float32)[None], size=size)[0]
    elif method in ROUNDED:
        resized = tf.image.resize(image, size, method=ROUNDED[method], antialias=True)
    else:
        resized = tf.image.resize(image, size, method=method, antialias=antialias)
        return as_dtype(resized, image.dtype)
    if image.dtype == tf.uint8:
        resized = tf.round(resized)  # code of TensorFlow 1 goes on with float32
    return as_dtype(resized, image.dtype)


def resize(image, size, method="bilinear", antialias=False):
    """Resizes to (h, w) without keeping the aspect ratio."""
    if method == "bilinear" and not antialias and image.dtype == tf.uint8:
        # The same numbers as tf.image.resize, but without its conditionals and by the kernel for
        # float32, which is faster. Interpolated values stay within 0 to 255.
        image = tf.cast(image, tf.float32)[None]
        resized = tf.raw_ops.ResizeBilinear(images=image, size=pair(size), half_pixel_centers=True)
        return tf.cast(resized[0], tf.uint8)
    return interpolate(image, pair(size), method, antialias)


def resize_small(image, size, method="area", antialias=False):
    """Resizes to cover `size`, keeping the aspect ratio: the shorter side becomes that of a square
    `size`.
    """
    shape = tf.shape(image)[:2]
    ratio = tf.reduce_max(tf.constant(pair(size), tf.float32) / tf.cast(shape, tf.float32))
    target = tf.cast(tf.round(tf.cast(shape, tf.float32) * ratio), tf.int32)
    fits = tf.reduce_prod(target) <= MAX_RESIZED
    check = require(fits, "the image is too long and thin to be resized:", target)
    with tf.control_dependencies([check]):
        return interpolate(image, target, method, antialias)


def central_crop(image, size=None):
    """The centre of size (h, w), by default the largest square. Of an odd border, the smaller half
    is above and on the left.
    """
    shape = tf.shape(image)
    h, w = pair(size) if size else [tf.reduce_min(shape[:2])] * 2
    top = (shape[0] - h) // 2
    left = (shape[1] - w) // 2
    return tf.image.crop_to_bounding_box(image, top, left, h, w)


def value_range(image, vmin=-1, vmax=1, in_min=0, in_max=255, clip=False):
    """Maps [in_min, in_max] linearly to [vmin, vmax], as float32; `clip` limits the result to it.

    in_min and in_max are numbers, or one per channel: (mean, mean + std) to [0, 1] subtracts the
    mean and divides by the standard deviation.
    """
    in_min = tf.constant(in_min, tf.float32)
    in_max = tf.constant(in_max, tf.float32)
    image = vmin + (tf.cast(image, tf.float32) - in_min) / (in_max - in_min) * (vmax - vmin)
    return tf.clip_by_value(image, vmin, vmax) if clip else image


def inception_box(shape, seed, area):
    """(begin, size) of a random crop (arXiv 1409.4842): its share of the area is in `area`, its
    aspect ratio in 3/4 to 4/3.
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4]),
        seed,
        min_object_covered=0.0,
        area_range=area,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, size


def torchvision_box(shape, seed, area_min: float):
    """(y, x, height, width), int32 [4], of a crop drawn as by torchvision's RandomResizedCrop."""
    return torchvision_boxes(shape, seed, [(area_min, 1.0)])[0]


def torchvision_boxes(shape, seed, areas: Sequence[tuple[float, float]]):
    """The same for several crops, int32 [crops, 4].

    The share of the area is uniform between the two numbers in `areas`, and the logarithm of the
    aspect ratio in [log 3/4, log 4/3]. The first of ten such sizes that fits is used. If none does,
    it is the largest central window with an aspect ratio in this range.
    """
    sides = tf.cast(shape[:2], tf.float64)  # float32 has not every pixel of the longest sides
    draws = tf.random.stateless_uniform([len(areas), TRIES + 1, 2], seed, dtype=tf.float64)
    share, aspect = tf.unstack(draws[:, 1:], axis=2)
    smallest, largest = np.asarray(areas, np.float64).T[..., None]
    root = tf.sqrt((smallest + (largest - smallest) * share) * tf.reduce_prod(sides))
    stretch = LARGEST_ASPECT ** (aspect - 0.5)  # the root of width / height
    tried = tf.round(tf.stack([root / stretch, root * stretch], axis=2))
    fits = tf.reduce_all((tried > 0) & (tried <= sides), axis=2)
    found = tf.reduce_any(fits, axis=1, keepdims=True)
    central = tf.minimum(sides, tf.round(sides[::-1] * LARGEST_ASPECT))
    first = tf.gather(tried, tf.argmax(tf.cast(fits, tf.int32), axis=1), batch_dims=1)
    size = tf.where(found, first, central)
    free = sides - size
    corner = tf.where(found, tf.floor(draws[:, 0] * (free + 1)), tf.floor(free / 2))
    return tf.cast(tf.concat([corner, size], axis=1), tf.int32)


def inception_crop(image, size, seed, area=(0.05, 1.0), antialias=False):
    """A random crop as in Inception training, resized to `size`. seed: int32 [2]."""
    begin, extent = inception_box(tf.shape(image), seed, area)
    return resize(tf.slice(image, begin, [extent[0], extent[1], -1]), size, antialias=antialias)


def reflect_pad(image, pixels):
    """Adds a border of `pixels` by reflection; the outermost pixels are not repeated."""
    return tf.pad(image, [[pixels, pixels], [pixels, pixels], [0, 0]], mode="REFLECT")


def random_window(shape, size, seed):
    """The corner (y, x), int32 [2], of a window of size (h, w), drawn uniformly."""
    count = tf.cast(shape[:2], tf.int32) - tf.constant(pair(size)) + 1
    return tf.cast(tf.random.stateless_uniform([2], seed) * tf.cast(count, tf.float32), tf.int32)


def random_crop(image, size, seed):
    """A random window of size (h, w). seed: int32 [2]."""
    corner = random_window(tf.shape(image), size, seed)
    return tf.image.crop_to_bounding_box(image, corner[0], corner[1], *pair(size))


def flip_lr(image, seed):
    """Flips left and right with probability 0.5. seed: int32 [2]."""
    return tf.image.stateless_random_flip_left_right(image, seed)
