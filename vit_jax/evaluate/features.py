"""Frozen features of a whole split, on every host."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult


@dataclasses.dataclass(frozen=True)
class Features:
    """`x` float32 [N, embed], `label` int32 [N]."""

    x: np.ndarray
    label: np.ndarray


def make_step(features_fn: Callable, normalize: Callable) -> Callable:
    """Builds step(params, batch) -> (features float32 [batch, embed], label, mask), whole on every
    device.

    Args:
      features_fn: (params, image [batch, H, W, 3] float32) -> features [batch, embed].
      normalize: uint8 images to what the model expects.
    """

    def step(params, batch):
        x = features_fn(params, normalize(batch["image"])).astype(jnp.float32)
        return sharding.constrain(x, None, None), *(
            sharding.constrain(batch[key], None) for key in ("label", "mask")
        )

    return step


def collect(step: Callable, params, batches: Iterable[dict]) -> Features:
    """The features of all examples with mask 1, in their order.

    Raises:
      NegativeResult: some are not finite.
    """
    kept = []
    for batch in batches:
        x, label, mask = jax.device_get(step(params, batch))
        kept.append((x[mask > 0], label[mask > 0]))
    found = Features(*(np.concatenate(parts) for parts in zip(*kept, strict=True)))
    if bad := int((~np.isfinite(found.x).all(1)).sum()):
        raise NegativeResult(
            f"the features of {bad} of {len(found.x)} images are not finite: the weights are not "
            "sound"
        )
    return found
