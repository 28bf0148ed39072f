"""Loss spikes: if the loss stays high, the run goes back to a checkpoint before, and leaves out the
batches since then, as the training of PaLM did (arXiv 2204.02311, section 5.1).

What is left out, and when, depends on the losses only: not on when the run was stopped, or on how
far the host is behind the device.
"""

import collections
import logging
import math

import jax
import numpy as np
from etils import epath

from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer, newest_before
from vit_jax.data.left_out import LeftOut, Part
from vit_jax.distributed import messages
from vit_jax.errors import NegativeResult
from vit_jax.train import state as states
from vit_jax.train import step
from vit_jax.train.timer import StepTimer

log = logging.getLogger(__name__)


class Detector:
    """Finds spikes in a series of losses.

    A loss is high if it is above `factor` times the median of the last `window` losses that were
    not high. `steps` high losses in a row are a spike. Losses that are not finite do not count:
    their updates are skipped.
    """

    def __init__(self, factor: float, steps: int, window: int):
        self.factor = factor
        self.steps = steps
        self.losses = collections.deque(maxlen=window)
        self.high: list[int] = []  # the latest updates, if their losses were high

    def add(self, number: int, loss: float) -> bool:
        """Takes the loss of an update; whether a spike is complete with it."""
        if not math.isfinite(loss):
            return False
        if self.is_high(loss):
            self.high.append(number)
        else:
            self.losses.append(loss)
            self.high.clear()
        return len(self.high) >= self.steps

    def is_high(self, loss: float) -> bool:
        if len(self.losses) < self.losses.maxlen:
            return False
        median = self.median()
        return loss > median + (self.factor - 1) * abs(median)

    def median(self) -> float:
        return float(np.median(self.losses))

    def clear(self) -> None:
        self.losses.clear()
        self.high.clear()


def reach(settings) -> int:
    """Steps before the newest checkpoint from which an older one may still be needed; 0: none.

    Args:
      settings: the `spikes` part of a config.
    """
    if not settings.factor:
        return 0
    return settings.margin + settings.steps + 1


class Spikes:
    """Watches the losses of a run, and takes it back after a spike."""

    def __init__(self, config, workdir: epath.Path, checkpointer: Checkpointer):
        self.settings = config.spikes
        self.every = config.checkpoint.every
        self.workdir = workdir
        self.checkpointer = checkpointer
        self.left_out = LeftOut.read(workdir)
        self.part = None  # what a spike that was found leaves out
        self.resume({})

    # --- where training starts, and starts again ---

    def start_state(self, experiment, weights=None) -> tuple[int, step.TrainState]:
        """`states.start_state` of what was not given up, with the losses known there."""
        self.delete_abandoned()
        done, state = states.start_state(experiment, self.checkpointer, weights)
        meta = self.start_meta(experiment.config, done)
        if not self.left_out.parts and "left_out" in meta:  # of a branch
            self.left_out.parts += LeftOut.from_json(meta["left_out"]).parts
            self.write()
        self.resume(meta.get("spikes", {}))
        return done, state

    def start_meta(self, config, done: int) -> dict:
        """Facts of the checkpoint from which the run starts; {} if it starts from none."""
        folder = self.checkpointer.folder / str(done)
        if folder.exists():
            return checkpoint.read_meta(folder)
        if config.branch_from:
            return checkpoint.read_meta(checkpoint.absolute(config.branch_from))
        return {}

    def resume(self, history: dict) -> None:
        """Continues with the losses that `meta` has saved."""
        settings = self.settings
        self.detector = Detector(settings.factor, settings.steps, settings.window)
        self.detector.losses.extend(history.get("losses", ()))
        self.detector.high += history.get("high", ())
        self.waiting = collections.deque(history.get("waiting", ()))  # (update, its loss)

    def meta(self) -> dict:
        """What a checkpoint says of spikes."""
        meta = {}
        if self.settings.factor:
            meta["spikes"] = dict(
                losses=list(self.detector.losses),
                high=list(self.detector.high),
                waiting=[(number, float(loss)) for number, loss in self.waiting],
            )
        if self.left_out.parts:
            meta["left_out"] = self.left_out.to_json()
        return meta

    # --- detection ---

    def watch(self, number: int, step_metrics: dict, wait: bool) -> bool:
        """Whether to go back now, because of the losses up to update `number`.

        Args:
          wait: for all of them; else the device does not have to be waited for, because the timer
            has done so.
        """
        if not self.settings.factor:
            return False
        loss = step_metrics["train/loss"]
        loss.copy_to_host_async()
        self.waiting.append((number, loss))
        ahead = 0 if wait else StepTimer.AHEAD
        while len(self.waiting) > ahead:
            number, loss = self.waiting.popleft()
            if self.detector.add(number, float(loss)) and self.find_way_back(number, float(loss)):
                return True
        return False

    def find_way_back(self, detected: int, loss: float) -> bool:
        """Decides where a spike leads to; without a checkpoint before it the run goes on.

        Raises:
          NegativeResult: the run went back there too often.
        """
        what = self.describe(detected, loss)
        spike = self.detector.high[0]
        earlier = [number for number in self.checkpointer.steps() if number < spike]
        done = newest_before(earlier, self.every, spike - 1 - self.settings.margin)
        if done is None:
            log.warning("%s: there is no checkpoint before that, and the run goes on", what)
            self.detector.clear()
            return False
        times = sum(part.step >= done for part in self.left_out.parts)
        if times >= self.settings.max_rewinds:
            raise NegativeResult(
                f"{what}, after the run went back to step {done} or later {times} times: the "
                "batches are not the reason, and saved checkpoints are valid; lower optim.lr, set "
                "optim.grad_clip_norm, or train on with spikes.factor=0"
            )
        first = self.left_out.batch_of(done)
        last = self.left_out.batch_of(detected - 1)
        self.part = Part(spike, detected, done, (first, last))
        log.warning("%s: going back to step %d, without batches %d to %d", what, done, first, last)
        return True

    def describe(self, detected: int, loss: float) -> str:
        return (
            f"the loss was above {self.settings.factor:g} times its median of "
            f"{self.detector.median():.4g} from step {self.detector.high[0]} to {detected} "
            f"({loss:.4g})"
        )

    # --- the way back ---

    def go_back(self) -> None:
        """Records that the run goes back. From here on every start continues from there."""
        self.left_out.parts.append(self.part)
        self.write()
        messages.first_problem(f"the record of the spike at step {self.part.spike}", None)

    def write(self) -> None:
        if jax.process_index() == 0:
            self.left_out.write(self.workdir)

    def delete_abandoned(self) -> None:
        """Deletes the checkpoints of what the run has given up: those after the step to which it
        went back last that do not know of it.
        """
        parts = self.left_out.parts
        if not parts:
            return

        def is_abandoned(meta: dict) -> bool:
            return len(meta.get("left_out", ())) < len(parts)

        self.checkpointer.delete(parts[-1].step, is_abandoned)
