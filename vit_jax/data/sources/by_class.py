"""Balanced classes: each class is a part of a mixture, and its weight says how often it is seen."""

import numpy as np

from vit_jax.data.sources.source import Source, Subset
from vit_jax.errors import UserError

# The rarest class has this many examples in a block, so that rounding changes no share by more than
# half a percent.
RAREST = 100


def shares(counts: np.ndarray, balance: float) -> np.ndarray:
    """Examples of each class in a block of the order, int64 [classes], in proportion to
    counts^(1 - balance): 0 is the data as they are, 1 every class equally often.
    """
    relative = (counts / counts.min()) ** (1.0 - balance)
    wanted = np.round(RAREST * relative).astype(np.int64)
    return wanted // np.gcd.reduce(wanted)


def labels_of(source: Source, where: str) -> np.ndarray:
    """The label of every example.

    Raises:
      UserError: an image may have several labels, or one has a label that is not a class.
    """
    if source.set_size:
        raise UserError(
            f"config key data.class_balance needs one label per image, but images of {where} may "
            "have several: set it to 0"
        )
    labels = np.asarray(source.labels())
    wrong = np.flatnonzero((labels < 0) | (labels >= source.num_classes))
    if len(wrong):
        raise UserError(
            f"config key data.class_balance needs the class of every image, but "
            f"{source.describe(int(wrong[0]))} has the label {labels[wrong[0]]}: correct the "
            "label, or set it to 0"
        )
    return labels


class ByClass(Subset):
    """The examples of a source sorted by class, each class a part of a mixture."""

    def __init__(self, inner: Source, balance: float, where: str):
        labels = labels_of(inner, where)
        super().__init__(inner, np.argsort(labels, kind="stable"))
        self.counts = np.unique(labels, return_counts=True)[1]
        self.shares = shares(self.counts, balance)

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        return tuple(zip(self.counts.tolist(), self.shares.tolist(), strict=True))

    @property
    def block(self) -> int:
        return int(self.shares.sum())
