"""Images as one has them in Python: paths, Pillow images and arrays, prepared for a model.

Weights of timm and Hugging Face, whose images Pillow prepares, need no TensorFlow here.
"""

import concurrent.futures
import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from PIL import Image, ImageOps

from vit_jax.data import pillow
from vit_jax.data.skipped import short_reason
from vit_jax.data.sources import storage
from vit_jax.distributed import hardware
from vit_jax.errors import UserError
from vit_jax.models import preparation
from vit_jax.models.classifier import Classifier, shape_problem


def listed(images) -> list:
    """One image, a batch or a sequence of images -> a list of single ones."""
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if hasattr(images, "__array__"):
        array = np.asarray(images)
        if array.dtype.kind in "OU":  # paths, such as a column of a table
            images = array.tolist()
        else:
            images = array if array.ndim == 4 else [array]
    if not isinstance(images, Iterable):
        raise UserError(
            f"images of type {type(images).__name__} can't be read: give paths, Pillow images or "
            "arrays"
        )
    images = list(images)
    if not images:
        raise UserError("the list of images is empty: give at least one")
    return images


def name_of(image, number: int) -> str:
    """What messages call an image: its path, or its place in the list."""
    return str(image) if isinstance(image, str | os.PathLike) else f"images[{number}]"


def encode(image, number: int) -> bytes:
    """The file of an image; of one in memory, a BMP, which is lossless and takes no time."""
    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        storage.must_exist(path, "image", "correct the path")
        if storage.is_folder(path):
            raise UserError(f"{path} is a folder: give the files in it")
        return storage.read(path)
    if not isinstance(image, Image.Image):
        image = Image.fromarray(as_uint8(image, name_of(image, number)))
    file = io.BytesIO()
    pillow.as_8_bits(image).convert("RGB").save(file, "bmp")
    return file.getvalue()


def own_copy(image):
    """A Pillow image decoded and upright; others as they are.

    Pillow decodes when pixels are first needed, and an image that is given twice must not be
    decoded by two threads.
    """
    return ImageOps.exif_transpose(image) if isinstance(image, Image.Image) else image


@contextlib.contextmanager
def naming(image, number: int) -> Iterator[None]:
    """Raises errors of TensorFlow, Pillow and the file system as a UserError that names the
    image.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        name = name_of(image, number)
        raise UserError(
            f"{name} can't be read as an image ({short_reason(error)}): remove or replace it"
        ) from error


def as_uint8(image, name: str) -> np.ndarray:
    """An array [height, width, 3] of uint8, or of floats from 0 to 1, as uint8.

    Raises:
      UserError: it is another one; the message says what to do.
    """
    if not hasattr(image, "__array__"):
        raise UserError(
            f"{name} is of type {type(image).__name__}: give a path, a Pillow image or an array"
        )
    array = np.asarray(image)
    problem = shape_problem((1, *array.shape))
    if problem or not array.size:
        do = problem or "give one with pixels"
        raise UserError(f"{name} has shape {array.shape}, not [height, width, 3]: {do}")
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{name} is {array.dtype.name}: give uint8 from 0 to 255")
    if not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
        raise UserError(
            f"{name} has floats from {array.min():g} to {array.max():g}: give uint8 from 0 to 255, "
            "or floats from 0 to 1, not normalised"
        )
    return np.round(255 * array.astype(np.float32)).astype(np.uint8)


def preparer(model: Classifier) -> Callable[[bytes], np.ndarray]:
    """f(encoded) -> uint8 [height, width, 3], as evaluation and prediction prepare it."""
    how = preparation.expected(model)
    if how.pixels_of == "tensorflow":
        return by_tensorflow(how)
    return lambda encoded: pillow.prepare(pillow.decode(encoded, rotates=True), how)


@functools.lru_cache(maxsize=8)
def by_tensorflow(how: preparation.Preparation) -> Callable[[bytes], np.ndarray]:
    """The same for weights whose images TensorFlow prepares."""
    import tensorflow as tf  # takes seconds

    from vit_jax.data import images

    image = images.eval_image(how, images.most_pixels(hardware.cores()))
    # Outside of a graph, TensorFlow would drop zero bytes at the end of a file.
    prepare = tf.function(
        lambda encoded: image(encoded, None, rotates=True),
        input_signature=[tf.TensorSpec([], tf.string)],
        autograph=False,
    )
    return lambda encoded: prepare(encoded).numpy()


def batches(
    model: Classifier, images: list, rows: int, skipped: dict[int, str] | None = None
) -> Iterator[dict]:
    """The images in batches of `image`, uint8 [rows, H, W, 3], and `mask`, float32 [rows], 0 for
    what fills the last one.

    Args:
      images: as `listed` returns them.
      skipped: gets the number of each image that can't be read, and why; its mask is 0, too. None:
        it is an error.

    Raises:
      UserError: one of them is not an image; the message says which.
    """
    prepare = preparer(model)
    blank = np.zeros((*model.image_size, 3), np.uint8)

    def decoded(number: int):
        with naming(images[number], number):
            return own_copy(images[number])

    def prepared(number: int, image) -> np.ndarray | None:
        try:
            with naming(image, number):
                return prepare(encode(image, number))
        except UserError as error:
            if skipped is None:
                raise
            skipped[number] = str(error)
            return None

    with concurrent.futures.ThreadPoolExecutor(hardware.cores()) as pool:
        for start in range(0, len(images), rows):
            numbers = range(len(images))[start : start + rows]
            pixels = list(pool.map(prepared, numbers, list(map(decoded, numbers))))
            pixels += [None] * (rows - len(pixels))
            mask = np.float32([image is not None for image in pixels])
            image = np.stack([blank if image is None else image for image in pixels])
            yield dict(image=image, mask=mask)


def preprocess(model: Classifier, images):
    """Images as the model expects them, float32 [batch, H, W, 3]: see `vit_jax.preprocess`."""
    images = listed(images)
    (batch,) = batches(model, images, len(images))
    return model.normalize(batch["image"])
