"""What a run measures and draws of its state meanwhile, each at its own cadence."""

import functools
import logging
from collections.abc import Callable

from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.distributed import preemption, waits, watchdog
from vit_jax.distributed.waits import Interrupted
from vit_jax.evaluate import suite
from vit_jax.train import goodput, metrics, step
from vit_jax.train.early_stopping import EarlyStopping
from vit_jax.train.experiment import Experiment
from vit_jax.train.pictures import Pictures
from vit_jax.train.schedules import due
from vit_jax.train.timer import StepTimer

log = logging.getLogger("vit_jax.train")


class Evaluations:
    """The evaluations of a run, its pictures, and the end by early stopping."""

    def __init__(
        self,
        experiment: Experiment,
        opened: dict,
        pictures: Pictures | None,
        checkpointer: Checkpointer,
        writer: metrics.MetricWriter,
        timer: StepTimer,
        account: goodput.Account,
    ):
        """`opened`: the evaluations by name, with their data."""
        self.experiment = experiment
        self.opened = opened
        self.pictures = pictures
        self.steps = suite.make_steps(experiment.config, experiment.model)
        self.stopping = EarlyStopping(experiment, checkpointer)
        self.writer = writer
        self.timer = timer
        self.account = account

    def run(
        self, number: int, state: step.TrainState, request: preemption.SaveRequest
    ) -> tuple[dict[str, float], bool]:
        """Runs the evaluations that are due: (metrics, whether a request to stop cut in).

        With early stopping a request waits for them: a checkpoint without its metric would change
        when the run ends.
        """
        self.draw(number, state)
        try:
            if self.stopping.ranks(number):
                return self.run_and_rank(number, state, request.each_patiently), False
            params = self.experiment.eval_params(state)
            is_due = functools.partial(self.is_due, number)
            return self.measure(params, is_due, request.until_due), False
        except Interrupted:
            return {}, True

    def draw_inputs(self, done: int) -> None:
        """Writes how training sees images, if pictures are wanted."""
        if self.pictures:
            watchdog.progress.mark("the pictures of the first images")
            with self.account.spending("evaluation"):
                self.pictures.write_inputs(done, self.writer)

    def draw(self, number: int, state: step.TrainState) -> None:
        """Writes the pictures that are due."""
        every = self.experiment.config.pictures_every
        if self.pictures and due(number, every, self.experiment.total_steps):
            watchdog.progress.mark(f"the pictures of step {number}")
            with self.timer.paused("evaluation"), self.account.spending("evaluation"):
                self.pictures.write(number, step.eval_params(state), self.writer)

    def is_due(self, number: int, name: str) -> bool:
        """Whether an evaluation is due after an update, by itself or to rank the checkpoint."""
        config = self.experiment.config
        total = self.experiment.total_steps
        if due(number, config.evals[name].every, total):
            return True
        is_saved = due(number, config.checkpoint.every, total)
        return is_saved and self.stopping.ranks_by(name)

    def run_and_rank(self, number: int, state: step.TrainState, until: Callable) -> dict:
        """Evaluations of a checkpoint that counts for early stopping, and how it ranks. Those that
        are due only at the end are of the best checkpoint, which the run delivers.
        """
        entries = self.experiment.config.evals
        due_now = [name for name in entries if self.is_due(number, name)]
        now = [name for name in due_now if entries[name].every or self.stopping.ranks_by(name)]
        params = self.experiment.eval_params(state)
        scalars = self.measure(params, now.__contains__, until)
        scalars |= self.stopping.add(number, scalars)
        if self.stopping.over or number == self.experiment.total_steps:
            params = self.stopping.best_params(number, state)
            scalars |= self.measure(params, lambda name: name not in now, until)
        return scalars

    def run_to_the_end(self, number: int, state: step.TrainState) -> dict[str, float]:
        """The same for the last step before a stop; only data that do not come cut it short."""
        if self.stopping.ranks(number):  # done before the save
            return {}
        self.draw(number, state)
        is_due = functools.partial(self.is_due, number)
        try:
            params = self.experiment.eval_params(state)
            return self.measure(params, is_due, waits.each_soon)
        except Interrupted:
            log.warning("step %d is not evaluated: no data came", number)
            return {}

    def measure(self, params, is_due: Callable, until: Callable) -> dict:
        """Metrics of the evaluations that are due; `until` passes their batches on."""
        if not any(map(is_due, self.opened)):
            return {}
        with self.timer.paused("evaluation"), self.account.spending("evaluation"):
            scalars = suite.run(self.opened, self.steps, params, is_due, until)
        self.stopping.check(scalars)
        return scalars
