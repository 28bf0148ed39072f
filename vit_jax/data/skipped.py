"""Examples that failed in the input pipeline and are skipped: each is counted once, named in the
log, and listed in a file.
"""

import collections
import json
import logging
import re

import jax

from vit_jax.cli.spool import Files
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

RECENT = 1_000  # examples; if more than half of so many are skipped, something else is wrong


def short_reason(error: Exception) -> str:
    """TensorFlow's message, without the places in its graph and the type of our own errors."""
    text = re.sub(r"\{\{[^}]*\}\}|\[\[.*| \[Op:.*", "", one_line(error)).split(" Traceback ")[0]
    return re.sub(r".*Iterator::\S+: |^\s*ValueError: ", "", text).strip()[:160]


class Skipped(dict):
    """id -> reason. With a `path`, also a line of JSON there: `use`, `id`, `name`, `reason`."""

    def __init__(self, is_limited: bool = True):
        super().__init__()
        self.is_limited = is_limited
        self.path = None
        self.use = ""
        self.recent = collections.deque()  # (examples, those skipped) of the latest batches
        self.sums = [0, 0]  # of the same

    def count(self, examples: int, skipped: int) -> None:
        """Counts a batch.

        Raises:
          UserError: of the last RECENT examples or more, more than half were skipped, and the
            number is limited.
        """
        if not self.is_limited:
            return
        self.recent.append((examples, skipped))
        self.sums[0] += examples
        self.sums[1] += skipped
        while self.sums[0] - self.recent[0][0] >= RECENT:
            oldest = self.recent.popleft()
            self.sums[0] -= oldest[0]
            self.sums[1] -= oldest[1]
        if self.sums[0] >= RECENT and 2 * self.sums[1] > self.sums[0]:
            latest, reason = next(reversed(self.items()))
            raise UserError(
                f"{self.sums[1]:,} of the last {self.sums[0]:,} examples can't be used, such as "
                f"that with id {latest} ({reason}): look at the data with vit_jax.data check; "
                "saved checkpoints are intact"
            )

    def list_in(self, files: Files, use: str) -> None:
        """Lists them in skipped.jsonl of a workdir; processes other than the leader write
        logs/skipped_I.jsonl.

        Entries from before the run was continued count.
        """
        index = jax.process_index()
        name = f"logs/skipped_{index}.jsonl" if index else "skipped.jsonl"
        self.path = files.path(name)
        self.use = use
        if not self.path.exists():
            return
        for line in self.path.read_bytes().decode(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                if entry["use"] == use:
                    self[entry["id"]] = entry["reason"]
            except (ValueError, KeyError, TypeError):  # an incomplete line
                continue

    def add(self, index: int, name: str, reason: str) -> None:
        log.warning("%s can't be read as an image and is skipped: %s", name, reason)
        self[index] = reason
        if self.path is None:
            return
        entry = dict(use=self.use, id=index, name=name, reason=reason)
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except Exception as error:  # every store has errors of its own
            log.warning("%s can't be written: %s", self.path, one_line(error)[:160])
