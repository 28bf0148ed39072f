"""Data without labels: a source of 0 classes, whose labels are all 0 and mean nothing."""

import dataclasses

import numpy as np

from vit_jax.data.sources.listing import Listing

# For data that have none.
INSTEAD = (
    "or train without labels, such as with objective=mae, or with one of your own and "
    "data.unlabelled=True"
)


def numbered(examples: int) -> tuple[np.ndarray, tuple[str, ...], int]:
    """(labels, class names, number of classes), as `listing.number_classes` gives them."""
    return labels(examples), (), 0


def labels(examples: int) -> np.ndarray:
    return np.zeros(examples, np.int32)


def without_labels(listing: Listing) -> Listing:
    """The same images in the same order."""
    blank = labels(len(listing))
    return dataclasses.replace(listing, all_labels=blank, class_names=(), num_classes=0, set_size=0)
