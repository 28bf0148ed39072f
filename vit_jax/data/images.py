"""Decodes, crops and resizes one image: from its encoded bytes to uint8 [size, size, 3].

Called by pipeline.py on the host; flips and colour operations follow on the device (augment/).
"""

import io
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL import Image

from vit_jax.data import image_ops

MAX_PIXELS = 178_956_970  # of an image; Pillow rejects larger ones as decompression bombs
SIMPLE_CROP_BORDER = 4  # pixels, of DeiT III's simple random crop (arXiv 2204.07118 section 3.3)


def piece(encoded, position: int, count: int):
    """`count` bytes of a string, or fewer if it is too short; a negative `position` counts from the
    end.

    Never fails: TensorFlow's error message would quote the string, and Python can't read a message
    that is not valid text.
    """
    length = tf.strings.length(encoded)
    return tf.strings.substr(encoded, tf.clip_by_value(position, -length, length), count)


def pillow_decode(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def number(encoded, position: int, count: int, first: str = "big"):
    """The unsigned number in `count` bytes of a string, int64 []; missing bytes are 0.

    Args:
      first: "big" if the most significant byte comes first, else "little".
    """
    padded = tf.strings.join([piece(encoded, position, count), b"\0" * count])
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(padded, 0, count), tf.uint8), tf.int64)
    powers = [256**i for i in range(count)]
    if first == "big":
        powers.reverse()
    return tf.reduce_sum(digits * tf.constant(powers, tf.int64))


def check_pixels(count):
    """An operation to depend on: fails for an image whose declared size would fill the memory."""
    return image_ops.require(count <= MAX_PIXELS, "the image has too many pixels:", count)


def jpeg_shape(encoded):
    """(height, width, channels) of a JPEG, int32 [3]."""
    shape = tf.io.extract_jpeg_shape(encoded)
    with tf.control_dependencies([check_pixels(tf.reduce_prod(tf.cast(shape[:2], tf.int64)))]):
        return tf.identity(shape)


def declared_pixels(encoded):
    """The pixels that the header of a PNG, GIF or JPEG declares, int64 []; 0 for anything else."""

    def png():
        return number(encoded, 16, 4) * number(encoded, 20, 4)

    def gif():
        return number(encoded, 6, 2, "little") * number(encoded, 8, 2, "little")

    def jpeg():
        return tf.reduce_prod(tf.cast(jpeg_shape(encoded)[:2], tf.int64))

    kinds = [
        (piece(encoded, 1, 3) == b"PNG", png),
        (piece(encoded, 0, 3) == b"GIF", gif),
        (piece(encoded, 0, 2) == b"\xff\xd8", jpeg),
    ]
    return tf.case(kinds, default=lambda: tf.constant(0, tf.int64))


def decode(encoded):
    """Decodes JPEG, PNG, GIF, BMP or WebP, grey, with a palette or alpha -> uint8 [H, W, 3].

    Of an animation, this is the first frame. Images of more than `MAX_PIXELS` are errors. Pillow
    decodes BMP and WebP: TensorFlow 2.21 reads the palette indices of a BMP as grey values, rejects
    a WebP with alpha, and corrupts its memory with an animated one.
    """
    by_pillow = (piece(encoded, 0, 2) == b"BM") | (piece(encoded, 8, 4) == b"WEBP")

    def by_tensorflow():
        with tf.control_dependencies([check_pixels(declared_pixels(encoded))]):
            return tf.io.decode_image(encoded, channels=3, expand_animations=False)

    image = tf.cond(
        by_pillow,
        lambda: tf.numpy_function(pillow_decode, [encoded], tf.uint8, stateful=False),
        by_tensorflow,
    )
    return tf.ensure_shape(image, [None, None, 3])


def is_complete_jpeg(encoded):
    """Whether a file begins and ends like a JPEG. Only then does a partial decode find the same
    errors as a full one.
    """
    return (piece(encoded, 0, 3) == b"\xff\xd8\xff") & (piece(encoded, -2, 2) == b"\xff\xd9")


def shape_of(encoded):
    """(height, width, channels) of an encoded image, int32 [3]; a JPEG is not decoded for it."""
    return tf.cond(
        is_complete_jpeg(encoded), lambda: jpeg_shape(encoded), lambda: tf.shape(decode(encoded))
    )


def inception_window(shape, seed, area_min: float):
    """(y, x, height, width) of a random Inception crop of an image of `shape`, int32 [4]."""
    begin, extent = image_ops.inception_box(shape, seed, (area_min, 1.0))
    return tf.stack([begin[0], begin[1], extent[0], extent[1]])


def decode_box(encoded, seed, area_min: float):
    """A random Inception crop of an image, uint8 [h, w, 3]; of a JPEG, only the crop is decoded."""

    def partial():
        window = inception_window(jpeg_shape(encoded), seed, area_min)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def full():
        image = decode(encoded)
        y, x, h, w = tf.unstack(inception_window(tf.shape(image), seed, area_min))
        return tf.slice(image, [y, x, 0], [h, w, -1])

    return tf.ensure_shape(tf.cond(is_complete_jpeg(encoded), partial, full), [None, None, 3])


def window(data, size: int) -> Callable:
    """f(shape, seed) -> (y, x, height, width) int32 [4], the window that `train_image` crops.

    It is a window of the image itself (of `shape`) for data.crop=inception, otherwise of the image
    after it was resized and padded.
    """

    def random_window(shape, seed):
        return tf.concat([image_ops.random_window(shape, size, seed), [size, size]], axis=0)

    def inception(shape, seed):
        return inception_window(shape, seed, data.area_min)

    def random(shape, seed):
        return random_window(tf.fill([2], larger(size)), seed)

    def simple(shape, seed):
        ratio = tf.cast(size / tf.reduce_min(shape[:2]), tf.float32)
        sides = tf.cast(tf.round(tf.cast(shape[:2], tf.float32) * ratio), tf.int32)
        return random_window(sides + 2 * SIMPLE_CROP_BORDER, seed)

    def resize(shape, seed):
        return tf.constant([0, 0, size, size])

    return dict(inception=inception, random=random, simple=simple, resize=resize)[data.crop]


def larger(size: int) -> int:
    """The side of which data.crop=random takes 7/8, such as 256 for 224."""
    return round(size * 8 / 7)


def resizing(method: str) -> dict:
    """How to resize by data.method; an empty one means the default of each operation."""
    if not method:
        return {}
    return dict(method=method, antialias=method == "bicubic")


def train_image(data, size: int) -> Callable:
    """f(encoded, seed int32 [2]) -> uint8 [size, size, 3] by `data.crop` and `data.method`."""
    how = resizing(data.method)

    def inception(encoded, seed):
        return image_ops.resize(decode_box(encoded, seed, data.area_min), size, **how)

    def random(encoded, seed):
        image = image_ops.resize(decode(encoded), larger(size), **how)
        return image_ops.random_crop(image, size, seed)

    def simple(encoded, seed):
        image = image_ops.resize_small(decode(encoded), size, **how)
        return image_ops.random_crop(image_ops.reflect_pad(image, SIMPLE_CROP_BORDER), size, seed)

    def resize(encoded, seed):
        return image_ops.resize(decode(encoded), size, **how)

    return dict(inception=inception, random=random, simple=simple, resize=resize)[data.crop]


def eval_image(data, size: int) -> Callable:
    """Like `train_image`, but deterministic: the seed is not used."""
    how = resizing(data.method)

    def central(encoded, seed):
        image = image_ops.resize_small(decode(encoded), round(size / data.fraction), **how)
        return image_ops.central_crop(image, size)

    def resize(encoded, seed):
        return image_ops.resize(decode(encoded), size, **how)

    return central if data.crop == "central" else resize
