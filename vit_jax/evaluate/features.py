"""Computes the frozen features of a whole split; every host has all of them."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult


@dataclasses.dataclass(frozen=True)
class Features:
    """`x` float32 [N, embed], `label` int32 [N]. Logits are collected in the same way."""

    x: np.ndarray
    label: np.ndarray


def make_step(features_fn: Callable, normalize: Callable) -> Callable:
    """Builds step(params, batch) -> (features float32 [batch, embed], label, mask), replicated on
    all devices.

    Args:
      features_fn: (params, image [batch, H, W, 3] float32) -> features [batch, embed].
      normalize: from uint8 images to the model's input.
    """

    def step(params, batch):
        x = features_fn(params, normalize(batch["image"])).astype(jnp.float32)
        label = sharding.constrain(batch["label"], *[None] * batch["label"].ndim)
        mask = sharding.constrain(batch["mask"], None)
        return sharding.constrain(x, None, None), label, mask

    return step


def collect(step: Callable, params, batches: Iterable[dict], what: str = "features") -> Features:
    """The features of all examples with mask 1, in their order; `what`: their name in messages."""
    xs = []
    labels = []
    for batch in batches:
        x, label, mask = jax.device_get(step(params, batch))
        xs.append(x[mask > 0])
        labels.append(label[mask > 0])
    x = np.concatenate(xs)
    num_bad = int((~np.isfinite(x).all(1)).sum())
    if num_bad:
        raise NegativeResult(
            f"the {what} of {num_bad} of {len(x)} images are not finite: check the weights"
        )
    if not len(x):
        raise NegativeResult("none of the images of a split can be read: look at the data")
    return Features(x, np.concatenate(labels))
