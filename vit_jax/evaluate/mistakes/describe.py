"""From the records of a classification to the folder that describes it."""

import logging
from collections.abc import Mapping

import jax
from etils import epath

from vit_jax.evaluate.mistakes import contact_sheets, folder
from vit_jax.evaluate.mistakes.records import Records
from vit_jax.evaluate.splits import Split
from vit_jax.weights.formats.weights import Weights
from vit_jax.weights.pretrained import Pretrained

log = logging.getLogger("vit_jax.evaluate")


def class_names(weights: Weights, loaded: Pretrained, split: Split) -> tuple[str, ...]:
    """Those of the weights, or else of the data."""
    names = loaded.class_names
    known = split.source.class_names
    return tuple(known) if not weights.class_names and len(known) == len(names) else names


def write(
    out: str,
    records: Mapping[str, Records],
    splits: Mapping[str, Split],
    weights: Weights,
    loaded: Pretrained,
    params,
) -> None:
    """Writes a folder OUT/NAME for each evaluation. All processes compute, process 0 writes.

    Args:
      records, splits: by name of the evaluation.
      weights, loaded: what was evaluated.
      params: those of `loaded`, on the mesh of `jax.set_mesh`.
    """
    looks = {}
    for name, found in records.items():
        ids = found.id[folder.chosen(found)]
        looks[name] = contact_sheets.looks(loaded.model, params, splits[name], ids)
    # Only now, so that no process waits for process 0 in a computation if that can't write.
    if jax.process_index() != 0:
        return
    for name, found in records.items():
        split = splits[name]
        names = class_names(weights, loaded, split)
        about = folder.About(name, weights.path, weights.step, names, split.source.describe)
        folder.write(epath.Path(out) / name, folder.files(about, found, looks[name]))
        log.info("what %s gets wrong in %s: %s/%s", weights.path, name, out, name)
