"""Classification, the objective of arXiv 2010.11929: the loss of the logits."""

import dataclasses
from collections.abc import Callable

from vit_jax.train.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Classify(Objective):
    loss_fn: Callable  # f(logits, label [batch, classes]) -> [batch]

    def loss(self, params, batch, key, step):
        logits = self.model.apply(
            {"params": params}, batch["image"], train=True, rngs={"dropout": key}
        )
        return self.loss_fn(logits, batch["label"]), {}
