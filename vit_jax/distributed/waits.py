"""Waits for data, saves and stores: one that takes long says so, hears SIGTERM, and ends."""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from vit_jax.distributed import job
from vit_jax.errors import Unavailable

log = logging.getLogger(__name__)

STALL_TIMEOUT = "VIT_JAX_STALL_TIMEOUT"
SPEAK_S = 20  # after which a wait says so; then after twice as long, and so on
POLL_S = 0.5
END = object()


class Interrupted(Exception):
    """A wait or an evaluation was cut short because the run should save and stop."""


def stall_timeout() -> int:
    """Seconds after which a run gives up a wait, and a job of several processes that makes no
    progress ends.
    """
    # Longer than messages.PATIENCE_S, after which waiting processes end with a better message.
    return job.seconds_from_environment(STALL_TIMEOUT, "2400")


class Wait:
    """What the main thread waits for, and since when."""

    def __init__(self, what: str):
        self.what = what
        self.begun = time.monotonic()
        self.begun_at = time.strftime("%H:%M:%S")
        self.speaks_after = SPEAK_S

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def speak(self) -> None:
        """Logs a wait that has become long; call it from another thread, every few seconds."""
        if self.seconds < self.speaks_after:
            return
        self.speaks_after = 2 * self.seconds
        log.warning(
            "waiting for %s since %s, for %d s; the run gives up after %d s",
            self.what,
            self.begun_at,
            self.seconds,
            stall_timeout(),
        )

    def too_long(self) -> Unavailable:
        return Unavailable(
            f"gave up waiting for {self.what} after {self.seconds:.0f} s: check whether the disk, "
            "store or network hangs; the same command continues from the last checkpoint; to wait "
            f"longer, set {STALL_TIMEOUT}=SECONDS"
        )


class Ongoing:
    """What this process waits for."""

    current: Wait | None = None  # of the main thread
    was_abandoned = False  # a thread still waits, which could abort the end of the interpreter

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Wait]:
        """Marks the body as a wait for `what`."""
        outer = self.current
        self.current = Wait(what)
        try:
            yield self.current
        finally:
            self.current = outer


ongoing = Ongoing()
waiting = ongoing.waiting


def never() -> bool:
    return False


def in_thread(function: Callable, *args) -> concurrent.futures.Future:
    """Calls a function in a thread that does not keep the process from ending."""
    future = concurrent.futures.Future()

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def call(what: str, function: Callable, *args, should_stop: Callable[[], bool] = never):
    """The result of a function that waits for `what` and may wait for ever.

    Raises:
      Interrupted: `should_stop` became true first.
      Unavailable: there is no result within `stall_timeout()`.
    """
    with waiting(what) as wait:
        future = in_thread(function, *args)
        while not concurrent.futures.wait([future], POLL_S).done:
            if should_stop():
                ongoing.was_abandoned = True
                raise Interrupted
            if wait.seconds > stall_timeout():
                ongoing.was_abandoned = True
                raise wait.too_long()
    return future.result()


def each_soon(what: str, items: Iterable) -> Iterator:
    """Like `each`, for little time: raises Interrupted if an item takes longer than SPEAK_S."""
    return each(what, items, lambda: ongoing.current.seconds > SPEAK_S)


def each(what: str, items: Iterable, should_stop: Callable[[], bool] = never) -> Iterator:
    """Yields the items; `call` says what ends a wait for one of them."""
    iterator = iter(items)
    while True:
        item = call(what, next, iterator, END, should_stop=should_stop)
        if item is END:
            return
        yield item
