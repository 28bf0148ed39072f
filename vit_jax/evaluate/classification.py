"""Top-1 accuracy and loss over a whole split, exact for any batch size and number of devices."""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.models import losses
from vit_jax.models.classifier import normalize


def make_eval_step(
    apply_fn: Callable, loss: str, num_classes: int, normalize: Callable = normalize
) -> Callable:
    """Builds eval_step(params, batch) -> sums over the examples that count; those without any label
    do not.

    Where `label` is a set, each of it is correct. `among`, bool [classes], says between which
    classes the choice is.

    Args:
      apply_fn: (params, image [batch, H, W, 3] float32) -> logits [batch, classes].
      loss: key of `losses.LOSSES`.
      num_classes: of the head.
      normalize: uint8 images to what the model expects.
    """

    def eval_step(params, batch) -> dict:
        logits, target = (
            apply_fn(params, normalize(batch["image"])),
            losses.targets(batch["label"], num_classes),
        )
        mask = batch["mask"] * (target.sum(axis=-1) > 0)
        considered = jnp.where(batch["among"], logits, -jnp.inf) if "among" in batch else logits
        correct = jnp.take_along_axis(target, considered.argmax(-1)[:, None], axis=-1)[:, 0] * mask
        loss_sum = losses.LOSSES[loss](logits, target) * mask
        return dict(correct=correct.sum(), loss=loss_sum.sum(), count=mask.sum())

    return eval_step


def evaluate(eval_step: Callable, params, batches: Iterable[dict]) -> dict[str, float]:
    """Runs over all batches; returns `top1` and `loss`, means over the `count` examples with mask
    1.
    """
    return means([eval_step(params, batch) for batch in batches])


def means(sums: Sequence[dict]) -> dict[str, float]:
    """`top1`, `loss` and `count` of what eval_step gave for every batch."""
    total = {
        name: sum(float(part[name]) for part in jax.device_get(sums))
        for name in ("correct", "loss", "count")
    }
    count = max(total["count"], 1.0)
    return dict(top1=total["correct"] / count, loss=total["loss"] / count, count=total["count"])
