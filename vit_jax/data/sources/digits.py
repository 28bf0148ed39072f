"""The data set that needs no network: the 1,797 digits that scikit-learn has (8 x 8 pixels, ten
classes; https://doi.org/10.24432/C50P49, CC BY 4.0) with a fixed split.

They are kept here because importing scikit-learn would take half a second of every start.
"""

import io
import pathlib

import numpy as np
from PIL import Image

from vit_jax.data.sources.listing import InMemory, Listing

# `images` [1797, 8, 8] with values up to 16, `labels`, and the places of each split: of 1,077, 360
# and 360 images, by two of scikit-learn's stratified splits with seed 0.
FILE = pathlib.Path(__file__).with_name("digits.npz")
SPLITS = ("train", "val", "test")
NAMES = tuple(str(digit) for digit in range(10))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


def scans() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """uint8 [1797, 8, 8], labels int32 [1797], and the places of each split."""
    with np.load(FILE, allow_pickle=False) as data:
        images = np.round(data["images"] * (255 / 16)).astype(np.uint8)
        labels = data["labels"].astype(np.int32)
        return images, labels, {split: data[split].astype(int) for split in SPLITS}


def load(_: str = "") -> Listing:
    """All digits as PNG files."""
    images, labels, parts = scans()
    return InMemory(
        name="digits",
        files=[png(image) for image in images],
        all_labels=labels,
        splits=parts,
        class_names=NAMES,
        num_classes=len(NAMES),
        fingerprint="digits",
    )
