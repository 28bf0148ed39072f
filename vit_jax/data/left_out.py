"""Batches that a run has left out after a loss spike: listed in left_out.json of its workdir, and
which batch a step reads since then.
"""

import dataclasses
import json

from etils import epath

from vit_jax import cli
from vit_jax.errors import UserError

NAME = "left_out.json"


@dataclasses.dataclass(frozen=True)
class Part:
    """What was left out after one spike."""

    spike: int  # the first update whose loss was too high, from 1
    detected: int  # the one at which that was enough
    step: int  # updates done at the checkpoint to which the run went back
    batches: tuple[int, int]  # the first and the last batch left out


class LeftOut:
    """The parts that a run has left out, in the order in which it went back.

    Batches are numbered from 0 by the order of the data, as `order.train_items` and `data show
    --step` number them; step n (n updates done) reads the n-th of those that are not left out.
    """

    def __init__(self, parts: list[Part] = ()):
        self.parts = list(parts)

    @classmethod
    def from_json(cls, entries: list[dict]) -> "LeftOut":
        parts = [Part(**entry) for entry in entries]
        return cls([dataclasses.replace(part, batches=tuple(part.batches)) for part in parts])

    @classmethod
    def read(cls, workdir: epath.Path) -> "LeftOut":
        """What left_out.json says, if there is one.

        Raises:
          UserError: it is damaged.
        """
        path = workdir / NAME
        if not path.exists():
            return cls()
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path} can't be read ({error}): restore it from a copy, or delete it to go by "
                "the list in the newest checkpoint"
            ) from error

    def write(self, workdir: epath.Path) -> None:
        cli.replace_file(workdir / NAME, json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> list[dict]:
        return [dataclasses.asdict(part) for part in self.parts]

    def batch_of(self, step):
        """The batch that a step reads; the same type, int or int64 tensor."""
        import tensorflow as tf  # here, so that training is imported without it

        if isinstance(step, int):
            return int(self.batch_of(tf.constant(step, tf.int64)))
        for part in reversed(self.parts):
            step_before = step + part.detected - part.step  # before the run went back
            step = tf.where(step >= part.step, step_before, step)
        return step
