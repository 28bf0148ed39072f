"""The suite: one process fine-tunes and evaluates each run, a task and a seed, and saves its result
as soon as it is done.
"""

import concurrent.futures
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.data.sources.vtab_tasks import VTAB, Task
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import messages, preflight, sharding, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.models import preparation
from vit_jax.train import experiment, workdir
from vit_jax.train.objectives.objective import Objective
from vit_jax.vtab import report, task_data
from vit_jax.vtab.trainer import Examples, Finetuner, Setting, resized_side
from vit_jax.weights import adapt
from vit_jax.weights import load as pretrained

log = logging.getLogger("vit_jax.vtab")

TILE = 128  # the number of classes of the head is a multiple of this
CLASSES = -(-max(task.num_classes for task in VTAB.values()) // TILE) * TILE
WAIT_S = 2  # seconds between checks for the results of other processes


def is_fixed(key: str) -> bool:
    """Whether a suite can't be continued with another value; how images are evaluated is fixed."""
    return key.startswith("evals.") or not configs.may_change(key)


def make_model(config, mesh):
    """(model, f(seed) -> parameters) for all tasks: the weights of `init_from` with a new head, or
    without it a randomly initialised model.
    """
    if not config.init_from:
        model = experiment.make_model(config, CLASSES)
        return model, jax.jit(Objective(model).init)
    default = configs.defaults().model
    changed = {k: value for k, value in config.model.items() if value not in (None, default[k])}
    fixed = [key for key in changed if configs.shapes_state(f"model.{key}")]
    if fixed:
        raise UserError(
            f"config key model.{fixed[0]} has no effect in vtab, where the weights determine the "
            "model: leave it out"
        )
    weights = pretrained.read(config.init_from, image_size=config.image_size)
    adapt.check_given(config.model, weights.fields)
    model, params = pretrained.build(weights, CLASSES, config.image_size, **changed)
    params = jax.device_put(params, sharding.param_specs(params, mesh))
    return model, lambda seed: params


def check_config(config) -> None:
    """Raises UserError for settings that the suite does not support."""
    if list(config.evals) != ["test"]:
        raise UserError(
            "config.evals must have one entry, test: results are those of VTAB's test splits"
        )
    name = first_without_effect(config)
    if name:
        raise UserError(f"config key {name} has no effect in vtab: leave it out")
    if not config.total_steps:
        raise UserError("config key total_steps=0: the protocols count steps, set it")
    if config.loss == "multilabel_xent" or configs.is_own(config.loss):
        raise UserError(
            f"config key loss={config.loss} is not for vtab, whose heads are padded: choose "
            "softmax_xent"
        )
    if config.data.crop not in ("random", "resize"):
        raise UserError(
            f"config key data.crop={config.data.crop} is not for VTAB, whose images are resized: "
            "choose resize, or random for crops in those tasks that allow them"
        )
    if config.label_smoothing:
        raise UserError(
            "config key label_smoothing is not for vtab, whose heads are padded: leave it out"
        )


def first_without_effect(config) -> str | None:
    """A key that was changed from its default although nothing here reads it."""
    for key, value in configs.flatten(config):
        entry = configs.find(key)
        if value != entry.default and not entry.vtab:
            return key
    return None


def settings_of(config) -> list[Setting]:
    """The settings to choose from."""
    lrs = config.vtab.lrs or (config.optim.lr,)
    steps = config.vtab.steps or (config.total_steps,)
    return [Setting(lr, count, config.seed) for lr, count in itertools.product(lrs, steps)]


@dataclasses.dataclass(frozen=True)
class TaskData:
    """What a run of a task needs from disk; `found` is the `data.sources.vtab.Found`."""

    found: Any
    fingerprint: dict
    training: task_data.TrainingSet


class Suite:
    """The runs of one process."""

    def __init__(self, config, mesh):
        self.config = config
        self.mesh = mesh
        self.model, make_params = make_model(config, mesh)
        how = preparation.configured(config.evals.test.data, self.model.image_size, self.model)
        log.info("images: %s", how)
        self.finetuner = Finetuner(config, self.model, make_params, mesh, task_data.EXAMPLES)

    def crops(self, task: Task) -> bool:
        """Whether training takes random crops."""
        return task.crop and self.config.data.crop == "random"

    def batches_of(self, name: str, data: TaskData, part: str) -> tuple[int, Iterator[dict]]:
        return task_data.batches_of(name, data.found, part, self.config, self.mesh, self.model)

    def load(self, name: str) -> TaskData:
        """Reads the data of a task; called while the previous task trains."""
        from vit_jax.data.sources import vtab_fingerprint

        task = VTAB[name]
        size = self.config.image_size
        if self.crops(task):
            size = resized_side(size)
        found = task_data.find(name, self.config)
        return TaskData(
            found=found,
            fingerprint=vtab_fingerprint.ids(name, task, found),
            training=task_data.training_set(name, found, self.config, size, self.model),
        )

    def choose(self, name: str, data: TaskData, examples: Examples) -> Setting:
        """The setting with the best top-1 on val200 after training on train800; the first of
        equals.
        """
        choices = settings_of(self.config)
        if len(choices) == 1:
            return choices[0]
        train800 = dataclasses.replace(examples, count=np.int32(data.training.num_train800))
        trained = {}
        for setting in choices:
            try:
                trained[setting] = self.finetuner.train(train800, setting)
            except NegativeResult as error:
                log.warning("%s: %s", name, error)
        if not trained:
            raise NegativeResult(
                "loss or gradients were not finite with any setting: choose lower learning rates"
            )
        _, batches = self.batches_of(name, data, "val200")
        results = self.finetuner.evaluate(list(trained.values()), batches, VTAB[name].num_classes)
        top1 = {setting: result["top1"] for setting, result in zip(trained, results, strict=True)}
        for setting, value in top1.items():
            log.info("%s: lr %g, %d steps: val200 %.4f", name, setting.lr, setting.steps, value)
        return max(top1, key=top1.get)

    def run(self, name: str, seeds: Sequence[int], data: TaskData) -> list[dict]:
        """The results of a task by seed; one pass over the test images serves all seeds."""
        task = VTAB[name]
        image = data.training.image
        flip = task.flip and self.config.data.flip
        start = time.monotonic()
        examples = self.finetuner.examples(
            image, data.training.label, task.num_classes, self.crops(task), flip
        )
        chosen = self.choose(name, data, examples)
        trained = [
            self.finetuner.train(examples, dataclasses.replace(chosen, seed=seed)) for seed in seeds
        ]
        jax.block_until_ready(trained)
        end_of_training = time.monotonic()
        num_test, batches = self.batches_of(name, data, "test")
        evaluated = self.finetuner.evaluate(trained, batches, task.num_classes)
        end = time.monotonic()
        unreadable = task_data.EXAMPLES - len(image) + num_test - int(evaluated[0]["count"])
        folder = os.fspath(data.found.builder.data_dir)
        common = dict(
            num_train=len(image),
            lr=chosen.lr,
            steps=chosen.steps,
            status="done",
            error=None,
            data=data.fingerprint | dict(folder=folder, unreadable=unreadable),
            seconds=dict(train=end_of_training - start, test=end - end_of_training),
            runs=len(seeds),
        )
        return [
            common | dict(top1=result["top1"], num_test=int(result["count"]))
            for result in evaluated
        ]


def error_result(error: Exception) -> dict:
    """What is saved for a run that ended with an error."""
    status = "missing" if isinstance(error, task_data.Missing) else "failed"
    nothing = dict.fromkeys(("top1", "num_train", "num_test", "lr", "steps"))
    return nothing | dict(
        status=status, error=one_line(error)[:500] or type(error).__name__, data={}
    )


def share(runs: Sequence, index: int, count: int) -> Sequence:
    """The runs of process `index` of `count`: consecutive ones, so that few tasks are split."""
    start = index * len(runs) // count
    end = (index + 1) * len(runs) // count
    return runs[start:end]


def run_tasks(suite: Suite, runs: Sequence[tuple[str, int]], results: report.Results) -> None:
    """Does (task, seed) runs task by task, and decodes the images of the next task meanwhile. A
    task that fails does not end the others.
    """
    tasks = [
        (name, [seed for _, seed in group])
        for name, group in itertools.groupby(runs, key=lambda run: run[0])
    ]
    if not tasks:
        return
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        following = pool.submit(suite.load, tasks[0][0])
        for number, (name, seeds) in enumerate(tasks, 1):
            loading = following
            if number < len(tasks):
                following = pool.submit(suite.load, tasks[number][0])
            watchdog.progress.mark(f"task {name}")
            log.info("task %s, %d of %d", name, number, len(tasks))
            results.write(
                name, dict(zip(seeds, run_task(suite, name, seeds, loading), strict=True))
            )


def run_task(suite: Suite, name: str, seeds: Sequence[int], loading) -> list[dict]:
    """The results of a task by seed, also if it fails; `loading` is the future of its data."""
    try:
        done = suite.run(name, seeds, loading.result())
    except Exception as error:  # from the data, a device's memory or a library
        result = error_result(error)
        is_bug = not isinstance(error, UserError)
        log.warning("task %s: %s", name, result["error"], exc_info=is_bug)
        return [result] * len(seeds)
    log.info("%s: top1 %s", name, ", ".join(f"{result['top1']:.4f}" for result in done))
    return done


def run(config, folder: epath.Path, names: Sequence[str]) -> dict:
    """Does the runs that have no result in `folder` yet, and returns the content of vtab.json."""
    check_config(config)
    workdir.check(folder, config, "vtab", is_fixed)
    preflight.check(dict(configs.flatten(config)) | dict(tasks=",".join(names)), folder)
    # Every process has its own devices and runs: nothing is sent between them.
    mesh = meshes.make_mesh(config.mesh, jax.local_devices())
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    sharding.check_batch(mesh, config.evals.test.data.batch_size or config.data.batch_size)
    results = report.Results(folder, config, names)
    todo = results.begin()
    if len(todo) == len(results.runs):
        task_data.must_have_some(names, config)
    messages.first_problem("the start of the suite", None)  # barrier: old failures are removed
    with jax.set_mesh(mesh):
        suite = Suite(config, mesh)
        sharding.check_model(suite.model, mesh)
        workdir.claim(folder, config, "vtab")
        results.publish()  # until the first task is done, all that have no result are pending
        run_tasks(suite, share(todo, jax.process_index(), jax.process_count()), results)
    while results.missing(names):
        watchdog.progress.mark("the runs of other processes")
        time.sleep(WAIT_S)
    return results.publish()
