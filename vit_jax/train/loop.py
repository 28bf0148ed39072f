"""Training, as a story: data, experiment, evaluations, state, and the loop over steps."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable

import jax
from etils import epath

from vit_jax import config as configs
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.cli.spool import Files
from vit_jax.config import own_parts
from vit_jax.data.left_out import LeftOut
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, messages, preemption, preflight, runtime, watchdog
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.waits import Interrupted
from vit_jax.errors import NegativeResult, Preempted
from vit_jax.train import console, goodput, metrics, nonfinite, run_data, step, summary, workdir
from vit_jax.train import state as states
from vit_jax.train import teacher as teachers
from vit_jax.train.evaluations import Evaluations
from vit_jax.train.experiment import Experiment, warn_of_epochs
from vit_jax.train.pictures import make_pictures
from vit_jax.train.schedules import due
from vit_jax.train.spikes import Spikes, reach
from vit_jax.train.timer import ProfilerWindow, StepTimer, timed
from vit_jax.train.trackers import make as trackers

log = logging.getLogger("vit_jax.train")

RETRY_S = 5  # before the last save is repeated: a store may refuse it for a moment only


def train(config, folder: epath.Path, files: Files) -> None:
    """The whole of a run, which writes to `folder`; `files`: what grows there."""
    own_parts.check(config)
    trackers.check(config)
    source = run_data.open_training_data(config)
    mesh = meshes.make_mesh(config.mesh)
    fields, weights = states.find_start(config, folder)
    teacher = teachers.read(config)
    facts = catalog.found(config, source)
    experiment = Experiment.build(config, facts, mesh, start=fields, teacher=teacher)
    config = experiment.config
    opened = run_data.open_evaluations(experiment, files)
    taught_by = experiment.teacher_fingerprint
    inputs = dict(data=source.fingerprint, teacher=taught_by)
    workdir.check(folder, config, source.fingerprint, teacher=taught_by)
    preflight.check(dict(configs.flatten(config)) | inputs, folder)
    for line in summary.head(experiment, experiment.abstract_state.params):
        log.info(line)
    warn_of_epochs(experiment)
    states.check_fits(experiment.abstract_state)
    timer = make_timer(experiment)

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        account = stack.enter_context(make_account(files))
        path = folder / "checkpoints"
        checkpointer = Checkpointer(path, config.checkpoint, reach(config.spikes))
        stack.enter_context(checkpointer)
        metrics.rank(checkpointer.best, checkpointer.steps(), folder / "metrics.jsonl")
        compiling = compile_meanwhile(experiment)
        spikes = Spikes(config, folder, checkpointer)
        done, state = spikes.start_state(experiment, weights)
        del weights  # gigabytes that the run needs no more
        account.changed = workdir.claim(
            folder, config, source.fingerprint, taught_by, experiment.sizes
        )
        pipeline = run_data.open_pipeline(experiment, source, files, spikes.left_out)
        writer = stack.enter_context(metrics.MetricWriter(files, done, config))
        with account.spending("compilation"):
            train_step, timer.compile_s = compiling.result()
        runtime.release_memory()
        pictures = make_pictures(experiment, source, files)
        loop = Loop(
            experiment=experiment,
            folder=folder,
            files=files,
            train_step=train_step,
            pipeline=pipeline,
            evaluations=Evaluations(
                experiment, opened, pictures, checkpointer, writer, timer, account
            ),
            checkpointer=checkpointer,
            writer=writer,
            timer=timer,
            account=account,
            bar=console.ProgressBar(experiment.total_steps, done),
            profiler=ProfilerWindow(folder / "profile", **config.profile),
            guard=make_guard(experiment, source, folder, spikes.left_out),
            spikes=spikes,
            request=stack.enter_context(
                preemption.SaveRequest(lambda: workdir.continuation(folder))
            ),
        )
        loop.run(done, state)


# --- parts of the loop ---


def compile_meanwhile(experiment: Experiment) -> concurrent.futures.Future:
    """Compiles the step in a thread, while the state is made or read: (compiled step, seconds)."""

    def work():
        with jax.set_mesh(experiment.mesh), runtime.without_collections():
            lower = experiment.train_step.lower
            return timed(
                lambda: lower(experiment.abstract_state, experiment.abstract_batch).compile()
            )

    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def make_timer(experiment: Experiment) -> StepTimer:
    peak = hardware.peak_flops(jax.devices()[0].device_kind)
    flops = experiment.objective.train_flops
    return StepTimer(experiment.config.data.batch_size, flops, peak, jax.device_count())


def make_account(files: Files) -> goodput.Account:
    return goodput.Account(files.path(goodput.FILE) if jax.process_index() == 0 else None)


def make_guard(
    experiment: Experiment, source, folder: epath.Path, left_out: LeftOut
) -> nonfinite.SkippedUpdates:
    from vit_jax.data import order

    def ids(number: int) -> list[int]:
        """The examples in the batch of an update, counted from 1."""
        batch = left_out.batch_of(number - 1)
        return order.ids(experiment.config, source.parts, batch, source.block)

    return nonfinite.SkippedUpdates(experiment.config.max_skipped, folder, ids)


# --- the loop ---


@dataclasses.dataclass(frozen=True)
class Loop:
    """Updates until the last step; logs, evaluations and checkpoints at their own cadence."""

    experiment: Experiment
    folder: epath.Path
    files: Files
    train_step: Callable  # compiled
    pipeline: object
    evaluations: Evaluations
    checkpointer: Checkpointer
    writer: metrics.MetricWriter
    timer: StepTimer
    account: goodput.Account
    bar: console.ProgressBar
    profiler: ProfilerWindow
    guard: nonfinite.SkippedUpdates
    spikes: Spikes
    request: preemption.SaveRequest

    @property
    def total_steps(self) -> int:
        return self.experiment.total_steps

    def run(self, done: int, state: step.TrainState) -> None:
        """Trains on after `done` updates, and says how it went.

        Raises:
          Preempted: it was asked to stop, and the state is saved.
          NegativeResult: the run can't go on.
        """
        log.info("training from step %d", done)
        with self.bar, self.profiler, self.account.steps(done):
            self.evaluations.stopping.decide(done)
            self.evaluations.draw_inputs(done)
            self.evaluate_last_step(done, state)
            number, state, step_metrics = self.updates(done, state)
            while state is None:  # after a loss spike
                number, state, step_metrics = self.updates(*self.go_back())
        console.show_summary(self.files, self.timer.totals(), self.account.totals())
        if number < self.total_steps and not self.evaluations.stopping.over:
            what = "saved, the same command continues" if number else "there was nothing to save"
            name = preemption.signals.requested or "SIGTERM"
            log.info("stopped by %s at step %d: %s", name, number, what)
            raise Preempted
        self.check_end(number, state, step_metrics)
        log.info("done: %d steps, results in %s", number, self.folder)

    def evaluate_last_step(self, done: int, state: step.TrainState) -> None:
        """Makes the evaluations of a last step that was saved before a kill cut them off."""
        if done < self.total_steps:
            return
        what = "the evaluations of the last step"
        answers = messages.all_gather(what, str(self.writer.is_missing), messages.PATIENCE_S)
        if answers[0] == str(True):
            skipped = {"data/skipped": len(self.pipeline.skipped)}
            self.write(done, skipped | self.evaluations.run_to_the_end(done, state))

    def updates(
        self, done: int, state: step.TrainState
    ) -> tuple[int, step.TrainState | None, dict]:
        """All updates, or those until a request to stop: (the last one, its state and metrics). Or
        those until the end of a loss spike; their state is given up, and None.
        """
        name = self.experiment.config.data.name
        batches = run_data.device_batches(self.experiment, self.pipeline, done)
        batches = self.request.each(f"a batch of {name}", batches)
        number = done
        step_metrics = {}
        scalars = {}
        stopped = False
        last = done if self.evaluations.stopping.over else self.total_steps
        for number in range(done + 1, last + 1):
            watchdog.progress.mark(f"step {number}")
            self.profiler.before_step(number)
            try:
                with self.account.spending("data_wait"):
                    batch = self.timer.next_batch(batches)
            except Interrupted:
                return self.stop_after(number - 1, done, state, step_metrics)
            state, step_metrics = self.timer.step(self.train_step, state, batch)
            self.account.did_step(number)
            self.bar.advance(number)
            if self.spikes.watch(number, step_metrics, self.saves_at(number)):
                return number, None, {}
            scalars = self.report(number, step_metrics)
            stopped = self.request.due()
            if not stopped or self.evaluations.stopping.ranks(number):
                measured, interrupted = self.evaluations.run(number, state, self.request)
                scalars |= measured
                stopped = stopped or interrupted
            if stopped:
                break
            self.write(number, scalars)  # before the save: a kill between them loses no line
            if self.saves_at(number):
                self.save(number, state, step_metrics, scalars)
            if self.evaluations.stopping.over:
                break
        if stopped:  # there is little time: save before anything else
            self.save(number, state, step_metrics, scalars)
        self.settle(number, state, step_metrics, scalars)
        if stopped:  # the next start continues after this step: what is due here is done here
            self.write(number, scalars | self.evaluations.run_to_the_end(number, state))
        return number, state, step_metrics

    def stop_after(self, number: int, done: int, state: step.TrainState, step_metrics: dict):
        """What `updates` returns after a request to stop during the wait for the next batch."""
        if number > done and not self.saves_at(number):
            self.save(number, state, step_metrics, {})
        self.settle(number, state, step_metrics, {})
        return number, state, step_metrics

    def go_back(self) -> tuple[int, step.TrainState]:
        """After a loss spike: (updates done, state) of the checkpoint before it."""
        watchdog.progress.mark("the way back after a loss spike")
        with self.timer.paused("going back"), self.account.spending("startup"):
            self.spikes.go_back()
            done, state = self.spikes.start_state(self.experiment)
        self.account.stand_at(done)
        self.writer.rewind(done)
        self.guard.num_reported = int(state.skipped_steps)
        log.info("training again from step %d", done)
        return done, state

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

    def saves_at(self, number: int) -> bool:
        return due(number, self.experiment.config.checkpoint.every, self.total_steps)

    def save(self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict) -> None:
        """Checks that the state is finite, and saves it; the wait goes into the next line of
        metrics, if there is one.
        """
        watchdog.progress.mark(f"the save of step {number}")
        self.check(number, step_metrics)
        run_data.check_unchanged(self.pipeline.source)
        if not states.is_finite(state):
            raise NegativeResult(
                f"the state after step {number} is not finite, although loss and gradients were: "
                "it is not saved, and earlier checkpoints are valid; lower optim.lr"
            )
        self.account.write()
        with self.timer.paused("checkpoints"), self.account.spending("saves"):
            self.writer.deliver()  # no line before a checkpoint is lost
            arrays = states.as_dict(state)
            meta = self.experiment.meta | self.spikes.meta()
            stall = self.checkpointer.save(number, arrays, meta, scalars)
        self.writer.add(stall)

    def settle(self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict):
        """Waits for the last save, and repeats it if it failed: no later state replaces it."""
        with self.timer.paused("checkpoints"), self.account.spending("saves"):
            while not self.checkpointer.wait():
                time.sleep(RETRY_S)
                self.save(number, state, step_metrics, scalars)

    def write(self, number: int, scalars: dict[str, float]) -> None:
        """One line of metrics, if there is anything to write."""
        if not scalars:
            return
        self.checkpointer.poll()
        self.writer.write(number, scalars | {"checkpoint/failures": self.checkpointer.failures})
        self.account.write()

    def check(self, number: int, step_metrics: dict, at_end: bool = False) -> dict[str, float]:
        """The metrics of a step as numbers, which may end the run."""
        scalars = metrics.fetch(step_metrics)
        self.guard.check(number, scalars, at_end)
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
