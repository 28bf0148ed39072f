"""Training, as a story: data, experiment, evaluations, state, and the loop over steps."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator

import jax
from etils import epath

from vit_jax import config as configs
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, preemption, preflight, runtime, sharding, watchdog
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import NegativeResult, Preempted
from vit_jax.evaluate import suite
from vit_jax.train import console, metrics, nonfinite, step, summary, workdir
from vit_jax.train import state as states
from vit_jax.train.experiment import Experiment
from vit_jax.train.timer import ProfilerWindow, StepTimer, timed

log = logging.getLogger("vit_jax.train")


def train(config, folder: epath.Path) -> None:
    """The whole of a run, which writes to `folder`."""
    source = open_training_data(config)
    mesh = meshes.make_mesh(config.mesh)
    experiment = Experiment.build(config, catalog.found(config, source), mesh)
    evaluations = open_evaluations(experiment, folder)
    workdir.check(folder, config, source.fingerprint)
    preflight.check(dict(configs.flatten(config)) | {"data": source.fingerprint}, folder)
    for line in summary.head(experiment, experiment.state.params):
        log.info(line)
    timer = make_timer(experiment)

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        checkpointer = Checkpointer(folder / "checkpoints", config.checkpoint)
        stack.enter_context(checkpointer)
        compiling = compile_meanwhile(experiment)
        first, state = states.start_state(experiment, checkpointer)
        workdir.claim(folder, config, source.fingerprint)
        pipeline = open_pipeline(experiment, source, folder)
        writer = stack.enter_context(metrics.MetricWriter(folder, first))
        train_step, timer.compile_s = compiling.result()
        runtime.release_memory()
        loop = Loop(
            experiment=experiment,
            folder=folder,
            train_step=train_step,
            pipeline=pipeline,
            evaluations=evaluations,
            eval_steps=suite.make_steps(config, experiment.model),
            checkpointer=checkpointer,
            writer=writer,
            timer=timer,
            bar=console.ProgressBar(experiment.total_steps, first),
            profiler=ProfilerWindow(folder / "profile", **config.profile),
            nonfinite=make_guard(experiment, source, folder),
            request=preemption.SaveRequest(),
        )
        loop.run(first, state)


def due(number: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens after `number`
    updates.
    """
    return number == total or (every > 0 and number % every == 0)


# --- what the loop is made of; TensorFlow is imported here and not before ---


def open_training_data(config):
    """The training split as a source."""
    from vit_jax.data.sources import open as sources

    return sources.open_training(config.data)


def open_evaluations(experiment: Experiment, folder: epath.Path) -> dict:
    config = experiment.config
    facts = experiment.facts
    return suite.open_all(config, experiment.mesh, facts.class_names, facts.num_classes, folder)


def open_pipeline(experiment: Experiment, source, folder: epath.Path):
    """From the source to batches on the host."""
    from vit_jax.data import pipeline

    config = experiment.config
    rows = sharding.local_rows(experiment.mesh, config.data.batch_size)
    host = pipeline.train_pipeline(config, source, rows, experiment.total_steps)
    host.skipped.list_in(folder, "train")
    return host


def device_batches(experiment: Experiment, pipeline, first: int) -> Iterator[dict]:
    """Global batches on the mesh, from that of the update after `first` on."""
    from vit_jax.data import to_device

    data = experiment.config.data
    rows = sharding.local_rows(experiment.mesh, data.batch_size)
    batches = pipeline.batches(first)
    return to_device.to_device(
        batches, experiment.mesh, rows, data.batch_size, data.prefetch, pipeline.stages
    )


def compile_meanwhile(experiment: Experiment) -> concurrent.futures.Future:
    """Compiles the step in a thread, while the state is made or read: (compiled step, seconds)."""

    def work():
        with jax.set_mesh(experiment.mesh), runtime.without_collections():
            lower = experiment.train_step.lower
            return timed(lambda: lower(experiment.state, experiment.batch).compile())

    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def make_timer(experiment: Experiment) -> StepTimer:
    peak = hardware.peak_flops(jax.devices()[0].device_kind)
    flops = 3 * experiment.model.flops
    return StepTimer(experiment.config.data.batch_size, flops, peak, jax.device_count())


def make_guard(experiment: Experiment, source, folder: epath.Path) -> nonfinite.SkippedUpdates:
    from vit_jax.data import order

    def ids(number: int) -> list[int]:
        """The examples in the batch of an update, counted from 1."""
        return order.ids(experiment.config, source.parts, number - 1)

    return nonfinite.SkippedUpdates(experiment.config.max_skipped, folder, ids)


# --- the loop ---


@dataclasses.dataclass(frozen=True)
class Loop:
    """Updates until the last step; logs, evaluations and checkpoints at their own cadence."""

    experiment: Experiment
    folder: epath.Path
    train_step: Callable  # compiled
    pipeline: object
    evaluations: dict
    eval_steps: suite.Steps
    checkpointer: Checkpointer
    writer: metrics.MetricWriter
    timer: StepTimer
    bar: console.ProgressBar
    profiler: ProfilerWindow
    nonfinite: nonfinite.SkippedUpdates
    request: preemption.SaveRequest

    @property
    def total_steps(self) -> int:
        return self.experiment.total_steps

    def run(self, first: int, state: step.TrainState) -> None:
        """Trains on after `first` updates, and says how it went.

        Raises:
          Preempted: SIGTERM came, and the state is saved.
          NegativeResult: the run can't go on.
        """
        log.info("training from step %d", first)
        with self.bar, self.profiler:
            number, state, step_metrics = self.updates(first, state)
        console.show_summary(self.folder, self.timer.totals())
        if number < self.total_steps:
            log.info("stopped by SIGTERM at step %d: saved, the same command continues", number)
            raise Preempted
        self.check_end(number, state, step_metrics)
        log.info("done: %d steps, results in %s", self.total_steps, self.folder)

    def updates(self, first: int, state: step.TrainState) -> tuple[int, step.TrainState, dict]:
        """All updates, or those until a request to stop: (the last one, its state and metrics)."""
        batches = device_batches(self.experiment, self.pipeline, first)
        number = first
        step_metrics = {}
        scalars = {}
        for number in range(first + 1, self.total_steps + 1):
            watchdog.progress.mark(f"step {number}")
            self.profiler.before_step(number)
            batch = self.timer.next_batch(batches)
            state, step_metrics = self.timer.step(self.train_step, state, batch)
            self.bar.advance(number)
            scalars = self.report(number, step_metrics)
            if not self.request.due():
                scalars |= self.evaluate(number, state, self.saves_at(number))
            if self.request.received:
                break
            self.write(number, scalars)  # before the save: a kill between them loses no line
            if self.saves_at(number):
                self.save(number, state, step_metrics, scalars)
        if self.request.received:  # there is little time: save first
            self.save(number, state, step_metrics, {})
        self.settle(number, state, step_metrics, scalars)
        if self.request.received:
            self.write(number, scalars | self.evaluate(number, state, False, until=iter))
        return number, state, step_metrics

    def report(self, number: int, step_metrics: dict) -> dict[str, float]:
        """The line of metrics of this step, if one is due."""
        if not due(number, self.experiment.config.log_every, self.total_steps):
            return {}
        scalars = self.timer.report() | self.check(number, step_metrics)
        scalars["data/skipped"] = len(self.pipeline.skipped)
        self.bar.report(number, scalars)
        slow = self.pipeline.stages.warning(scalars["perf/data_wait"], self.pipeline.threads)
        if slow:
            log.warning(slow)
        return scalars

    def evaluate(
        self, number: int, state: step.TrainState, saving: bool, until: Callable | None = None
    ) -> dict[str, float]:
        """Runs the evaluations that are due; a request to stop cuts them short.

        Args:
          saving: a checkpoint follows; if it is ranked by a metric, that is measured.
          until: passes the batches of an evaluation on, as `SaveRequest.until_due` does.
        """
        config = self.experiment.config

        def is_due(name: str) -> bool:
            ranks = saving and config.checkpoint.keep_best.startswith(f"eval/{name}/")
            return ranks or due(number, config.evals[name].every, self.total_steps)

        if not any(map(is_due, self.evaluations)):
            return {}
        params = step.eval_params(state)
        until = until or self.request.until_due
        with self.timer.paused("evaluation"):
            try:
                return suite.run(self.evaluations, self.eval_steps, params, is_due, until)
            except preemption.Interrupted:
                return {}

    def saves_at(self, number: int) -> bool:
        return due(number, self.experiment.config.checkpoint.every, self.total_steps)

    def save(self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict) -> None:
        """Saves a state that is known to be finite; the next line says how long training waited."""
        watchdog.progress.mark(f"the save of step {number}")
        self.check(number, step_metrics)
        if not states.is_finite(state):
            raise NegativeResult(
                f"the state after step {number} is not finite, although loss and gradients were: "
                "it is not saved, and earlier checkpoints are valid; lower optim.lr"
            )
        with self.timer.paused("checkpoints"):
            arrays = states.as_dict(state)
            stall = self.checkpointer.save(number, arrays, self.experiment.meta, scalars)
        self.writer.add(stall)

    def settle(self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict):
        """Waits for the last save, and repeats it if it failed: no later state replaces it."""
        with self.timer.paused("checkpoints"):
            while not self.checkpointer.wait():
                self.save(number, state, step_metrics, scalars)

    def write(self, number: int, scalars: dict[str, float]) -> None:
        """One line of metrics, if there is anything to write."""
        if not scalars:
            return
        self.checkpointer.poll()
        self.writer.write(number, scalars | {"checkpoint/failures": self.checkpointer.failures})

    def check(self, number: int, step_metrics: dict, at_end: bool = False) -> dict[str, float]:
        """The metrics of a step as numbers, which may end the run."""
        scalars = metrics.fetch(step_metrics)
        self.nonfinite.check(number, scalars, at_end)
        return scalars

    def check_end(self, number: int, state: step.TrainState, step_metrics: dict) -> None:
        """Raises NegativeResult if the last updates of the run were skipped."""
        if not int(state.skipped_in_row):
            return
        counts = {
            "train/loss": math.nan,  # of a run that was done already, and is started again
            "train/skipped_steps": state.skipped_steps,
            "train/skipped_in_row": state.skipped_in_row,
        }
        self.check(number, step_metrics or counts, at_end=True)
