"""Whether a run should save and stop: after SIGTERM, or a preemption notice received by JAX."""

import signal
from collections.abc import Iterable, Iterator

import jax

from vit_jax.distributed import waits
from vit_jax.distributed.waits import Interrupted


class SaveRequest:
    """The request to save and stop.

    One process handles SIGTERM itself, and a second SIGTERM ends it at once. Several processes use
    JAX's preemption service, by which all agree on the step even if their hosts are notified at
    different times.
    """

    def __init__(self):
        self.distributed = jax.distributed.is_initialized()
        self.received = False
        self.num_calls = 0
        if not self.distributed:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        self.received = True
        waits.ongoing.stop_requested = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def due(self) -> bool:
        """Whether to save and stop now. Every process must call this equally often: after every
        step, and every batch of an evaluation.
        """
        if self.distributed and not self.received:
            from jax.experimental import multihost_utils

            self.num_calls += 1
            self.received = multihost_utils.reached_preemption_sync_point(self.num_calls)
        return self.received

    def each(self, what: str, items: Iterable) -> Iterator:
        """Yields the items; `what` they are is said if one is long in coming.

        Raises:
          Interrupted: SIGTERM came during a wait, to the only process; several would have to agree.
          Unavailable: an item did not come within `waits.stall_timeout()`.
        """
        return waits.each(what, items, lambda: self.received)

    def until_due(self, what: str, items: Iterable) -> Iterator:
        """Like `each`, and raises Interrupted between items, too, when the run should save and
        stop.
        """
        for item in self.each(what, items):
            if self.due():
                raise Interrupted
            yield item
