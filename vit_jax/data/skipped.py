"""Examples that could not be used and were skipped: each is counted once, named in the log, and
listed in a file.
"""

import contextlib
import json
import logging

import jax
from etils import epath

from vit_jax.errors import one_line

log = logging.getLogger(__name__)


class Skipped(dict):
    """id -> why; with a `path`, a line of JSON there for each: `use`, `id`, `name`, `reason`."""

    def __init__(self):
        super().__init__()
        self.path, self.use = None, ""

    def list_in(self, folder: epath.Path, use: str) -> None:
        """Lists them in skipped.jsonl of a workdir, all but the leading process in
        logs/skipped_I.jsonl.

        What stands there already, from before the run was continued, counts.
        """
        index = jax.process_index()
        self.path, self.use = (
            folder / (f"logs/skipped_{index}.jsonl" if index else "skipped.jsonl"),
            use,
        )
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line
                if (found := json.loads(line))["use"] == use:
                    self[found["id"]] = found["reason"]

    def note(self, index: int, name: str, reason: str) -> None:
        log.warning("%s can't be read as an image and is skipped: %s", name, reason)
        self[index] = reason
        if self.path is None:
            return
        try:
            with self.path.open("a") as file:
                file.write(
                    json.dumps(dict(use=self.use, id=index, name=name, reason=reason)) + "\n"
                )
        except Exception as error:  # every store has errors of its own
            log.warning("%s can't be written: %s", self.path, one_line(error)[:160])
