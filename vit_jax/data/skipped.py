"""Examples that failed in the input pipeline and are skipped: each is counted once, named in the
log, and listed in a file.
"""

import json
import logging

import jax

from vit_jax.cli.spool import Files
from vit_jax.errors import one_line

log = logging.getLogger(__name__)


class Skipped(dict):
    """id -> reason. With a `path`, also a line of JSON there: `use`, `id`, `name`, `reason`."""

    def __init__(self):
        super().__init__()
        self.path = None
        self.use = ""

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
        for line in self.path.read_text().splitlines():
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
