"""Opens any data set by its name: digits, folder:PATH, tars:PATH, csv:PATH, a mixture, or what TFDS has prepared."""

import numpy as np
import tensorflow as tf

from vit_jax.data import catalog, prepared, splits
from vit_jax.data.source import Source, indexed, mixture, take


def open_source(name: str, split: str, data_dir: str = "") -> Source:
    """Opens a split of a data set.

    Raises:
      UserError: it is not there, is incomplete, or has no such split.
    """
    tf.config.set_visible_devices([], "GPU")
    if (listing := catalog.listing(name)) is None:
        return prepared.load(name, split, data_dir)
    return indexed(listing, splits.select(split, listing.splits, name))


def open_training(data) -> Source:
    """What `config.data` trains on: a data set, a stratified part of it, or a mixture."""
    if data.name == "mixture":
        parts = catalog.mixture_parts(data)
        opened = [open_source(name, split, data.data_dir) for name, split, _ in parts]
        return mixture(opened, [weight for *_, weight in parts], [name for name, *_ in parts])
    source = open_source(data.name, data.split, data.data_dir)
    if not data.subset:
        return source
    where = f"{data.name} {data.split}"
    numbers = splits.stratified(np.asarray(source.labels()), data.subset, data.subset_seed, where)
    return take(source, numbers)
