"""What one image file is, and what is wrong with it: decoded as for training, but a JPEG at a part
of its size, which finds the same errors.
"""

import dataclasses
import hashlib
import os
import re

import numpy as np
import tensorflow as tf
from PIL import Image

from vit_jax.data import images, pillow
from vit_jax.data.sources.source import Source
from vit_jax.errors import UserError, one_line

SIDE = 8  # of the difference hash, in bits
THUMB = (SIDE + 1, SIDE)  # width and height
FEWEST_PIXELS = 8 * SIDE  # of the shorter side of a JPEG that is decoded at a part of its size
FLAT = 8  # levels of grey; with less between black and white, the hash is that of noise
# Format of Pillow -> suffixes of such files.
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "HEIF": (".heic", ".heif"),
    "AVIF": (".avif",),
}

UNREADABLE = "files that can't be read"
EMPTY = "empty files (0 bytes)"
NO_IMAGE = "files that are not images, or damaged from the start"
TRUNCATED = "truncated images"
TOO_LARGE = "images with too many pixels"
UNDECODABLE = "images that can't be decoded"


@dataclasses.dataclass
class Facts:
    """About one file. `fault`: one of the kinds above and the reason; "" if there is none."""

    format: str = ""
    size: tuple[int, int] = (0, 0)  # width and height, upright
    orientation: int = 1  # of EXIF, 1 to 8
    digest: int = 0  # of the bytes, 64 bits
    thumb: np.ndarray | None = None  # grey values, uint8 [8, 9]; None without pixels or contrast
    fault: str = ""
    reason: str = ""


def failed(facts: Facts, fault: str, reason: object) -> Facts:
    return dataclasses.replace(facts, fault=fault, reason=one_line(reason)[:120])


def one_line_of(error: Exception) -> str:
    """The reason in an error of a decoder, without the places in TensorFlow's graph."""
    text = one_line(error).rpartition("}} ")[2]
    return re.split(r" \[Op:| Traceback ", text)[0]


def examine(source: Source, i: int, most: int) -> Facts:
    """Reads image `i`. Thread-safe.

    Args:
      most: pixels of the largest image that is decoded.
    """
    try:
        encoded = source.read([i])[0]
    except (OSError, UserError) as error:
        return failed(Facts(), UNREADABLE, getattr(error, "strerror", None) or error)
    facts = Facts(digest=int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big"))
    if not encoded:
        return failed(facts, EMPTY, "")
    try:
        with pillow.open_image(encoded) as image:
            facts.format = "JPEG" if image.format == "MPO" else image.format
            facts.size = image.size
            pillow.must_be_within(pillow.num_pixels(image), most)
            facts.orientation = pillow.orientation(image)
    except Exception as error:  # headers fail in many ways
        kind = TOO_LARGE if "too many pixels" in str(error) else NO_IMAGE
        return failed(facts, kind, error)
    try:
        pixels = small(encoded, facts, most)
    except Exception as error:  # decoders raise errors of many types
        return failed(facts, kind_of(encoded, error), one_line_of(error))
    upright = Image.fromarray(pixels)
    if facts.orientation != 1 and facts.format == "JPEG":
        upright = upright.transpose(pillow.UPRIGHT[facts.orientation])
    if facts.orientation >= 5 and facts.format != "TIFF":  # whose size is that of the upright one
        facts.size = facts.size[::-1]
    facts.thumb = thumbnail(upright)
    return facts


def kind_of(encoded: bytes, error: Exception) -> str:
    """The kind of fault of an image that can't be decoded."""
    text = str(error).lower()
    is_cut = encoded[:3] == b"\xff\xd8\xff" and encoded[-2:] != b"\xff\xd9"
    if is_cut or "truncated" in text or "premature" in text:
        return TRUNCATED
    return UNDECODABLE


def small(encoded: bytes, facts: Facts, most: int) -> np.ndarray:
    """The pixels, uint8 [H, W, 3]; those of a JPEG as stored, of a large one at 1/2, 1/4 or 1/8 of
    its size.
    """
    if facts.format != "JPEG":
        return images.decode(tf.constant(encoded), most, rotates=True).numpy()
    fits = [ratio for ratio in (8, 4, 2) if min(facts.size) >= ratio * FEWEST_PIXELS]
    return tf.io.decode_jpeg(encoded, channels=3, ratio=max(fits, default=1)).numpy()


def thumbnail(image: Image.Image) -> np.ndarray | None:
    grey = image.convert("L").resize(THUMB, Image.Resampling.BOX)
    thumb = np.asarray(grey)
    return thumb if int(thumb.max()) - int(thumb.min()) >= FLAT else None


def has_other_suffix(path: str, kind: str) -> bool:
    """Whether a file of format `kind` has the suffix of another one."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix not in SUFFIXES.get(kind, (suffix,))
