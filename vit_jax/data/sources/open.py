"""Opens any data set by its name: digits, folder:PATH, tars:PATH, csv:PATH, vtab:TASK, a mixture,
MODULE:ATTRIBUTE of the user's own, or one that TFDS has prepared.

`user` is `config.user`, for a data set of the user's own. With `labelled` False, labels are neither
needed nor read, and there are 0 classes.
"""

import numpy as np
import tensorflow as tf

from vit_jax.cli import objects
from vit_jax.config import is_own
from vit_jax.data.sources import catalog, own, splits, storage, vtab_tasks
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.data.sources.by_class import ByClass
from vit_jax.data.sources.source import Source, Subset, mixture
from vit_jax.errors import UserError


def must_be_reachable(name: str, data_dir: str) -> None:
    """Fails early if a store can't be reached; uses the network only if the data set is on one."""
    kind, _, path = name.partition(":")
    location = path if kind in catalog.LISTED else data_dir
    if objects.is_object(f"{location}/") and name != "digits":
        storage.must_be_reachable(location)


def open_source(
    name: str, split: str, data_dir: str = "", user=None, labelled: bool = True
) -> Source:
    """Opens a split of a data set."""
    must_be_reachable(name, data_dir)
    tf.config.set_visible_devices([], "GPU")
    if is_own(name):
        return own.load(name, split, data_dir, user, labelled)
    if name.startswith(vtab_tasks.PREFIX):
        task = vtab_tasks.vtab(name.removeprefix(vtab_tasks.PREFIX))
        found = vtab_source.find(task, data_dir)
        return vtab_source.open_part(name, task, found, split, labelled)
    listing = catalog.listing(name, labelled)
    if listing is None:
        return tfds_source.load(name, split, data_dir, labelled)
    return Subset(listing, splits.select(split, listing.splits, name))


def split_sizes(name: str, data_dir: str = "") -> dict[str, int]:
    """Examples of every split of a data set, by all of its names; {} for the user's own."""
    if is_own(name):
        return {}
    must_be_reachable(name, data_dir)
    listing = catalog.listing(name)
    if listing is None:
        parts = tfds_source.builder_of(name, data_dir).info.splits
        return {split: part.num_examples for split, part in parts.items()}
    return {split: len(numbers) for split, numbers in listing.splits.items()}


def open_training(data, user=None, labelled: bool = True) -> Source:
    """What `config.data` trains on: a data set, a stratified part of it, or a mixture."""

    def open_part(name: str, split: str) -> Source:
        return open_source(name, split, data.data_dir, user, labelled)

    if data.name == "mixture":
        parts = catalog.mixture_parts(data)
        opened = [open_part(name, split) for name, split, _ in parts]
        return mixture(opened, [weight for *_, weight in parts], [name for name, *_ in parts])
    source = open_part(data.name, data.split)
    if data.subset:
        source = Subset(source, subset_of(source, data))
    if data.class_balance:
        source = ByClass(source, data.class_balance, f"{data.name} {data.split}")
    return source


def open_rest(data, user=None) -> Source:
    """What `config.data.subset` leaves out."""
    if data.subset:
        source = open_source(data.name, data.split, data.data_dir, user)
        rest = np.setdiff1d(np.arange(len(source)), subset_of(source, data))
        if len(rest):
            return Subset(source, rest)
    raise UserError(
        f"an evaluation has data.rest=True, but data.subset={data.subset!r} of {data.name} "
        "leaves nothing out: set it to a part, such as 90%"
    )


def subset_of(source: Source, data) -> np.ndarray:
    where = f"{data.name} {data.split}"
    return splits.stratified(np.asarray(source.labels()), data.subset, data.subset_seed, where)
