"""Top-1 accuracy and loss over a whole split, exact for any batch size and number of devices."""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.models import losses
from vit_jax.models.classifier import normalize


def make_example_step(
    apply_fn: Callable, loss: str | Callable, num_classes: int, normalize: Callable = normalize
) -> Callable:
    """Builds f(params, batch) -> what is known of each example of a batch:

      choices: float32 [batch, classes], the logits, -inf for classes that are not predicted;
      correct, loss: float32 [batch], 0 for examples that do not count;
      mask: float32 [batch], 1 for examples that count: those with mask 1 and at least one label.

    If an example has several labels, each of them is correct. If the batch has `among`, bool
    [classes], only these classes are predicted.

    Args:
      apply_fn: (params, image [batch, H, W, 3] float32) -> logits [batch, classes].
      loss: key of `losses.LOSSES`, or f(logits, label [batch, classes]) -> [batch].
      num_classes: of the head.
      normalize: from uint8 images to the model's input.
    """

    loss_fn = losses.LOSSES.get(loss, loss)

    def example_step(params, batch) -> dict:
        logits = apply_fn(params, normalize(batch["image"]))
        target = losses.targets(batch["label"], num_classes)
        mask = batch["mask"] * (target.sum(axis=-1) > 0)
        choices = logits
        if "among" in batch:
            choices = jnp.where(batch["among"], logits, -jnp.inf)
        predicted = choices.argmax(-1)[:, None]
        correct = jnp.take_along_axis(target, predicted, axis=-1)[:, 0] * mask
        return dict(
            choices=choices, correct=correct, loss=loss_fn(logits, target) * mask, mask=mask
        )

    return example_step


def make_eval_step(
    apply_fn: Callable, loss: str | Callable, num_classes: int, normalize: Callable = normalize
) -> Callable:
    """Builds eval_step(params, batch) -> sums over the examples that count; see
    `make_example_step`.
    """
    example_step = make_example_step(apply_fn, loss, num_classes, normalize)

    def eval_step(params, batch) -> dict:
        found = example_step(params, batch)
        return dict(
            correct=found["correct"].sum(), loss=found["loss"].sum(), count=found["mask"].sum()
        )

    return eval_step


def evaluate(eval_step: Callable, params, batches: Iterable[dict]) -> dict[str, float]:
    """Runs over all batches; returns `top1` and `loss`, means over `count` examples."""
    return means([eval_step(params, batch) for batch in batches])


def means(sums: Sequence[dict]) -> dict[str, float]:
    """`top1`, `loss` and `count` from the sums that eval_step returned for every batch."""
    total = {
        name: sum(float(part[name]) for part in jax.device_get(sums))
        for name in ("correct", "loss", "count")
    }
    count = max(total["count"], 1.0)
    return dict(top1=total["correct"] / count, loss=total["loss"] / count, count=total["count"])
