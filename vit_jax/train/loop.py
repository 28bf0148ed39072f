"""Training, as a story: config -> mesh -> data -> model -> state -> loop -> evaluation ->
checkpoint.

python -m vit_jax.train --config=FILE.py[:ARG] --workdir=DIR [--config.KEY=VALUE ...] [--dry_run] [--debug]
"""

import concurrent.futures
import dataclasses
import logging
import math
from collections.abc import Callable

import jax
from etils import epath

from vit_jax import config as configs
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.data.sources import catalog
from vit_jax.distributed import hardware, preemption, preflight, runtime, sharding, watchdog
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import NegativeResult, Preempted
from vit_jax.evaluate import suite
from vit_jax.models import create
from vit_jax.train import experiment, metrics, nonfinite, step, summary, workdir
from vit_jax.train import state as states
from vit_jax.train.timer import ProfilerWindow, StepTimer, timed
from vit_jax.weights import adapt

log = logging.getLogger("vit_jax.train")


def due(number: int, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens after `number`
    updates.
    """
    return number == total or (every > 0 and number % every == 0)


def open_training_data(config):
    """Opens the training split; returns (source, facts)."""
    from vit_jax.data.sources import open as sources

    source = sources.open_training(config.data)
    return source, catalog.found(config, source)


def training_batches(config, mesh, source, start: int, total_steps: int, folder: epath.Path):
    """Global batches on the mesh from step `start` on, and the pipeline behind them."""
    from vit_jax.data import pipeline, to_device

    size = config.data.batch_size
    rows = sharding.local_rows(mesh, size)
    host = pipeline.train_pipeline(config, source, rows, total_steps)
    host.bad.list_in(folder, "train")
    batches = host.batches(start)
    return to_device.to_device(batches, mesh, rows, size, config.data.prefetch, host.stages), host


def abstract_batch(config, mesh, source) -> dict:
    """Shapes and places of those batches."""
    from vit_jax.data import to_device

    return to_device.abstract_batch(
        mesh, config.data.batch_size, config.image_size, source.set_size
    )


def batch_ids(config, source) -> Callable[[int], list[int]]:
    """f(update, counted from 1) -> ids of the examples of its global batch."""
    from vit_jax.data import order

    return lambda number: order.ids(config, source.parts, number - 1)


def compile_meanwhile(train_step, *shapes) -> concurrent.futures.Future:
    """Compiles a step in a thread, while the state is made or read; the result is (compiled step,
    seconds).
    """
    mesh = jax.sharding.get_mesh()

    def work():
        with jax.set_mesh(mesh), runtime.without_collections():
            return timed(lambda: train_step.lower(*shapes).compile())

    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same while the loop runs."""

    config: object
    folder: epath.Path
    total_steps: int
    train_step: Callable
    eval_steps: suite.Steps
    evals: dict
    checkpointer: Checkpointer
    writer: metrics.MetricWriter
    timer: StepTimer
    skipped: nonfinite.SkippedUpdates
    meta: dict

    def loop(self, first: int, state: step.TrainState, batches, host) -> None:
        """Updates until `total_steps`, with logging, evaluation and checkpoints at their own
        cadence.
        """
        config, total, timer, number = self.config, self.total_steps, self.timer, first
        profiler = ProfilerWindow(
            self.folder / "profile", config.profile.first_step, config.profile.num_steps
        )
        bar = metrics.ProgressBar(total, first)
        request, stop = preemption.SaveRequest(), False
        step_metrics, scalars, stalls = {}, {}, {}
        log.info("training from step %d", first)
        try:
            for number in range(first + 1, total + 1):
                watchdog.progress.mark(f"step {number}")
                profiler.before_step(number)
                state, step_metrics = timer.step(self.train_step, state, timer.next_batch(batches))
                bar.advance(number)
                stop, scalars = request.due(), {}
                if due(number, config.log_every, total):
                    scalars |= (
                        timer.report()
                        | self.look(number, step_metrics)
                        | {"data/skipped": len(host.bad)}
                    )
                    bar.report(number, scalars)
                    if waiting := host.stages.warning(scalars["perf/data_wait"], host.threads):
                        log.warning(waiting)
                saving = due(number, config.checkpoint.every, total)
                try:
                    scalars |= self.evaluate(number, state, saving, request.until_due)
                except preemption.Interrupted:
                    stop = True
                if stop:
                    break
                if scalars:  # written before the save: a kill between them loses no line
                    self.write(number, scalars | stalls)
                    stalls = {}
                if saving:
                    stalls = self.save(number, state, step_metrics, scalars)
            if stop:  # there is little time: save first
                self.save(number, state, step_metrics, {})
            self.settle(number, state, step_metrics, scalars)
            if stop and (scalars := scalars | self.evaluate(number, state, False)):
                self.write(number, scalars | stalls)
        finally:
            profiler.stop()
            bar.close()
        metrics.show_summary(self.folder, timer.totals())
        if stop and number < total:
            log.info("stopped by SIGTERM at step %d: saved, the same command continues", number)
            raise Preempted
        if in_row := int(state.skipped_in_row):
            counts = {"train/skipped_steps": state.skipped_steps, "train/skipped_in_row": in_row}
            self.look(
                number,
                step_metrics if number > first else {"train/loss": math.nan, **counts},
                at_end=True,
            )
        log.info("done: %d steps, results in %s", total, self.folder)

    def look(self, number: int, step_metrics: dict, at_end: bool = False) -> dict[str, float]:
        """The metrics of a step, which may end the run."""
        scalars = metrics.fetch(step_metrics)
        self.skipped.look(number, scalars, at_end)
        return scalars

    def write(self, number: int, scalars: dict[str, float]) -> None:
        self.checkpointer.poll()
        self.writer.write(number, scalars | {"checkpoint/failures": self.checkpointer.failures})

    def settle(
        self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict
    ) -> None:
        """Waits for the last save, and tries it again where it failed: no later state will stand
        for this one.
        """
        with self.timer.paused("checkpoints"):
            while not self.checkpointer.wait():
                self.save(number, state, step_metrics, scalars)

    def evaluate(
        self, number: int, state: step.TrainState, saving: bool, until: Callable = iter
    ) -> dict[str, float]:
        """Runs what is due; a checkpoint that is ranked by a metric has it measured."""
        ranked = self.config.checkpoint.keep_best

        def wanted(name):
            every = self.config.evals[name].every
            return due(number, every, self.total_steps) or (
                saving and ranked.startswith(f"eval/{name}/")
            )

        if not any(map(wanted, self.evals)):
            return {}
        with self.timer.paused("evaluation"):
            return suite.run(self.evals, self.eval_steps, step.eval_params(state), wanted, until)

    def save(
        self, number: int, state: step.TrainState, step_metrics: dict, scalars: dict
    ) -> dict[str, float]:
        """Saves a state that is known to be sound; returns the time that it held the loop up, for
        the next line.
        """
        watchdog.progress.mark(f"the save of step {number}")
        self.look(number, step_metrics)
        if not states.is_finite(state):
            raise NegativeResult(
                f"the state after step {number} is not finite, though loss and gradients were: it "
                "is not saved, and earlier checkpoints are sound; lower optim.lr"
            )
        with self.timer.paused("checkpoints"):
            return self.checkpointer.save(number, states.as_dict(state), self.meta, scalars)


def train(config, folder: epath.Path) -> None:
    """The whole of a run."""
    mesh = meshes.make_mesh(config.mesh)
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    source, facts = open_training_data(config)
    total_steps = experiment.plan_steps(config, facts.num_examples)
    model = experiment.make_model(config, facts.num_classes)
    sharding.check_model(model, mesh)
    tx, schedule = experiment.make_optimizer(config, model, total_steps)
    opened = suite.open_all(config, mesh, facts.class_names, facts.num_classes, folder)
    workdir.check(folder, config, source.fingerprint)
    preflight.check(dict(configs.flatten(config)) | {"data": source.fingerprint}, folder)
    for line in summary.head(
        config, model, adapt.abstract_params(model), facts, total_steps, schedule, mesh
    ):
        log.info(line)

    peak = hardware.peak_flops(jax.devices()[0].device_kind)
    timer = StepTimer(config.data.batch_size, 3 * model.flops, peak, jax.device_count())
    abstract = states.abstract_state(config, model, tx, mesh)
    train_step = experiment.make_train_step(config, mesh, model, tx, schedule, abstract)
    eval_steps = suite.make_steps(config, model)
    meta = dict(
        config=configs.to_json(config), model=create.fields(model), class_names=facts.class_names
    )
    skipped = nonfinite.SkippedUpdates(config.max_skipped, folder, batch_ids(config, source))
    with (
        jax.set_mesh(mesh),
        Checkpointer(folder / "checkpoints", config.checkpoint) as checkpointer,
    ):
        compiling = compile_meanwhile(train_step, abstract, abstract_batch(config, mesh, source))
        first, state = states.start_state(
            config, model, tx, mesh, abstract, total_steps, checkpointer
        )
        workdir.claim(folder, config, source.fingerprint)
        batches, host = training_batches(config, mesh, source, first, total_steps, folder)
        with metrics.MetricWriter(folder, first) as writer:
            train_step, timer.compile_s = compiling.result()
            runtime.release_memory()
            parts = (train_step, eval_steps, opened, checkpointer, writer, timer, skipped, meta)
            Run(config, folder, total_steps, *parts).loop(first, state, batches, host)


def dry_run(config) -> None:
    """Prints what a run would be, from shapes alone."""
    facts = catalog.declared(config)
    total_steps = experiment.plan_steps(config, facts.num_examples)
    model = experiment.make_model(config, facts.num_classes)
    _, schedule = experiment.make_optimizer(config, model, total_steps)
    mesh = meshes.abstract_mesh(config.mesh)
    sharding.check_model(model, mesh)
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    params = adapt.abstract_params(model.with_scan(False))
    for line in summary.head(config, model, params, facts, total_steps, schedule, mesh):
        print(line)
    print("\n".join(summary.sharding_lines(params, mesh)))
