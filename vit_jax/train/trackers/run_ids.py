"""The ids that trackers gave a run, in WORKDIR/trackers.json: {tracker: id}."""

import json
import logging
import threading

from vit_jax import cli
from vit_jax.cli.spool import Files
from vit_jax.errors import one_line

log = logging.getLogger("vit_jax.train")

FILE = "trackers.json"


class RunIds:
    """The ids by the name of the tracker; several threads may set theirs."""

    def __init__(self, files: Files):
        self.files = files
        self.path = files.path(FILE)
        self.lock = threading.Lock()
        self.ids = self.read()

    def read(self) -> dict[str, str]:
        """What is in the file; a damaged one is renamed, and runs of trackers begin anew."""
        if not self.path.exists():
            return {}
        try:
            return parse(self.path.read_text())
        except ValueError as error:
            free = cli.name_for_damaged(self.path)
            self.path.rename(free)
            log.warning(
                "%s is damaged (%s), and now called %s: trackers begin new runs",
                *(self.path, one_line(error)[:160], free.name),
            )
        return {}

    def get(self, name: str) -> str | None:
        return self.ids.get(name)

    def set(self, name: str, run_id: str) -> None:
        """Returns once the id is in the workdir."""
        if self.get(name) == run_id:
            return
        with self.lock:
            self.ids[name] = run_id
            cli.replace_file(self.path, json.dumps(self.ids, indent=2) + "\n")
        self.files.deliver()


def parse(text: str) -> dict[str, str]:
    """The content of a trackers.json.

    Raises:
      ValueError: it is damaged.
    """
    try:
        ids = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise ValueError("it is not a table of names and ids")
    return ids
