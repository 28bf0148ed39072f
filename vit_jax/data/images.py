"""From an encoded image to the uint8 pixels that training and evaluation see."""

import io
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL import Image

from vit_jax.data import ops, randaug


def piece(encoded, position: int, count: int):
    """Bytes of a string, from its end where `position` is negative; fewer where it is too short, and never an error:
    TensorFlow's would quote the string, and Python fails to read a message with bytes that are no text."""
    length = tf.strings.length(encoded)
    return tf.strings.substr(encoded, tf.clip_by_value(position, -length, length), count)


def pillow_decode(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


def decode(encoded):
    """JPEG, PNG, GIF, BMP or WebP (of animations the first frame), grey, palette or with alpha -> uint8 [H, W, 3].

    Pillow reads BMP and WebP: TensorFlow 2.21 takes the palette indices of a BMP for grey values, refuses a WebP with
    alpha, and an animated one corrupts its memory.
    """
    by_pillow = (piece(encoded, 0, 2) == b"BM") | (piece(encoded, 8, 4) == b"WEBP")
    image = tf.cond(
        by_pillow,
        lambda: tf.numpy_function(pillow_decode, [encoded], tf.uint8, stateful=False),
        lambda: tf.io.decode_image(encoded, channels=3, expand_animations=False),
    )
    return tf.ensure_shape(image, [None, None, 3])


def decode_inception_crop(encoded, size: int, seed, area):
    """Decodes only the part of a JPEG that the crop needs; all of one that may be cut off, so that it always fails."""

    def partial():
        begin, extent = ops.inception_box(tf.io.extract_jpeg_shape(encoded), seed, area)
        window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def whole():
        image = decode(encoded)
        begin, extent = ops.inception_box(tf.shape(image), seed, area)
        return tf.slice(image, begin, [extent[0], extent[1], -1])

    is_whole_jpeg = (piece(encoded, 0, 3) == b"\xff\xd8\xff") & (piece(encoded, -2, 2) == b"\xff\xd9")
    return ops.resize(tf.ensure_shape(tf.cond(is_whole_jpeg, partial, whole), [None, None, 3]), size)


def train_image(data, size: int) -> Callable:
    """f(encoded, seed int32 [2]) -> uint8 [size, size, 3] by `data.crop`, `data.flip` and `data.randaug_*`."""

    def image(encoded, seed):
        crop_seed, flip_seed, randaug_seed = tf.unstack(tf.random.split(seed, 3))
        if data.crop == "inception":
            out = decode_inception_crop(encoded, size, crop_seed, (data.area_min, 1.0))
        elif data.crop == "random":
            out = ops.random_crop(ops.resize(decode(encoded), round(size * 8 / 7)), size, crop_seed)
        else:
            out = ops.resize(decode(encoded), size)
        out = ops.flip_lr(out, flip_seed) if data.flip else out
        if data.randaug_layers:
            out = randaug.randaugment(out, data.randaug_layers, data.randaug_magnitude, randaug_seed)
        return out

    return image


def eval_image(data, size: int) -> Callable:
    """Like `train_image`, without chance."""

    def image(encoded, seed):
        if data.crop == "central":
            return ops.central_crop(ops.resize_small(decode(encoded), round(size / data.fraction)), size)
        return ops.resize(decode(encoded), size)

    return image
