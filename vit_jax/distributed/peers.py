"""Waiting for other processes: what is said meanwhile."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from vit_jax.errors import printable

log = logging.getLogger(__name__)
project = logging.getLogger("vit_jax")

LINE_S = 10  # before the first line


@contextlib.contextmanager
def awaited(describe: Callable[[], str], every: float | None = None) -> Iterator[None]:
    """Logs `describe()` after `LINE_S` seconds in the body and then every `every` seconds, by
    default as often.

    The lines are warnings, which every process has on stderr.
    """
    over = threading.Event()

    def speak():
        pause = LINE_S
        while not over.wait(pause):
            say(describe())
            pause = every or LINE_S

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        # Killed inside JAX by the end of the interpreter, it would abort the process.
        speaker.join()


def say(line: str) -> None:
    """Logs a line; before the log is set up, it is on stderr only."""
    if project.handlers:
        log.warning("%s", line)
    else:
        print(f"{time.strftime('%H:%M:%S')} {printable(line)}", file=sys.stderr, flush=True)


def names(indices) -> str:
    """ "process 3", "processes 1, 2", or "processes 1-3, 7"."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and index == ranges[-1][-1] + 1:
            ranges[-1].append(index)
        else:
            ranges.append([index])
    texts = []
    for first, *more in ranges:
        separator = "-" if len(more) > 1 else ", "
        texts.append(f"{first}{separator}{more[-1]}" if more else str(first))
    noun = "process" if len(indices) == 1 else "processes"
    return f"{noun} {', '.join(texts)}"
