"""Decodes and prepares an image by Pillow, without TensorFlow.

Timm resizes with Pillow, and transformers with a copy of its resizing: antialiased, and rounded to
uint8. images.py is for all other weights; what TensorFlow does not decode well is decoded here for
it, too.
"""

import contextlib
import functools
import io
import re

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from vit_jax.models.preparation import Preparation

MAX_PIXELS = 178_956_970  # of an image; Pillow rejects larger ones as decompression bombs
MAX_RESIZED = 2**24  # pixels; a side of 224 becomes at most 334 times as long
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF")  # and HEIF, by another library
# EXIF orientation -> how the stored image is turned upright (CIPA DC-008, tag 274).
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The host decodes one image per thread, which needs no threads of the decoder's own.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1


def too_many(most: int) -> str:
    reason = "are allowed" if most == MAX_PIXELS else "each thread has memory for here"
    return f"the image has too many pixels, more than the {most:,} that {reason}:"


def must_be_within(count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{too_many(most)} {count}")


def as_bytes(encoded: bytes | np.ndarray) -> bytes:
    """A string that `tf.numpy_function` passes, outside of a graph as an array []."""
    if isinstance(encoded, bytes):
        return encoded
    return encoded.item() if encoded.dtype == object else encoded.tobytes()  # with final zeros


def is_heif(encoded: bytes) -> bool:
    """Whether a file is HEIC or HEIF, which are boxes as AVIF is."""
    if encoded[4:8] != b"ftyp":
        return False
    major = encoded[8:12]
    if major not in (b"mif1", b"msf1"):  # which both may have
        return major not in (b"avif", b"avis")
    brands = encoded[: int.from_bytes(encoded[:4], "big")]
    return b"avif" not in brands and b"avis" not in brands


@functools.cache
def register_heif() -> None:
    """Lets Pillow decode HEIF; it takes a while to import, and few data sets need it.

    Raises:
      ValueError: the library can't be imported.
    """
    try:
        import pi_heif
    except ImportError as error:
        raise ValueError(
            f"HEIC images are decoded by pi-heif, which can't be imported ({error}): run pip "
            "install pi-heif, or convert them to JPEG"
        ) from None
    pi_heif.options.DECODE_THREADS = 1
    pi_heif.register_heif_opener()


def open_image(encoded: bytes) -> Image.Image:
    """Reads the header of an image of any format that is known here.

    Raises:
      ValueError: it is not an image, or has more than MAX_PIXELS.
    """
    if not encoded:
        raise ValueError("the file is empty")
    formats = FORMATS
    if is_heif(encoded):
        register_heif()
        formats = ("HEIF",)
    try:
        return Image.open(io.BytesIO(encoded), formats=formats)
    except Image.DecompressionBombError as error:
        count = re.search(r"\d+", str(error))
        raise ValueError(f"{too_many(MAX_PIXELS)} {count[0]}") from None
    except UnidentifiedImageError:
        known = ", ".join((*FORMATS, "HEIC"))
        raise ValueError(f"it is damaged or not an image: use one of {known}") from None


def num_pixels(image: Image.Image) -> int:
    """Of an image that is not decoded yet; or of a tile of a TIFF, which may be larger."""
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(TiffImagePlugin.TILEWIDTH, 0) * tags.get(TiffImagePlugin.TILELENGTH, 0)
    return max(image.width * image.height, tile)


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 if there is none, or it makes no sense.

    That of HEIC is always 1: libheif turns the image itself. So does Pillow with TIFF, but only
    when it loads the image.
    """
    with contextlib.suppress(Exception):  # of many types, for damaged EXIF
        value = image.getexif().get(ExifTags.Base.Orientation)
        if value in UPRIGHT:
            return int(value)
    return 1


def decode(encoded: bytes, most: int = MAX_PIXELS, rotates: bool = False) -> Image.Image:
    """Decodes an image to RGB; of several frames or pages, the first.

    Args:
      rotates: whether it is turned upright, as its EXIF orientation says.

    Raises:
      ValueError: it has more than `most` pixels, pixels without a known range, or is not an image.
    """
    with open_image(encoded) as image:
        must_be_within(num_pixels(image), most)
        image.load()
        found = orientation(image) if rotates else 1
        result = as_8_bits(image).convert("RGB")
    return result.transpose(UPRIGHT[found]) if found != 1 else result


def as_8_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 bits as their upper byte, as by TensorFlow; Pillow would clip them.

    Raises:
      ValueError: pixels are floats or have 32 bits: nothing says which value is white.
    """
    if image.mode in ("F", "I"):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise ValueError(
            f"its pixels are {kind} numbers, of which it is not known what is white: convert it to "
            "8 or 16 bits"
        )
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def prepare(image: Image.Image, how: Preparation) -> np.ndarray:
    """A prepared image, uint8 [height, width, 3]."""
    height, width = how.resized(image.height, image.width)
    if height * width > MAX_RESIZED:
        raise ValueError(f"the image is too long and thin to be resized: {height} x {width}")
    resampling = Image.Resampling[how.method.upper()]
    resized = image.resize((width, height), resampling)
    top = how.border(height - how.size[0])
    left = how.border(width - how.size[1])
    fill = how.fill if how.resize == "longer" else (0, 0, 0)
    result = Image.new("RGB", how.size[::-1], fill)
    result.paste(resized, (-left, -top))
    return np.asarray(result)
