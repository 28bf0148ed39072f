"""The data set that needs no network: scikit-learn's 1,797 scanned digits (8 x 8 pixels, ten
classes) with a fixed split.
"""

import io

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from vit_jax.data.sources.listing import InMemory, Listing

NAMES = tuple(str(digit) for digit in range(10))


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


def load(_: str = "") -> Listing:
    """All digits as PNG files, in splits of 1,077 / 360 / 360, stratified, seed 0."""
    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)
    labels = data.target.astype(np.int32)
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=360, random_state=0, stratify=labels
    )
    train, val = train_test_split(rest, test_size=360, random_state=0, stratify=labels[rest])
    return InMemory(
        name="digits",
        files=[png(image) for image in images],
        all_labels=labels,
        splits={"train": train, "val": val, "test": test},
        class_names=NAMES,
        num_classes=len(NAMES),
        fingerprint="digits",
    )
