"""What a run of a study has come to, read from its workdir: status, metrics, cost."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from vit_jax.cli import lock
from vit_jax.errors import UserError
from vit_jax.report import overview
from vit_jax.report import run as workdirs
from vit_jax.report.files import Folder
from vit_jax.report.run import Run
from vit_jax.study.definition import StudyRun
from vit_jax.train import goodput, workdir

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
        about |= dict(overrides=overrides, status=self.status, metrics=dict(self.metrics))
        about |= dict(step=self.step, exaflops=self.exaflops, images=self.images)
        return about | dict(epochs=self.epochs, seconds=self.seconds, problem=self.problem)


def folder_of(study_folder: pathlib.Path, run: StudyRun) -> pathlib.Path:
    return study_folder / RUNS / run.name


def failure_of(study_folder: pathlib.Path, run: StudyRun) -> str:
    """The last line of a run that has failed, or ""."""
    try:
        return (study_folder / FAILED / f"{run.name}.txt").read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def read(study_folder: pathlib.Path, run: StudyRun) -> Outcome:
    """
    Raises:
      UserError: its workdir has a run of other settings.
    """
    path = folder_of(study_folder, run)
    folder = Folder(str(path))
    problem = failure_of(study_folder, run)
    if not workdirs.is_workdir(folder.names()):
        status = FAILURE if problem else WAITING
        return Outcome(run, status, {}, 0, 0.0, 0.0, 0.0, 0.0, problem)
    found = workdirs.read(folder, run.name)
    check_settings(run, found, path)
    step = chosen_step(found)
    images = found.last_step * (found.size("batch_size") or math.nan)
    flops = images * (found.size("train_flops_per_image") or math.nan)
    return Outcome(
        run=run,
        status=status_of(found, bool(problem)),
        metrics=metrics_at(found, step),
        step=step,
        exaflops=flops / 1e18,
        images=images,
        epochs=images / (found.size("num_examples") or math.nan),
        seconds=goodput.totals(found.starts)["parts"]["steps"],
        problem=problem,
    )


def is_used_here(study_folder: pathlib.Path, run: StudyRun) -> bool:
    """Whether a process of this machine has the run, such as one that still saves after the end of
    an earlier study.
    """
    holder = lock.parse(Folder(str(folder_of(study_folder, run))).read(lock.FILE) or b"")
    is_here = bool(holder) and holder.get("machine") == lock.machine()
    return is_here and not workdirs.is_dead(holder)


def check_settings(run: StudyRun, found: Run, path: pathlib.Path) -> None:
    """Raises UserError if a run was made with other settings than the study has now."""
    if not found.config:
        return
    different = workdir.differences(run.config(), found.config)
    if different:
        raise UserError(
            f"{path} has a run with other settings ({'; '.join(different)}): undo the change of "
            "the study, delete this folder, or choose another --workdir"
        )


def status_of(found: Run, has_failed: bool) -> str:
    if found.holder and not workdirs.is_dead(found.holder):
        return RUNNING
    total = found.size("total_steps")
    if found.stopped_early or (total and found.last_step >= total):
        return DONE
    return FAILURE if has_failed else STOPPED


def chosen_step(found: Run) -> int:
    """The step whose metrics count: the best checkpoint if they are ranked, else the last."""
    key = found.flat.get("checkpoint.keep_best")
    series = found.series.get(key)
    index = series and overview.best(series, key)
    if index is None:
        return found.last_step
    return int(series.step[index])


def metrics_at(found: Run, step: int) -> dict[str, float]:
    """The metrics of training and evaluations at a step, or the last ones before it."""
    metrics = {}
    for key, one in found.series.items():
        known = np.flatnonzero(one.step <= step)
        if key.startswith(("train/", "eval/")) and len(known):
            metrics[key] = float(one.value[known[-1]])
    return metrics
