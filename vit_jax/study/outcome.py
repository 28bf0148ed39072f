"""What a run of a study has come to, read from its workdir: status, metrics, cost."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from vit_jax import config as configs
from vit_jax.checkpoints.manager import KeepBest
from vit_jax.cli import lock
from vit_jax.config import evaluations
from vit_jax.errors import UserError
from vit_jax.report import run as workdirs
from vit_jax.report.files import Folder
from vit_jax.report.run import Run
from vit_jax.report.series import or_none
from vit_jax.study.definition import StudyRun
from vit_jax.train import goodput, workdir
from vit_jax.train.schedules import due

RUNS = "runs"
FAILED = "failed"  # a folder with the last line of each run that failed, in NAME.txt
WAITING, STOPPED, RUNNING, DONE, FAILURE = "waiting", "stopped", "running", "done", "failed"


@dataclasses.dataclass(frozen=True)
class Outcome:
    run: StudyRun
    status: str
    metrics: Mapping[str, float]
    step: int  # that `metrics` are of
    exaflops: float  # forward and backward passes until now
    images: float
    epochs: float
    seconds: float  # of training, without start, evaluations and saves
    problem: str = ""

    def to_json(self) -> dict:
        overrides = dict(text.split("=", 1) for text in self.run.overrides)
        about = dict(name=self.run.name, point=dict(self.run.point), recipe=self.run.recipe)
        about |= dict(overrides=overrides, status=self.status, problem=self.problem)
        about |= dict(metrics={key: or_none(value) for key, value in self.metrics.items()})
        numbers = ("step", "exaflops", "images", "epochs", "seconds")
        return about | {name: or_none(getattr(self, name)) for name in numbers}


def folder_of(study_folder: pathlib.Path, run: StudyRun) -> pathlib.Path:
    return study_folder / RUNS / run.name


def failure_of(study_folder: pathlib.Path, run: StudyRun) -> str:
    """The last line of a run that has failed, or ""."""
    try:
        return (study_folder / FAILED / f"{run.name}.txt").read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def read(study_folder: pathlib.Path, run: StudyRun, metric: str = "") -> Outcome:
    """
    Args:
      metric: of the figure.

    Raises:
      UserError: its workdir has a run of other settings.
    """
    path = folder_of(study_folder, run)
    folder = Folder(str(path))
    failure = failure_of(study_folder, run)
    if not workdirs.is_workdir(folder.names()):
        status = FAILURE if failure else WAITING
        return Outcome(run, status, {}, 0, 0.0, 0.0, 0.0, 0.0, failure)
    found = workdirs.read(folder, run.name)
    check_settings(run, found, path, metric)
    step = chosen_step(found)
    images = found.last_step * (found.size("batch_size") or math.nan)
    flops = images * (found.size("train_flops_per_image") or math.nan)
    return Outcome(
        run=run,
        status=status_of(found, bool(failure)),
        metrics=metrics_at(found, step),
        step=step,
        exaflops=flops / 1e18,
        images=images,
        epochs=images / (found.size("num_examples") or math.nan),
        seconds=goodput.totals(found.starts)["parts"]["steps"],
        problem=failure or "; ".join(folder.problems[:1]),
    )


def is_used_here(study_folder: pathlib.Path, run: StudyRun) -> bool:
    """Whether a process of this machine has the run, such as one that still saves after the end of
    an earlier study.
    """
    holder = lock.parse(Folder(str(folder_of(study_folder, run))).read(lock.FILE) or b"")
    is_here = bool(holder) and holder.get("machine") == lock.machine()
    return is_here and not workdirs.is_dead(holder)


def check_settings(run: StudyRun, found: Run, path: pathlib.Path, metric: str) -> None:
    """Raises UserError if a run was made with other settings than the study has now."""
    if not found.config:
        return
    config = run.config()
    matters = functools.partial(decides, dict(configs.flatten(config)), metric)
    different = workdir.differences(config, found.config, matters)
    if different:  # perhaps in optim.frozen only, to which an objective adds
        others = [line for line in different if not line.startswith("optim.frozen:")]
        different = others or workdir.differences(declared(run.arguments), found.config, matters)
    if different:
        raise UserError(
            f"{path} has a run with other settings ({'; '.join(different)}): undo the change of "
            "the study, delete this folder, or choose another --workdir"
        )


def decides(wanted: Mapping, metric: str, key: str) -> bool:
    """Whether a key of a config, which is `wanted`, decides what is in the results: what a run can
    not be continued with, and how the metric of the figure and the best checkpoint are measured.

    A run gives values to the keys that are None.
    """
    if wanted.get(key, "") is None:
        return False
    best = wanted["checkpoint.keep_best"]
    measured = [f"evals.{name.split('/')[1]}." for name in (metric, best) if "/" in name]
    if key.startswith(tuple(measured)):
        return not key.endswith(evaluations.WITHOUT_EFFECT)
    is_of_ranking = bool(best) and key in ("checkpoint.every", "checkpoint.keep_best")
    return is_of_ranking or workdir.is_fixed(key)


@functools.cache
def declared(arguments: tuple[str, ...]):
    """The config of a run with all that its objective adds."""
    from vit_jax.train.experiment import Experiment

    recipe, *overrides = arguments
    config = configs.load(recipe.removeprefix("--config="), overrides)
    return Experiment.declared(config).config


def status_of(found: Run, has_failed: bool) -> str:
    if found.holder and not workdirs.is_dead(found.holder):
        return RUNNING
    if has_failed:
        return FAILURE
    return DONE if found.is_over else STOPPED


def chosen_step(found: Run) -> int:
    """The step whose metrics count: the best checkpoint if they are ranked, else the last."""
    key = found.flat.get("checkpoint.keep_best")
    ranked = found.series.get(key)
    if ranked is None:
        return found.last_step
    best = KeepBest(key)
    every = found.flat["checkpoint.every"]
    total = found.size("total_steps")
    for step, value in zip(ranked.step.tolist(), ranked.value.tolist(), strict=True):
        if due(step, every, total):  # those that are saved
            best.add(step, {key: value})
    return best.best_of(best.scores) or found.last_step


def metrics_at(found: Run, step: int) -> dict[str, float]:
    """The metrics of training and evaluations at a step, or the last ones before it; of an
    evaluation at the end only the last ones.
    """
    metrics = {}
    for key, one in found.series.items():
        until = np.flatnonzero(one.step <= step)
        if is_at_the_end(found, key):
            metrics[key] = float(one.value[-1])
        elif key.startswith(("train/", "eval/")) and len(until):
            metrics[key] = float(one.value[until[-1]])
    return metrics


def is_at_the_end(found: Run, key: str) -> bool:
    """Whether an evaluation is made at the end only: with early stopping of the best checkpoint,
    else of the last parameters.
    """
    part, _, name = key.partition("/")
    return part == "eval" and found.flat.get(f"evals.{name.partition('/')[0]}.every") == 0
