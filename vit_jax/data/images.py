"""Decodes, crops and resizes one image: from its encoded bytes to uint8 [height, width, 3].

Called by pipeline.py on the host; flips and colour operations follow on the device (augment/).
"""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from vit_jax.data import exif, gif, image_ops, jpeg_window, pillow
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


def decode_in_python(encoded: bytes | np.ndarray, rotates: bool, most: int) -> np.ndarray:
    """What is neither JPEG nor PNG: see `decode`."""
    encoded = pillow.as_bytes(encoded)
    if encoded[:3] == b"GIF":
        encoded, count = gif.first_frame(encoded)
        must_be_within(count, most)
        return tf.io.decode_gif(encoded)[0].numpy()
    return np.asarray(pillow.decode(encoded, most, bool(rotates)))


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


def decode(encoded, most: int = MAX_PIXELS, rotates=False):
    """Decodes JPEG, PNG, GIF, BMP, WebP, TIFF, HEIC or AVIF, grey, with a palette or alpha -> uint8
    [H, W, 3].

    Of an animation or several pages, this is the first; gif.py says why a GIF is cut after it.
    Images of more than `most` pixels are errors. Pillow decodes all but JPEG, PNG and GIF:
    TensorFlow 2.21 reads the palette indices of a BMP as grey values, rejects a WebP with alpha,
    corrupts its memory with an animated one, and does not know the others.

    Args:
      rotates: whether the image is turned upright as its EXIF says; bool or bool [].
    """
    is_png = piece(encoded, 0, 4) == b"\x89PNG"
    by_python = functools.partial(decode_in_python, most=most)

    def has_exif(encoded):
        return tf.cond(is_png, lambda: exif.in_png(encoded), lambda: exif.in_jpeg(encoded))

    def by_tensorflow():
        with tf.control_dependencies([check_pixels(declared_pixels(encoded), most)]):
            image = tf.io.decode_image(encoded, channels=3, expand_animations=False)

        def turned():
            return exif.upright(image, exif.orientation(encoded))

        return exif.if_turned(encoded, has_exif, rotates, turned, lambda: image)

    image = tf.cond(
        is_png | (piece(encoded, 0, 3) == b"\xff\xd8\xff"),
        by_tensorflow,
        lambda: tf.numpy_function(by_python, [encoded, rotates], tf.uint8, stateful=False),
    )
    return tf.ensure_shape(image, [None, None, 3])


def is_complete_jpeg(encoded):
    """Whether a file begins and ends like a JPEG. Only then does a partial decode find the same
    errors as a full one.
    """
    return (piece(encoded, 0, 3) == b"\xff\xd8\xff") & (piece(encoded, -2, 2) == b"\xff\xd9")


def shape_of(encoded, rotates=False):
    """(height, width, channels) of an encoded image, int32 [3]; a JPEG is not decoded for it."""

    def of_jpeg():
        shape = jpeg_shape(encoded)

        def turned():
            return exif.upright_shape(shape, exif.orientation(encoded))

        return exif.if_turned(encoded, exif.in_jpeg, rotates, turned, lambda: shape)

    return tf.cond(
        is_complete_jpeg(encoded), of_jpeg, lambda: tf.shape(decode(encoded, rotates=rotates))
    )


def inception_window(shape, seed, area_min: float):
    """(y, x, height, width) of a random Inception crop of an image of `shape`, int32 [4]."""
    begin, extent = image_ops.inception_box(shape, seed, (area_min, 1.0))
    return tf.stack([begin[0], begin[1], extent[0], extent[1]])


# Values of data.crop that take a window of the image itself, and how they draw it.
BOXES = {"inception": inception_window, "torchvision": image_ops.torchvision_box}


def decode_box(
    encoded,
    seed,
    box: Callable,
    most: int = MAX_PIXELS,
    rotates=False,
    of_jpeg: Callable = jpeg_window.exact,
):
    """The window box(shape, seed) of an image, uint8 [h, w, 3].

    Args:
      most, rotates: see `decode`.
      of_jpeg: decodes a window of a JPEG; see jpeg_window.py.
    """

    def partial():
        shape = jpeg_shape(encoded, most)

        def stored():
            return of_jpeg(encoded, box(shape, seed))

        def turned():
            found = exif.orientation(encoded)
            wanted = box(exif.upright_shape(shape, found), seed)
            where = exif.stored_window(wanted, shape, found)
            return exif.upright(of_jpeg(encoded, where), found)

        return exif.if_turned(encoded, exif.in_jpeg, rotates, turned, stored)

    def full():
        image = decode(encoded, most, rotates)
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


def alone(prepare: Callable) -> Callable:
    """f(encoded, seed, rotates) -> dict of `image`, what `prepare` makes of them."""

    def prepared(encoded, seed, rotates=False) -> dict:
        return dict(image=prepare(encoded, seed, rotates))

    return prepared


def whole(shape, seed):
    """The window of the whole image, int32 [4]."""
    return tf.concat([[0, 0], shape[:2]], axis=0)


def train_decode(data, size: int, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed int32 [2], rotates) -> uint8 [h, w, 3], what `train_image` resizes: a window
    for the crops of `BOXES`, else the whole image; of a JPEG perhaps reduced, by `data.decode`.
    """
    box = window(data, size) if data.crop in BOXES else whole
    side = larger(size, data.fraction) if data.crop == "random" else size
    of_jpeg = jpeg_window.decoder(data.decode, side)

    def decoded(encoded, seed, rotates=False):
        if box is whole and of_jpeg is jpeg_window.exact:
            return decode(encoded, most, rotates)
        return decode_box(encoded, seed, box, most, rotates, of_jpeg)

    return decoded


def train_image(data, size: int, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed int32 [2], rotates) -> uint8 [size, size, 3] by `data.crop`, `data.method`
    and `data.decode`; `most`: pixels of the largest image; `rotates`: see `decode`.
    """
    how = resizing(data.method)
    decoded = train_decode(data, size, most)

    def random(encoded, seed, rotates=False):
        image = decoded(encoded, seed, rotates)
        image = image_ops.resize(image, larger(size, data.fraction), **how)
        return image_ops.random_crop(image, size, seed)

    def simple(encoded, seed, rotates=False):
        image = image_ops.resize_small(decoded(encoded, seed, rotates), size, **how)
        return image_ops.random_crop(image_ops.reflect_pad(image, SIMPLE_CROP_BORDER), size, seed)

    def resize(encoded, seed, rotates=False):
        return image_ops.resize(decoded(encoded, seed, rotates), size, **how)

    return dict(random=random, simple=simple).get(data.crop, resize)


def eval_image(how: Preparation, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed, rotates) -> uint8 [height, width, 3], which does not depend on the seed;
    `rotates`: see `decode`.
    """
    if how.pixels_of != "tensorflow":
        return functools.partial(eval_image_by_pillow, how=how, most=most)
    resize = dict(squash=image_ops.resize, shorter=image_ops.resize_small)[how.resize]
    options = resizing(how.method)

    def prepare(encoded, seed, rotates=False):
        image = resize(decode(encoded, most, rotates), how.target, **options)
        return image_ops.central_crop(image, how.size) if how.is_cropped else image

    return prepare


def eval_image_by_pillow(encoded, seed, rotates=False, *, how: Preparation, most: int):
    """The same, as timm and transformers prepare it."""

    def prepare(encoded: bytes | np.ndarray, rotates: bool) -> np.ndarray:
        return pillow.prepare(pillow.decode(pillow.as_bytes(encoded), most, bool(rotates)), how)

    return tf.numpy_function(prepare, [encoded, rotates], tf.uint8, stateful=False)
