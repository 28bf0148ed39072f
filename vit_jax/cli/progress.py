"""The progress of a download: a bar on a terminal, elsewhere one log line if it takes a while."""

import contextlib
import logging
import time

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vit_jax.cli.log import process_index
from vit_jax.cli.terminal import Console

log = logging.getLogger(__name__)

QUIET_S = 1  # before the log line


class Download:
    """The progress of one file.

    Args:
      name: of the file.
      size: bytes of the whole file, if it is known.
      done: bytes that are here already.
    """

    def __init__(self, name: str, size: int | None, done: int):
        self.name = name
        self.total = f"{size / 2**20:,.1f} MiB" if size else "of unknown size"
        self.begun = time.monotonic()
        console = Console(stderr=True)
        self.is_live = console.is_terminal and not process_index()
        self.is_logged = self.is_live
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not self.is_live, transient=True)
        self.task = self.bar.add_task(name.rsplit("/", 1)[-1], total=size, completed=done)

    def advance(self, count: int) -> None:
        """Notes that `count` bytes more have arrived."""
        self.bar.advance(self.task, count)
        if not self.is_logged and time.monotonic() > self.begun + QUIET_S:
            self.is_logged = True
            log.info("downloading %s (%s)", self.name, self.total)

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self.bar.stop()
