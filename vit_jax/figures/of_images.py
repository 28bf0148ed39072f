"""What a model computes for images, in batches whose attention weights fit in memory; only small
arrays leave the device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vit_jax.data import given_images
from vit_jax.errors import NegativeResult
from vit_jax.figures.attention import (
    attention_bytes,
    attention_map,
    distance_sums,
    head_maps,
    mean_of,
)
from vit_jax.figures.tokens import token_norms
from vit_jax.models.intermediates import intermediates
from vit_jax.weights.pretrained import Pretrained

MEMORY = 512 * 2**20  # bytes of the attention weights of a batch, of all layers
MOST_ROWS = 32
SHOWN = 8  # images that are drawn


def rows_at_once(model) -> int:
    """Images of a batch, at least one."""
    return max(1, min(MOST_ROWS, MEMORY // max(attention_bytes(model), 1)))


@functools.partial(jax.jit, static_argnums=0)
def measure(model, params: dict, image) -> dict:
    """Arrays with a row for each image, of those that the architecture has.

    Args:
      image: uint8 [batch, H, W, 3].

    Returns:
      - `is_finite`: [batch], whether all of the others are.
      - `features`: [batch, h, w, embed], the patches after the final normalisation.
      - `norms`: [batch, layers + 1, length], of all tokens; see `token_norms`.
      - `distance`, `counts`: [batch, layers, heads]; see `distance_sums`.
      - `rollout`: [batch, h, w]; see `attention_map`.
      - `heads`: [batch, heads, h, w]; see `head_maps`.
    """
    found = intermediates(model, params, model.normalize(image))
    grid = found["grid"]
    prefix = found["num_prefix"]
    result = dict(features=found["encoded"].astype(jnp.float32))
    if "tokens" in found:
        patches = result["features"][:, prefix:]
        result["features"] = patches.reshape(len(image), *grid, -1)
        result["norms"] = token_norms(found["tokens"]).swapaxes(0, 1)
    if "attention" in found:
        # Layer by layer, the compiler need not keep the weights of all.
        sums = [distance_sums(x[None], grid, model.cell, prefix) for x in found["attention"]]
        distance, counts = zip(*sums, strict=True)
        result["distance"] = jnp.concatenate(distance).swapaxes(0, 1)
        result["counts"] = jnp.concatenate(counts).swapaxes(0, 1)
        result["rollout"] = attention_map(model, found)
        result["heads"] = head_maps(model, found)
    finite = [jnp.isfinite(x).reshape(len(image), -1).all(axis=1) for x in result.values()]
    return result | dict(is_finite=jnp.all(jnp.stack(finite), axis=0))


@dataclasses.dataclass
class Measurements:
    """What `measure` returns: sums over all images, and arrays of those that are drawn."""

    count: int = 0  # images
    sums: dict = dataclasses.field(default_factory=dict)  # distance, counts: [layers, heads]
    # Each a list of arrays with a row for each of the first SHOWN images: `image`, uint8, without
    # a border that belongs to no patch, and those of `measure`.
    parts: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def add(self, found: dict) -> None:
        """Adds a batch: `image` and what `measure` returns."""
        room = max(0, SHOWN - self.count)
        self.count += len(found["image"])
        for name, array in found.items():
            if name in ("distance", "counts"):
                self.sums[name] = self.sums.get(name, 0) + array.sum(axis=0, dtype=np.float64)
            elif room:  # a copy, so that the rest of the batch is not kept
                self.parts.setdefault(name, []).append(array[:room].copy())

    def mean_distance(self) -> np.ndarray:
        """Over all images; see `attention.mean_distance`."""
        return mean_of(self.sums["distance"], self.sums["counts"])

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


def measure_all(pretrained: Pretrained, paths: list[str], skipped: dict[int, str]) -> Measurements:
    """Computes what is drawn of images.

    Args:
      skipped: gets the number of each path that can't be read, and why.

    Raises:
      NegativeResult: a result is not finite.
    """
    model, params = pretrained
    params = jax.device_put(params)
    rows = min(rows_at_once(model), len(paths))
    measurements = Measurements()
    with tqdm(total=len(paths), unit=" images", disable=len(paths) <= rows) as progress:
        for batch in given_images.batches(model, paths, rows, skipped):
            progress.update(min(rows, len(paths) - progress.n))
            readable = batch["mask"] > 0
            if not readable.any():
                continue
            found = jax.device_get(measure(model, params, batch["image"]))
            if not found.pop("is_finite")[readable].all():
                raise NegativeResult(
                    f"{pretrained.path} gives results that are not finite: these weights are "
                    "damaged, or overflow: choose others"
                )
            found["image"] = without_border(model, batch["image"])
            measurements.add({name: array[readable] for name, array in found.items()})
    return measurements


def without_border(model, image: np.ndarray) -> np.ndarray:
    """The part of images [batch, H, W, 3] that patches stand for."""
    height, width = (side * cell for side, cell in zip(model.grid, model.cell, strict=True))
    return image[:, :height, :width]
