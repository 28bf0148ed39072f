"""The suite: each task is fine-tuned and evaluated by one process, and its result kept as soon as
it is there.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath

from vit_jax import config as configs
from vit_jax.data.sources.vtab_tasks import VTAB
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import messages, preflight, sharding, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.train import experiment, workdir
from vit_jax.train import state as states
from vit_jax.vtab import report, task_data
from vit_jax.vtab.trainer import Finetuner, Setting, larger
from vit_jax.weights import load as pretrained

log = logging.getLogger("vit_jax.vtab")

TILE = 128  # classes of the head are a multiple of this
CLASSES = -(-max(task.num_classes for task in VTAB.values()) // TILE) * TILE
WAIT_S = 2  # between looks at what other processes have done


def is_fixed(key: str) -> bool:
    """Whether a suite can't be continued with another value; how images are evaluated is fixed."""
    return key.startswith("evals.") or not configs.may_change(key)


def make_model(config, mesh):
    """(model, f(seed) -> parameters) for all tasks: weights with a new head, or a fresh model where
    there are none.
    """
    if not config.init_from:
        model = experiment.make_model(config, CLASSES)
        return model, jax.jit(functools.partial(states.init_params, model))
    default = configs.defaults().model
    changed = {key: value for key, value in config.model.items() if value != default[key]}
    if fixed := [key for key in changed if configs.shapes_state(f"model.{key}")]:
        raise UserError(
            f"config key model.{fixed[0]} has no effect in vtab: the weights say what the model "
            "is, leave it out"
        )
    weights = pretrained.read(config.init_from, image_size=config.image_size)
    model, params = pretrained.build(weights, CLASSES, config.image_size, **changed)
    params = jax.device_put(params, sharding.param_specs(params, mesh))
    return model, lambda seed: params


def check_config(config) -> None:
    """Raises UserError for what the suite can't do."""
    if list(config.evals) != ["test"]:
        raise UserError(
            "config.evals must have one entry, test: results are those of VTAB's test splits"
        )
    if name := first_without_effect(config):
        raise UserError(f"config key {name} has no effect in vtab: leave it out")
    if not config.total_steps:
        raise UserError("config key total_steps=0: the protocols count steps, set it")
    if config.loss == "multilabel_xent":
        raise UserError(
            "config key loss=multilabel_xent is not for vtab, whose heads are padded: choose "
            "softmax_xent"
        )
    if config.data.crop not in ("random", "resize"):
        raise UserError(
            f"config key data.crop={config.data.crop} is not for VTAB, whose images are resized: "
            "choose resize, or random for windows of those tasks that allow it"
        )
    if config.label_smoothing:
        raise UserError(
            "config key label_smoothing has no effect in vtab, whose heads are padded: leave it out"
        )


def first_without_effect(config) -> str | None:
    """A key that is not as by default and that nothing here reads."""
    usual = configs.known_keys()
    changed = (
        key for key, value in configs.flatten(config) if value != usual[configs.generic(key)]
    )
    return next((key for key in changed if not configs.find(key).vtab), None)


def settings_of(config) -> list[Setting]:
    """The settings to choose from."""
    lrs, steps = config.vtab.lrs or (config.optim.lr,), config.vtab.steps or (config.total_steps,)
    return [Setting(lr, count, config.seed) for lr, count in itertools.product(lrs, steps)]


class Suite:
    """The runs of one process."""

    def __init__(self, config, mesh):
        self.config, self.mesh = config, mesh
        self.model, make_params = make_model(config, mesh)
        self.finetuner = Finetuner(config, self.model, make_params, mesh, task_data.EXAMPLES)

    def load(self, name: str):
        """(where the data of a task are, their fingerprint, the training set), while the task
        before trains.
        """
        from vit_jax.vtab import fingerprint as fingerprints

        found, config = task_data.find(name, self.config), self.config
        fingerprint = fingerprints.ids(name, VTAB[name], found)
        windows = VTAB[name].crop and config.data.crop == "random"
        size = larger(config.image_size) if windows else config.image_size
        return found, fingerprint, task_data.training_set(name, found, config, size)

    def choose(self, name: str, found, training: task_data.TrainingSet, examples) -> Setting:
        """The setting that is best on val200 after training on train800; the first one of equals."""
        choices = settings_of(self.config)
        if len(choices) == 1:
            return choices[0]
        examples, trained = dataclasses.replace(examples, count=np.int32(training.choosing)), {}
        for setting in choices:
            try:
                trained[setting] = self.finetuner.train(examples, setting)
            except NegativeResult as error:
                log.warning("%s: %s", name, error)
        if not trained:
            raise NegativeResult(
                "loss or gradients were not finite with any of the settings: choose lower ones"
            )
        _, batches = task_data.batches_of(name, found, "val200", self.config, self.mesh)
        results = self.finetuner.evaluate(list(trained.values()), batches, VTAB[name].num_classes)
        top1 = {setting: result["top1"] for setting, result in zip(trained, results, strict=True)}
        for setting, value in top1.items():
            log.info("%s: lr %g, %d steps: val200 %.4f", name, setting.lr, setting.steps, value)
        return max(top1, key=top1.get)

    def run(
        self,
        name: str,
        seeds: Sequence[int],
        found,
        fingerprint: dict,
        training: task_data.TrainingSet,
    ) -> list[dict]:
        """The results of a task by seed, as `failed` names them; one pass over the test images
        serves all.
        """
        config, task, start = self.config, VTAB[name], time.monotonic()
        windows, mirrors = (
            (task.crop and config.data.crop == "random"),
            (task.flip and config.data.flip),
        )
        examples = self.finetuner.examples(
            training.image, training.label, task.num_classes, windows, mirrors
        )
        chosen = self.choose(name, found, training, examples)
        trained = [
            self.finetuner.train(examples, dataclasses.replace(chosen, seed=seed)) for seed in seeds
        ]
        jax.block_until_ready(trained)
        middle = time.monotonic()
        num_test, batches = task_data.batches_of(name, found, "test", config, self.mesh)
        evaluated = self.finetuner.evaluate(trained, batches, task.num_classes)
        common = dict(
            num_train=len(training.image),
            lr=chosen.lr,
            steps=chosen.steps,
            status="done",
            error=None,
        )
        common |= dict(
            data=fingerprint
            | dict(folder=os.fspath(found.builder.data_dir), generated=found.is_generated)
        )
        common["data"]["unreadable"] = (
            task_data.EXAMPLES - len(training.image) + num_test - int(evaluated[0]["count"])
        )
        common |= dict(
            seconds=dict(train=middle - start, test=time.monotonic() - middle), runs=len(seeds)
        )
        return [
            common | dict(top1=result["top1"], num_test=int(result["count"]))
            for result in evaluated
        ]


def failed(error: Exception) -> dict:
    """The result of a run that has none."""
    status = "missing" if isinstance(error, task_data.Missing) else "failed"
    nothing = dict.fromkeys(("top1", "num_train", "num_test", "lr", "steps"))
    return nothing | dict(
        status=status, error=one_line(error)[:500] or type(error).__name__, data={}
    )


def share(runs: Sequence, index: int, count: int) -> Sequence:
    """The part of all runs that process `index` of `count` does: neighbours, which are mostly of
    one task.
    """
    return runs[index * len(runs) // count : (index + 1) * len(runs) // count]


def run_tasks(suite: Suite, runs: Sequence[tuple[str, int]], results: report.Results) -> None:
    """Does (task, seed) runs task by task, while the images of the next are decoded. One that fails
    ends no other.
    """
    tasks = [
        (name, [seed for _, seed in own])
        for name, own in itertools.groupby(runs, key=lambda run: run[0])
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(suite.load, tasks[0][0]) if tasks else None
        for number, (name, seeds) in enumerate(tasks, 1):
            loading, ahead = (
                ahead,
                pool.submit(suite.load, tasks[number][0]) if number < len(tasks) else None,
            )
            watchdog.progress.mark(f"task {name}")
            log.info("task %s, %d of %d", name, number, len(tasks))
            try:
                found = suite.run(name, seeds, *loading.result())
                log.info(
                    "%s: top1 %s", name, ", ".join(f"{result['top1']:.4f}" for result in found)
                )
            except Exception as error:  # of the data, a device's memory, a library
                found = [failed(error)] * len(seeds)
                log.warning(
                    "task %s: %s",
                    name,
                    found[0]["error"],
                    exc_info=not isinstance(error, UserError),
                )
            results.write(name, dict(zip(seeds, found, strict=True)))


def run(config, folder: epath.Path, names: Sequence[str]) -> dict:
    """Runs what has no result in `folder` yet, and returns what vtab.json says.

    Raises:
      UserError: the config is not for VTAB, or the folder holds another suite.
    """
    check_config(config)
    workdir.check(folder, config, "vtab", is_fixed)
    preflight.check(dict(configs.flatten(config)) | dict(tasks=",".join(names)), folder)
    # Every process has devices and runs of its own: nothing is sent between them.
    mesh = meshes.make_mesh(config.mesh, jax.local_devices())
    sharding.check_batch(mesh, config.data.batch_size, config.accum_steps)
    sharding.check_batch(mesh, config.evals.test.data.batch_size or config.data.batch_size)
    results = report.Results(folder, config, names)
    todo = results.begin()
    messages.first_problem("the start of the suite", None)  # results of earlier failures are gone
    with jax.set_mesh(mesh):
        suite = Suite(config, mesh)
        sharding.check_model(suite.model, mesh)
        workdir.claim(folder, config, "vtab")
        run_tasks(suite, share(todo, jax.process_index(), jax.process_count()), results)
    while results.missing(names):
        watchdog.progress.mark("the runs of other processes")
        time.sleep(WAIT_S)
    return results.publish()
