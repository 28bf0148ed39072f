"""From an encoded image to the uint8 pixels that training and evaluation see."""

import io
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL import Image

from vit_jax.data import image_ops

MAX_PIXELS = 178_956_970  # of an image; Pillow's limit, which it takes for an attack
SIMPLE_CROP_BORDER = 4  # pixels, of DeiT III's simple random crop (arXiv 2204.07118 section 3.3)


def piece(encoded, position: int, count: int):
    """Bytes of a string, from its end where `position` is negative; fewer where it is too short,
    and never an error: TensorFlow's would quote the string, and Python fails to read a message with
    bytes that are no text."""
    length = tf.strings.length(encoded)
    return tf.strings.substr(encoded, tf.clip_by_value(position, -length, length), count)


def pillow_decode(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def number(encoded, position: int, count: int, first: str = "big"):
    """The unsigned number in `count` bytes of a string, int64 []; 0 where it is too short."""
    found = tf.strings.substr(
        tf.strings.join([piece(encoded, position, count), b"\0" * count]), 0, count
    )
    digits = tf.cast(tf.io.decode_raw(found, tf.uint8), tf.int64)
    powers = [256**i for i in range(count)]
    return tf.reduce_sum(
        digits * tf.constant(powers if first == "little" else powers[::-1], tf.int64)
    )


def check_pixels(count):
    """Refuses an image that would fill the memory, by what its header says; an operation to depend
    on.
    """
    return image_ops.require(count <= MAX_PIXELS, "the image has too many pixels:", count)


def jpeg_shape(encoded):
    """(height, width, channels) of a JPEG, int32 [3]."""
    shape = tf.io.extract_jpeg_shape(encoded)
    with tf.control_dependencies([check_pixels(tf.reduce_prod(tf.cast(shape[:2], tf.int64)))]):
        return tf.identity(shape)


def declared_pixels(encoded):
    """The pixels that the header of a PNG, GIF or JPEG declares, int64 []; 0 for anything else."""
    kinds = [
        (piece(encoded, 1, 3) == b"PNG", lambda: number(encoded, 16, 4) * number(encoded, 20, 4)),
        (
            piece(encoded, 0, 3) == b"GIF",
            lambda: number(encoded, 6, 2, "little") * number(encoded, 8, 2, "little"),
        ),
        (
            piece(encoded, 0, 2) == b"\xff\xd8",
            lambda: tf.reduce_prod(tf.cast(jpeg_shape(encoded)[:2], tf.int64)),
        ),
    ]
    return tf.case(kinds, default=lambda: tf.constant(0, tf.int64))


def decode(encoded):
    """JPEG, PNG, GIF, BMP or WebP (of animations the first frame), grey, palette or with alpha ->
    uint8 [H, W, 3].

    Images of more than `MAX_PIXELS` are errors. Pillow reads BMP and WebP: TensorFlow 2.21 takes
    the palette indices of a BMP for grey values, refuses a WebP with alpha, and an animated one
    corrupts its memory.
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


def is_whole_jpeg(encoded):
    """Whether a file begins and ends as a JPEG: only then a partial decode notices all that a full
    one does.
    """
    return (piece(encoded, 0, 3) == b"\xff\xd8\xff") & (piece(encoded, -2, 2) == b"\xff\xd9")


def shape_of(encoded):
    """(height, width, channels) of an encoded image, int32 [3]; of a JPEG without decoding it."""
    return tf.cond(
        is_whole_jpeg(encoded), lambda: jpeg_shape(encoded), lambda: tf.shape(decode(encoded))
    )


def inception_window(shape, seed, area_min: float):
    """(y, x, height, width) of a random box in an image of `shape`, int32 [4]."""
    begin, extent = image_ops.inception_box(shape, seed, (area_min, 1.0))
    return tf.stack([begin[0], begin[1], extent[0], extent[1]])


def decode_box(encoded, seed, area_min: float):
    """A random box of an image, uint8 [h, w, 3]; of a JPEG only the box is decoded."""

    def partial():
        window = inception_window(jpeg_shape(encoded), seed, area_min)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def whole():
        image = decode(encoded)
        y, x, h, w = tf.unstack(inception_window(tf.shape(image), seed, area_min))
        return tf.slice(image, [y, x, 0], [h, w, -1])

    return tf.ensure_shape(tf.cond(is_whole_jpeg(encoded), partial, whole), [None, None, 3])


def window(data, size: int) -> Callable:
    """f(shape, seed) -> (y, x, height, width) int32 [4], the part that `train_image` takes of an
    image of `shape`: of the image itself for data.crop=inception, else of what it is resized (and
    padded) to."""

    def corner(shape, seed):
        return tf.concat([image_ops.random_window(shape, size, seed), [size, size]], axis=0)

    def simple(shape, seed):
        ratio = tf.cast(size / tf.reduce_min(shape[:2]), tf.float32)
        sides = tf.cast(tf.round(tf.cast(shape[:2], tf.float32) * ratio), tf.int32)
        return corner(sides + 2 * SIMPLE_CROP_BORDER, seed)

    windows = dict(
        inception=lambda shape, seed: inception_window(shape, seed, data.area_min),
        random=lambda shape, seed: corner(tf.fill([2], larger(size)), seed),
        simple=simple,
        resize=lambda shape, seed: tf.constant([0, 0, size, size]),
    )
    return windows[data.crop]


def larger(size: int) -> int:
    """The side of which data.crop=random takes 7/8, as 256 for 224."""
    return round(size * 8 / 7)


def train_image(data, size: int) -> Callable:
    """f(encoded, seed int32 [2]) -> uint8 [size, size, 3] by `data.crop` and `data.method`."""
    how = dict(method=data.method, antialias=data.method == "bicubic")

    def simple(encoded, seed):
        image = image_ops.resize_small(decode(encoded), size, **how)
        return image_ops.random_crop(image_ops.reflect_pad(image, SIMPLE_CROP_BORDER), size, seed)

    crops = dict(
        inception=lambda encoded, seed: image_ops.resize(
            decode_box(encoded, seed, data.area_min), size, **how
        ),
        random=lambda encoded, seed: image_ops.random_crop(
            image_ops.resize(decode(encoded), larger(size), **how), size, seed
        ),
        simple=simple,
        resize=lambda encoded, seed: image_ops.resize(decode(encoded), size, **how),
    )
    return crops[data.crop]


def eval_image(data, size: int) -> Callable:
    """Like `train_image`, without chance."""

    how = dict(method=data.method, antialias=data.method == "bicubic") if data.method else {}

    def image(encoded, seed):
        if data.crop == "central":
            return image_ops.central_crop(
                image_ops.resize_small(decode(encoded), round(size / data.fraction), **how), size
            )
        return image_ops.resize(decode(encoded), size, **how)

    return image
