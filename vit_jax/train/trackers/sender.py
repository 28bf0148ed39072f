"""A thread that sends what a run writes to one tracker, so that the run never waits for it."""

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from vit_jax.config import is_own, own_parts
from vit_jax.distributed.waits import ongoing
from vit_jax.errors import UserError, one_line
from vit_jax.train.trackers.run_ids import RunIds
from vit_jax.train.trackers.tracker import Tracker

log = logging.getLogger("vit_jax.train")

LONGEST = 10_000  # calls that may wait for a tracker
END_S = 15  # seconds that the end of a run waits for all trackers


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What earlier starts of a run wrote to metrics.jsonl."""

    last_step: int  # -1: nothing
    read: Callable[[], list[dict[str, float]]]  # the lines before the step at which it continues


def problem_of(name: str, error: BaseException) -> str:
    """What went wrong; in a tracker of the user's own, with the line."""
    if is_own(name) and not isinstance(error, UserError):
        file = getattr(own_parts.named.get(name), "__file__", None)
        return own_parts.line_of(error, file)
    return one_line(error)[:300] or type(error).__name__


class Sender:
    """Sends each step once. The first failure turns the tracker off for the rest of this start; the
    next one sends what is missing, if the tracker can say what it has.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], run_ids: RunIds, earlier: Earlier):
        """`make`: called in the thread, for it may import a library."""
        self.name = name
        self.make = make
        self.run_ids = run_ids
        self.earlier = earlier
        self.last = -1  # the last step that the tracker has
        self.is_off = False
        self.calls: queue.Queue = queue.Queue(LONGEST)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    # --- in the thread of the training ---

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.ask("write", step, scalars)

    def pictures(self, step: int, name: str, pictures: np.ndarray) -> None:
        self.ask("pictures", step, name, pictures)

    def finish(self, exit_code: int) -> None:
        """Asks for the end; `join` waits for it."""
        self.ask("finish", exit_code)

    def ask(self, method: str, *arguments) -> None:
        if self.is_off:
            return
        try:
            self.calls.put_nowait((method, arguments))
        except queue.Full:
            self.turn_off(f"it is {LONGEST:,} steps behind")

    def join(self, until: float) -> None:
        """Waits for the end, but not longer than to this time of `time.monotonic`, and a second for
        a tracker that is off: if it failed, its thread may still have to say why.
        """
        if self.is_off:
            until = min(until, time.monotonic() + 1)
        self.thread.join(max(0.0, until - time.monotonic()))
        if self.thread.is_alive():
            self.turn_off(f"it did not end within {END_S} s")
            ongoing.was_abandoned = True

    # --- in the thread of the tracker ---

    def work(self) -> None:
        try:
            tracker = self.begin()
            method = ""
            while method != "finish" and not self.is_off:
                method, arguments = self.calls.get()
                self.send(tracker, method, arguments)
        except BaseException as error:  # libraries raise SystemExit, too
            self.turn_off(problem_of(self.name, error))

    def begin(self) -> Tracker:
        """Makes the tracker, and sends what it lacks of earlier starts."""
        tracker = self.make()
        before = self.run_ids.get(self.name)
        run_id = tracker.start(before)
        if not isinstance(run_id, str):
            raise TypeError(f"start() must return the id of the run, a str, not {run_id!r}")
        self.run_ids.set(self.name, run_id)
        last = tracker.last_step()
        if last is None:
            last = -1 if before is None else self.earlier.last_step
        self.last = last
        for line in self.earlier.read() if self.last < self.earlier.last_step else ():
            scalars = {name: value for name, value in line.items() if name != "step"}
            self.send(tracker, "write", (line["step"], scalars))
        return tracker

    def send(self, tracker: Tracker, method: str, arguments: tuple) -> None:
        """One call, unless it is of a step that was sent before: after a stop, or after going back
        from a loss spike, a run repeats steps.
        """
        if method == "finish":
            tracker.finish(*arguments)
        elif arguments[0] > self.last and method == "pictures":
            tracker.pictures(*arguments)
        elif arguments[0] > self.last:
            step, scalars = arguments
            tracker.write(step, {k: v for k, v in scalars.items() if math.isfinite(v)})
            self.last = step

    def turn_off(self, problem: str) -> None:
        if not self.is_off:
            self.is_off = True
            log.warning("tracker %s is off until the next start: %s", self.name, problem)
