"""What a tracker is."""

import uuid
from collections.abc import Mapping

import numpy as np


class Tracker:
    """Keeps the metrics of a run, such as Weights & Biases or MLflow. A subclass defines `write`,
    and whatever else it needs.

    All methods are called in one thread, which is not that of the training; what they raise turns
    the tracker off for the rest of the start.
    """

    def start(self, run_id: str | None) -> str:
        """Begins or continues a run.

        Args:
          run_id: what the first start returned; None if this is the first one.

        Returns:
          the id of the run, which is kept in the workdir before `write` is called.
        """
        return run_id or new_id()

    def last_step(self) -> int | None:
        """The last step that the run has, after `start`: earlier ones are not sent again, and those
        of metrics.jsonl that come after it are sent. -1: none. None: unknown, and then all that an
        earlier start wrote to metrics.jsonl counts as sent.
        """
        return None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The finite metrics of a step. Steps ascend, and each comes once."""
        raise NotImplementedError("a tracker defines `write`")

    def pictures(self, step: int, name: str, pictures: np.ndarray) -> None:
        """uint8 [n, H, W, 3]; called before `write` of the same step, if that has metrics."""

    def finish(self, exit_code: int) -> None:
        """The end of this start: 0, the run is done; 75, the same command continues it; others, it
        failed.
        """


def new_id() -> str:
    return uuid.uuid4().hex[:12]
