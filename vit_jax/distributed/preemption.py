"""Whether a run should save and stop: after Ctrl-C, SIGTERM, SIGHUP, or a preemption notice that
JAX received.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

import jax

from vit_jax import errors
from vit_jax.cli import lock
from vit_jax.distributed import waits
from vit_jax.distributed.waits import Interrupted
from vit_jax.errors import SIGNALS

log = logging.getLogger(__name__)

ANSWER_S = 5  # for a store to say which checkpoints there are
HANDLED = 0  # no signal: Python handled one, perhaps long after it came


class Signals:
    """The signals that stop this process. A thread hears them, at once: the main thread may be in
    a library for minutes.

    As long as nothing can be saved, the first of them ends the process. In a loop that can save,
    the first is a request to save and stop, and the next one ends the process.
    """

    def __init__(self):
        self.reset(str)

    def reset(self, recovery: Callable[[], str]) -> None:
        """`recovery`: what is saved, and what the same command does."""
        self.recovery = recovery
        self.can_save = False
        self.requested = ""  # the name of the signal that asked for a save
        self.heard = 0  # by the thread, which misses those for which a library listens instead
        self.handled = 0  # by Python, in the main thread
        self.answered = 0
        self.latest = signal.SIGTERM

    @contextlib.contextmanager
    def listening(self, recovery: Callable[[], str], saves: bool = True) -> Iterator[None]:
        """Hears signals during the body; those that are ignored, as under nohup, stay so.

        Args:
          saves: whether there is a loop in the body that can save.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread alone
            return
        numbers = set(SIGNALS)
        if hasattr(sys, "ps1"):
            numbers.discard(signal.SIGINT)  # a notebook stops a cell by it
        if saves and jax.distributed.is_initialized():
            numbers.discard(signal.SIGTERM)  # JAX hears it
        self.reset(recovery)
        reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        threading.Thread(target=self.hear, args=(reader,), daemon=True).start()
        with self.writer, errors.handling(numbers, self.handle):
            before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)

    def handle(self, number: int, frame) -> None:
        self.handled += 1
        self.latest = number
        with contextlib.suppress(OSError):  # the thread has many to hear already, or has ended
            self.writer.send(bytes([HANDLED]))

    def hear(self, reader: socket.socket) -> None:
        with reader:
            for byte in iter(lambda: reader.recv(1), b""):
                if byte[0] in SIGNALS:
                    self.heard += 1
                    self.latest = byte[0]
                if max(self.heard, self.handled) > self.answered:
                    self.answered += 1
                    self.answer(self.latest)

    def answer(self, number: int) -> None:
        if self.requested:
            self.end(128 + number, f"ended by {SIGNALS[number]} before the save was complete")
        if not self.can_save:
            self.end(errors.exit_code_of(number), f"stopped by {SIGNALS[number]}")
        self.requested = SIGNALS[number]
        log.warning("%s: the run saves and stops; the next signal ends it", self.requested)
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # by JAX all processes agree on the step

    def end(self, code: int, what: str) -> None:
        with contextlib.suppress(Exception):
            what += f": {waits.in_thread(self.recovery).result(ANSWER_S)}"
        errors.say(f"error: {what}")
        lock.release_all()
        os._exit(code)


signals = Signals()  # of this process


class SaveRequest:
    """The request to save and stop, for the body of a `with` statement.

    One process hears signals itself. Several use JAX's preemption service, by which all agree on
    the step even if their hosts are notified at different times.
    """

    def __init__(self, recovery: Callable[[], str]):
        self.recovery = recovery
        self.received = False
        self.num_calls = 0

    def __enter__(self):
        self.outer = signals.recovery
        signals.recovery = self.recovery
        signals.can_save = True
        return self

    def __exit__(self, *error) -> None:
        signals.can_save = False
        signals.recovery = self.outer

    def due(self) -> bool:
        """Whether to save and stop now. Every process must call this equally often: after every
        step, and every batch of an evaluation.
        """
        if not jax.distributed.is_initialized():
            return bool(signals.requested)
        if not self.received:
            from jax.experimental import multihost_utils

            self.num_calls += 1
            self.received = multihost_utils.reached_preemption_sync_point(self.num_calls)
        return self.received

    def is_urgent(self) -> bool:
        """Whether a wait should be cut short; several processes would have to agree."""
        return bool(signals.requested) and not jax.distributed.is_initialized()

    def each(self, what: str, items: Iterable) -> Iterator:
        """Yields the items; `what` they are is said if one is long in coming.

        Raises:
          Interrupted: a signal came during a wait, to the only process.
          Unavailable: an item did not come within `waits.stall_timeout()`.
        """
        return waits.each(what, items, self.is_urgent)

    def each_patiently(self, what: str, items: Iterable) -> Iterator:
        """Like `each`, but a signal cuts only a wait short that is longer than `waits.SPEAK_S`."""

        def should_stop() -> bool:
            return self.is_urgent() and waits.ongoing.current.seconds > waits.SPEAK_S

        return waits.each(what, items, should_stop)

    def until_due(self, what: str, items: Iterable) -> Iterator:
        """Like `each`, and raises Interrupted between items, too, when the run should save and
        stop.
        """
        for item in self.each(what, items):
            if self.due():
                raise Interrupted
            yield item
