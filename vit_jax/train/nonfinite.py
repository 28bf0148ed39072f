"""What happens when loss or gradients are not finite, or no example of a batch can be used: the
step skips the update, and the run logs that, or ends.
"""

import contextlib
import json
import logging
from collections.abc import Callable

import jax
from etils import epath

from vit_jax.errors import NegativeResult

log = logging.getLogger(__name__)

SHOWN = 8  # ids in the message


class SkippedUpdates:
    """Watches what `step.make_train_step` counts, and ends a run that can't recover."""

    def __init__(self, limit: int, folder: epath.Path, ids: Callable[[int], list[int]]):
        """
        Args:
          limit: skipped updates in a row that end the run.
          folder: where the report is written.
          ids: f(update, from 1) -> ids of the examples of its global batch.
        """
        self.limit = limit
        self.folder = folder
        self.ids = ids
        self.num_reported = 0

    def check(self, number: int, scalars: dict[str, float], at_end: bool) -> None:
        """Checks the metrics of update `number`.

        Raises:
          NegativeResult: `limit` updates in a row were skipped, or the last ones of the run.
        """
        skipped = scalars["train/skipped_steps"]
        in_row = scalars["train/skipped_in_row"]
        if in_row >= self.limit or (at_end and in_row):
            raise NegativeResult(self.report(number, in_row, scalars["train/loss"]))
        if skipped > self.num_reported:
            log.warning(
                "%d updates up to step %d were skipped, because loss or gradients were not "
                "finite, or no example could be used; %d in a row end the run",
                skipped,
                number,
                self.limit,
            )
            self.num_reported = skipped

    def report(self, number: int, in_row: int, loss: float) -> str:
        """Writes nonfinite.json, and returns the message."""
        first = number - in_row + 1
        updates = range(first, first + min(in_row, self.limit))
        ids = {update: self.ids(update) for update in updates}
        path = self.folder / "nonfinite.json"
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # a full disk does not hide what there is to tell
                path.write_text(json.dumps(dict(loss=repr(loss), example_ids=ids)) + "\n")
        shown = ", ".join(map(str, ids[first][:SHOWN])) + ", ..." * (len(ids[first]) > SHOWN)
        return (
            f"loss or gradients were not finite in {len(updates)} updates in a row, from step "
            f"{first} on (loss at step {number}: {loss}; examples of step {first}: {shown}; of all "
            f"in {path}): they were skipped, and saved checkpoints are valid; lower optim.lr, set "
            "optim.grad_clip_norm, or check whether the examples can be read"
        )
