"""The log of a command: on stderr, and in the workdir if there is one."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from etils import epath

from vit_jax.cli import spool
from vit_jax.errors import Preempted, one_line, printable

log = logging.getLogger(__name__)


class StderrHandler(logging.StreamHandler):
    """Looks up sys.stderr for every line: the progress bar replaces it, so that lines appear above
    the bar.
    """

    def __init__(self):
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    @property
    def stream(self):
        return sys.stderr


class FileHandler(logging.StreamHandler):
    """If a line can't be written, because the disk is full, it is on stderr only."""

    def handleError(self, record):
        pass


def process_index() -> int | None:
    """The number of this process in a job of several, or None if it is alone."""
    import jax  # takes a second; a command that only prints its help does without

    return jax.process_index() if jax.distributed.is_initialized() else None


class Formatter(logging.Formatter):
    def format(self, record):
        return printable(super().format(record))


def make_handler(handler: logging.Handler, form: str, level: int) -> logging.Handler:
    handler.setFormatter(Formatter(form, "%H:%M:%S"))
    handler.setLevel(level)
    return handler


@contextlib.contextmanager
def logging_to(workdir: epath.Path | None, every_s: float = spool.EVERY_S):
    """Sends the project's log to stderr, and to log.txt in `workdir` if there is one.

    In a job of several processes, all but process 0 write logs/process_I.txt instead, and only
    warnings to stderr.

    Args:
      every_s: the fewest seconds between two writes of a file that grows, if it is on a store.

    Yields:
      The growing files of the workdir, or None without one.
    """
    index = process_index()
    form = "%(asctime)s %(levelname).1s %(message)s"
    stderr_form = f"[process {index}] {form}" if index else form
    root = logging.getLogger("vit_jax")
    root.setLevel(logging.INFO)
    root.propagate = False
    level = logging.WARNING if index else logging.INFO
    root.handlers[:] = [make_handler(StderrHandler(), stderr_form, level)]
    with contextlib.ExitStack() as stack:
        files = None
        if workdir is not None:
            files = spool.open_files(workdir, every_s)
            stack.callback(files.close)
            file = stack.enter_context(files.path(log_name(index or 0)).open("a"))
            root.addHandler(make_handler(FileHandler(file), form, logging.INFO))
        try:
            yield files
        except Exception as error:
            # On a stderr that many processes share it would be hard to find.
            if index is not None and not isinstance(error, Preempted):
                line = f"{type(error).__name__}: {one_line(error)}"
                log.error("%s", line, extra=dict(file_only=True))
            raise
        finally:
            root.handlers[:] = root.handlers[:1]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Sets the project's logger back at the end, for callers in Python."""
    root = logging.getLogger("vit_jax")
    handlers = root.handlers[:]
    level = root.level
    propagates = root.propagate
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        root.propagate = propagates


@contextlib.contextmanager
def silent(*libraries: str) -> Iterator[None]:
    """Drops what these libraries log, but for what is critical."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def log_name(process: int) -> str:
    return f"logs/process_{process}.txt" if process else "log.txt"
