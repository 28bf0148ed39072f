"""Decodes and prepares an image for weights of timm and Hugging Face, without TensorFlow.

Timm resizes with Pillow, and transformers with a copy of its resizing: antialiased, and rounded to
uint8. images.py is for all other weights.
"""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from vit_jax.models.preparation import Preparation

MAX_PIXELS = 178_956_970  # of an image; Pillow rejects larger ones as decompression bombs
MAX_RESIZED = 2**24  # pixels; a side of 224 becomes at most 334 times as long
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")  # those of `images.decode`


def too_many(most: int) -> str:
    reason = "are allowed" if most == MAX_PIXELS else "each thread has memory for here"
    return f"the image has too many pixels, more than the {most:,} that {reason}:"


def must_be_within(count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{too_many(most)} {count}")


def decode(encoded: bytes, most: int = MAX_PIXELS) -> Image.Image:
    """Decodes an image to RGB; of an animation, the first frame.

    Raises:
      ValueError: it has more than `most` pixels, or is not an image.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            must_be_within(image.width * image.height, most)
            return as_8_bits(image).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"it is not an image: use one of {', '.join(FORMATS)}") from None


def as_8_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 bits as their upper byte, as by TensorFlow; Pillow would clip them."""
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
