"""Whether a run is asked to save and stop: by SIGTERM, or by a notice of preemption that JAX hears
of.
"""

import signal
from collections.abc import Iterable, Iterator

import jax


class Interrupted(Exception):
    """An evaluation was cut short, because the run is to save and stop."""


class SaveRequest:
    """One process: our own handler, and a second SIGTERM ends the process at once. Several: JAX's
    preemption service, by which all processes agree on the step; each host has its own notice, and
    one that comes late disturbs nothing."""

    def __init__(self):
        self.distributed = jax.distributed.is_initialized()
        self.received, self.asked = False, 0
        if not self.distributed:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def due(self) -> bool:
        """Must be asked equally often by every process: after every step, and every batch of an
        evaluation.
        """
        if self.distributed and not self.received:
            from jax.experimental import multihost_utils

            self.asked += 1
            self.received = multihost_utils.reached_preemption_sync_point(self.asked)
        return self.received

    def until_due(self, items: Iterable) -> Iterator:
        """Yields the items.

        Raises:
          Interrupted: the run is to save and stop now.
        """
        for item in items:
            if self.due():
                raise Interrupted
            yield item
