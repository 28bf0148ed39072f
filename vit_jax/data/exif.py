"""Images that their EXIF says are stored turned or mirrored, such as those of phones: how they are
decoded upright in a TensorFlow graph.

An orientation is a number from 1 (upright) to 8, as in CIPA DC-008, tag 274, int32 [].
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data import pillow

# EXIF follows the start of a JPEG; a segment that some programs put before it has at most 64 KiB.
JPEG_HEADER = (1 << 16) + 128  # bytes
# What upright pixels are of the stored ones: rows and columns in reverse order, then transposed.
ROWS_REVERSED = (3, 4, 6, 7)
COLUMNS_REVERSED = (2, 3, 7, 8)
FIRST_TRANSPOSED = 5


def contains(encoded, text: bytes):
    """Whether a string has the bytes `text`, bool []."""
    without = tf.strings.regex_replace(encoded, text, b"", replace_global=False)
    return tf.strings.length(without) < tf.strings.length(encoded)


def in_jpeg(encoded):
    """Whether a JPEG may have EXIF, bool []."""
    return contains(tf.strings.substr(encoded, 0, JPEG_HEADER), b"Exif\0\0")


def in_png(encoded):
    """Whether a PNG may have EXIF, bool []; older programs wrote it as text."""
    return contains(encoded, b"eXIf") | contains(encoded, b"Raw profile type exif")


def if_turned(encoded, has_exif: Callable, rotates, turned: Callable, stored: Callable):
    """turned() for an image that has EXIF if `rotates` is true, else stored().

    Args:
      has_exif: `in_jpeg` or `in_png`.
      rotates: bool or bool []; False adds no operation.
    """
    if rotates is False:
        return stored()
    return tf.cond(has_exif(encoded) & rotates, turned, stored)


def read(encoded: bytes | np.ndarray) -> np.ndarray:
    try:
        with pillow.open_image(pillow.as_bytes(encoded)) as image:
            return np.int32(pillow.orientation(image))
    except Exception:  # the decoder says what is wrong
        return np.int32(1)


def orientation(encoded):
    """That of an encoded image. Reads it in Python, which holds a lock: ask `if_turned` before."""
    found = tf.numpy_function(read, [encoded], tf.int32, stateful=False)
    return tf.ensure_shape(found, [])


def is_one_of(found, orientations: tuple[int, ...]):
    return tf.reduce_any(found == tf.constant(orientations))


def upright(image, found):
    """A stored image of orientation `found`, or a window of it, turned upright: [h, w, 3] or
    [w, h, 3].
    """
    rows = tf.where(is_one_of(found, ROWS_REVERSED), -1, 1)
    columns = tf.where(is_one_of(found, COLUMNS_REVERSED), -1, 1)
    image = image[::rows, ::columns]
    is_transposed = found >= FIRST_TRANSPOSED
    return tf.cond(is_transposed, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)


def upright_shape(shape, found):
    """(height, width, channels), int32 [3], of the upright image from those of the stored one."""
    return tf.where(found >= FIRST_TRANSPOSED, tf.gather(shape, [1, 0, 2]), shape)


def stored_window(window, shape, found):
    """Where the stored image, of `shape`, has a `window` (y, x, height, width) of the upright
    one, int32 [4].
    """
    window = tf.where(found >= FIRST_TRANSPOSED, tf.gather(window, [1, 0, 3, 2]), window)
    y, x, height, width = tf.unstack(window)
    y = tf.where(is_one_of(found, ROWS_REVERSED), shape[0] - y - height, y)
    x = tf.where(is_one_of(found, COLUMNS_REVERSED), shape[1] - x - width, x)
    return tf.stack([y, x, height, width])
