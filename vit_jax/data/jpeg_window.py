"""A window of a JPEG: as it is stored, or reduced if it stays large enough (`data.decode`).

TensorFlow's default is libjpeg's fast inverse DCT, whose results are mostly a few levels off those
of the accurate one, which Pillow has.

libjpeg decodes an image at a half, quarter or eighth of its sides by a smaller inverse DCT, which
gives averages of 2, 4 or 8 pixels. The Huffman decoding before it, most of the time of an image
like ImageNet's, stays the same.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

RATIOS = (1, 2, 4, 8)


def exact(encoded, window):
    """The `window` (y, x, height, width), int32 [4], of an encoded JPEG, uint8 [height, width, 3].

    Only it is decoded.
    """
    return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)


def accurate(encoded, window):
    """The same with the accurate inverse DCT: Pillow's bits, but for the outermost column of a
    window whose colours are stored at half the width. There they lack their neighbours.
    """
    options = dict(channels=3, dct_method="INTEGER_ACCURATE")
    return tf.io.decode_and_crop_jpeg(encoded, window, **options)


def reduced(encoded, window, ratio: int):
    """The same at 1/`ratio` of its sides; the edges are rounded to pixels of the reduced image."""
    corner = (window[:2] + ratio // 2) // ratio
    end = (window[:2] + window[2:] + ratio // 2) // ratio
    window = tf.concat([corner, end - corner], axis=0)
    return tf.io.decode_and_crop_jpeg(encoded, window, channels=3, ratio=ratio)


def fast(encoded, window, *, side: int):
    """The same at the smallest of `RATIOS` at which it has at least `side` x `side` pixels; a
    smaller window is decoded as by `exact`.
    """
    enough = tf.reduce_min(window[2:]) // RATIOS >= side
    chosen = tf.reduce_sum(tf.cast(enough[1:], tf.int32))
    at = [functools.partial(reduced, encoded, window, ratio) for ratio in RATIOS[1:]]
    return tf.switch_case(chosen, [functools.partial(exact, encoded, window), *at])


def decoder(kind: str, side: int) -> Callable:
    """f(encoded, window) -> uint8 [h, w, 3] by `data.decode`, which will be resized to `side`."""
    return dict(exact=exact, accurate=accurate, fast=functools.partial(fast, side=side))[kind]
