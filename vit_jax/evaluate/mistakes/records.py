"""One record for each image of a classification, computed in one pass over the data."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.distributed import sharding

TOP = 5  # classes that a record has
MOST_SCORES = 2**31  # bytes of all probabilities of all images


@dataclasses.dataclass(frozen=True)
class Records:
    """What a model says of the N images that count, in the order of the data.

    Attributes:
      id: int64 [N], the index of the image in its split.
      label: int32 [N], or [N, set] padded with -1 if images have several labels.
      top: int32 [N, k], the classes with the highest logits, highest first; k is 5, or the number
        of classes if that is less.
      probability: float32 [N, k], theirs.
      correct: bool [N], whether the first of them is a label of the image.
      loss: float32 [N].
      scores: float32 [N, classes], all probabilities, if images have several labels and that is
        less than MOST_SCORES; else None.
    """

    id: np.ndarray
    label: np.ndarray
    top: np.ndarray
    probability: np.ndarray
    correct: np.ndarray
    loss: np.ndarray
    scores: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.id)

    @property
    def has_sets(self) -> bool:
        """Whether images have several labels."""
        return self.label.ndim > 1

    @property
    def label_sets(self) -> np.ndarray:
        """The labels as int32 [N, set], padded with -1."""
        return self.label if self.has_sets else self.label[:, None]

    def metrics(self) -> dict[str, float]:
        """`top1`, `loss` and `count`, as `classification.evaluate` returns them."""
        count = max(len(self), 1)
        return dict(
            top1=float(self.correct.sum()) / count,
            loss=float(self.loss.sum(dtype=np.float64)) / count,
            count=float(len(self)),
        )

    def top_accuracy(self) -> float:
        """Share of the images with a label among the classes of `top`."""
        hits = (self.label_sets[:, :, None] == self.top[:, None]).any(axis=(1, 2))
        return float(hits.sum()) / max(len(self), 1)

    def mistakes(self) -> np.ndarray:
        """Rows of the images that are wrong, the highest loss first."""
        wrong = np.flatnonzero(~self.correct)
        return wrong[np.argsort(-self.loss[wrong], kind="stable")]

    def least_sure(self) -> np.ndarray:
        """All rows, the lowest probability of the predicted class first."""
        return np.argsort(self.probability[:, 0], kind="stable")


def make_step(example_step: Callable, is_multi_label: bool) -> Callable:
    """Builds f(params, batch) -> arrays of `Records` by name, without `id` and with `mask`,
    replicated on all devices.

    Args:
      example_step: see `classification.make_example_step`.
      is_multi_label: whether a probability is a sigmoid, not a softmax.
    """
    probabilities = jax.nn.sigmoid if is_multi_label else jax.nn.softmax

    def record_step(params, batch) -> dict:
        found = example_step(params, batch)
        choices = found.pop("choices")
        probability = probabilities(choices)
        _, top = jax.lax.top_k(choices, min(TOP, choices.shape[-1]))
        found |= dict(label=batch["label"], top=top)
        found["probability"] = jnp.take_along_axis(probability, top, axis=-1)
        if batch["label"].ndim > 1:
            found["scores"] = probability
        return {name: sharding.constrain(x, *[None] * x.ndim) for name, x in found.items()}

    return record_step


def collect(step: Callable, params, batches: Iterable[dict], num_examples: int) -> Records:
    """The records of all examples that count.

    Args:
      step: see `make_step`.
      batches: every example in order, see `data.pipeline.eval_pipeline`.
      num_examples: in all batches.
    """
    parts = []
    start = 0
    for batch in batches:
        found = jax.device_get(step(params, batch))
        counts = found.pop("mask") > 0
        if "scores" in found and 4 * found["scores"].shape[1] * num_examples > MOST_SCORES:
            del found["scores"]
        if "among" in batch:  # the others have probability 0
            num_choices = max(1, int(batch["among"].sum()))  # none if no image has a label
            found |= {name: found[name][:, :num_choices] for name in ("top", "probability")}
        part = {name: values[counts] for name, values in found.items()}
        parts.append(part | dict(id=start + np.flatnonzero(counts)))
        start += len(counts)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    columns["correct"] = columns["correct"] > 0
    return Records(**columns)
