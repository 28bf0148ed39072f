"""Decodes, crops and resizes one image: from its encoded bytes to uint8 [height, width, 3].

Called by pipeline.py on the host; flips and colour operations follow on the device (augment/).
"""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data import gif, image_ops, pillow
from vit_jax.data.pillow import MAX_PIXELS, must_be_within, too_many
from vit_jax.distributed import runtime
from vit_jax.models.preparation import Preparation

# That decoding and resizing take: up to 18 of TensorFlow's decoders, and 25 of Pillow.
PIXEL_BYTES = 20
MEMORY_SHARE = 0.5  # of the free memory, for images that are decoded at a time
CAMERA_PIXELS = 25_000_000  # photos of so many are used whatever is free, at all starts alike
SIMPLE_CROP_BORDER = 4  # pixels, of DeiT III's simple random crop (arXiv 2204.07118 section 3.3)


def piece(encoded, position: int, count: int):
    """`count` bytes of a string, or fewer if it is too short; a negative `position` counts from the
    end.

    Never fails: TensorFlow's error message would quote the string, and Python can't read a message
    that is not valid text.
    """
    length = tf.strings.length(encoded)
    return tf.strings.substr(encoded, tf.clip_by_value(position, -length, length), count)


@functools.cache
def memory() -> int:
    """Bytes for images; found once, so that all pipelines of a process have the same limit."""
    return int(MEMORY_SHARE * runtime.free_memory())


def affordable_pixels(threads: int) -> int:
    """Of the largest image for which each of so many threads has memory at a time."""
    return memory() // (PIXEL_BYTES * threads)


def most_pixels(threads: int) -> int:
    """Of the largest image that is decoded for training or evaluation."""
    return min(MAX_PIXELS, max(CAMERA_PIXELS, affordable_pixels(threads)))


def decode_in_python(encoded: bytes | np.ndarray, most: int) -> np.ndarray:
    """A GIF, BMP or WebP: see `decode`. Outside of a graph TensorFlow passes an array []."""
    encoded = encoded if isinstance(encoded, bytes) else encoded.item()
    if encoded[:3] == b"GIF":
        encoded, count = gif.first_frame(encoded)
        must_be_within(count, most)
        return tf.io.decode_gif(encoded)[0].numpy()
    return np.asarray(pillow.decode(encoded, most))


def number(encoded, position: int, count: int):
    """The unsigned number in `count` bytes of a string, the most significant first, int64 [];
    missing bytes are 0.
    """
    padded = tf.strings.join([piece(encoded, position, count), b"\0" * count])
    digits = tf.cast(tf.io.decode_raw(tf.strings.substr(padded, 0, count), tf.uint8), tf.int64)
    powers = [256**i for i in reversed(range(count))]
    return tf.reduce_sum(digits * tf.constant(powers, tf.int64))


def check_pixels(count, most: int):
    """An operation to depend on: fails for an image whose declared size would fill the memory."""
    return image_ops.require(count <= most, too_many(most), count)


def jpeg_shape(encoded, most: int = MAX_PIXELS):
    """(height, width, channels) of a JPEG, int32 [3]."""
    shape = tf.io.extract_jpeg_shape(encoded)
    count = tf.reduce_prod(tf.cast(shape[:2], tf.int64))
    with tf.control_dependencies([check_pixels(count, most)]):
        return tf.identity(shape)


def declared_pixels(encoded):
    """The pixels that the header of a PNG or JPEG declares, int64 []; 0 for anything else."""

    def png():
        return number(encoded, 16, 4) * number(encoded, 20, 4)

    def jpeg():
        return tf.reduce_prod(tf.cast(jpeg_shape(encoded)[:2], tf.int64))

    kinds = [
        (piece(encoded, 1, 3) == b"PNG", png),
        (piece(encoded, 0, 2) == b"\xff\xd8", jpeg),
    ]
    return tf.case(kinds, default=lambda: tf.constant(0, tf.int64))


def decode(encoded, most: int = MAX_PIXELS):
    """Decodes JPEG, PNG, GIF, BMP or WebP, grey, with a palette or alpha -> uint8 [H, W, 3].

    Of an animation, this is the first frame; gif.py says why a GIF is cut after it. Images of more
    than `most` pixels are errors. Pillow decodes BMP and WebP: TensorFlow 2.21 reads the palette
    indices of a BMP as grey values, rejects a WebP with alpha, and corrupts its memory with an
    animated one.
    """
    is_gif_or_bmp = (piece(encoded, 0, 3) == b"GIF") | (piece(encoded, 0, 2) == b"BM")
    in_python = is_gif_or_bmp | (piece(encoded, 8, 4) == b"WEBP")
    by_python = functools.partial(decode_in_python, most=most)

    def by_tensorflow():
        with tf.control_dependencies([check_pixels(declared_pixels(encoded), most)]):
            return tf.io.decode_image(encoded, channels=3, expand_animations=False)

    image = tf.cond(
        in_python,
        lambda: tf.numpy_function(by_python, [encoded], tf.uint8, stateful=False),
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


# Values of data.crop that take a window of the image itself, and how they draw it.
BOXES = {"inception": inception_window, "torchvision": image_ops.torchvision_box}


def decode_box(encoded, seed, box: Callable, most: int = MAX_PIXELS):
    """The window box(shape, seed) of an image, uint8 [h, w, 3]; of a JPEG, only it is decoded."""

    def partial():
        return tf.io.decode_and_crop_jpeg(encoded, box(jpeg_shape(encoded, most), seed), channels=3)

    def full():
        image = decode(encoded, most)
        y, x, h, w = tf.unstack(box(tf.shape(image), seed))
        return tf.slice(image, [y, x, 0], [h, w, -1])

    return tf.ensure_shape(tf.cond(is_complete_jpeg(encoded), partial, full), [None, None, 3])


def window(data, size: int) -> Callable:
    """f(shape, seed) -> (y, x, height, width) int32 [4], the window that `train_image` crops.

    It is a window of the image itself (of `shape`) for the crops of `BOXES`, otherwise of the image
    after it was resized and padded.
    """

    def random_window(shape, seed):
        return tf.concat([image_ops.random_window(shape, size, seed), [size, size]], axis=0)

    if data.crop in BOXES:
        return functools.partial(BOXES[data.crop], area_min=data.area_min)

    def random(shape, seed):
        return random_window(tf.fill([2], larger(size, data.fraction)), seed)

    def simple(shape, seed):
        ratio = tf.cast(size / tf.reduce_min(shape[:2]), tf.float32)
        sides = tf.cast(tf.round(tf.cast(shape[:2], tf.float32) * ratio), tf.int32)
        return random_window(sides + 2 * SIMPLE_CROP_BORDER, seed)

    def resize(shape, seed):
        return tf.constant([0, 0, size, size])

    return dict(random=random, simple=simple, resize=resize)[data.crop]


def larger(size: int, fraction: float) -> int:
    """The side of which a crop takes `fraction`, such as 256 for 224 with 7/8."""
    return round(size / fraction)


def resizing(method: str) -> dict:
    """How to resize by data.method."""
    return dict(method=method, antialias=method == "bicubic")


def train_image(data, size: int, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed int32 [2]) -> uint8 [size, size, 3] by `data.crop` and `data.method`; `most`:
    pixels of the largest image.
    """
    how = resizing(data.method)

    def box(encoded, seed):
        return image_ops.resize(decode_box(encoded, seed, window(data, size), most), size, **how)

    def random(encoded, seed):
        image = image_ops.resize(decode(encoded, most), larger(size, data.fraction), **how)
        return image_ops.random_crop(image, size, seed)

    def simple(encoded, seed):
        image = image_ops.resize_small(decode(encoded, most), size, **how)
        return image_ops.random_crop(image_ops.reflect_pad(image, SIMPLE_CROP_BORDER), size, seed)

    def resize(encoded, seed):
        return image_ops.resize(decode(encoded, most), size, **how)

    ways = dict(random=random, simple=simple, resize=resize) | dict.fromkeys(BOXES, box)
    return ways[data.crop]


def eval_image(how: Preparation, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed) -> uint8 [height, width, 3], which does not depend on the seed."""
    if how.pixels_of != "tensorflow":
        return functools.partial(eval_image_by_pillow, how=how, most=most)
    resize = dict(squash=image_ops.resize, shorter=image_ops.resize_small)[how.resize]
    options = resizing(how.method)

    def prepare(encoded, seed):
        image = resize(decode(encoded, most), how.target, **options)
        return image_ops.central_crop(image, how.size) if how.is_cropped else image

    return prepare


def eval_image_by_pillow(encoded, seed, how: Preparation, most: int):
    """The same, as timm and transformers prepare it."""

    def prepare(encoded: bytes | np.ndarray) -> np.ndarray:
        encoded = encoded if isinstance(encoded, bytes) else encoded.item()
        return pillow.prepare(pillow.decode(encoded, most), how)

    return tf.numpy_function(prepare, [encoded], tf.uint8, stateful=False)
