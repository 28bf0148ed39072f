"""The metrics that a run writes: metrics.jsonl, TensorBoard events by clu, and trackers."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable

import jax
import numpy as np
from etils import epath

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.checkpoints.manager import KeepBest
from vit_jax.cli import regular
from vit_jax.cli.spool import Files
from vit_jax.distributed.waits import waiting
from vit_jax.errors import one_line, storage_problem
from vit_jax.train.trackers import make as trackers

log = logging.getLogger(__name__)


def parse(text: str) -> dict[str, float] | None:
    """A line of a metrics.jsonl; None if it is not complete."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return line if all(isinstance(value, int | float) for value in line.values()) else None


def split(path: epath.Path) -> list[str]:
    with regular.open_file(path) as file:
        content = file.read()
    return content.decode(errors="replace").removesuffix("\n").split("\n")


def read_lines(path: epath.Path) -> list[dict[str, float]]:
    """The complete lines of a metrics.jsonl."""
    return [line for line in map(parse, split(path)) if line is not None]


def rank(best: KeepBest, saved: Iterable[int], path: epath.Path) -> None:
    """Gives `best` the metrics of checkpoints that a stopped run evaluated after their save: they
    are in metrics.jsonl only.
    """
    missing = set(saved) - best.scores.keys()
    if best.metric and missing and path.exists():
        for line in read_lines(path):
            if line["step"] in missing:
                best.add(line["step"], line)


def rewind(path: epath.Path, step: int) -> int:
    """Drops the lines after `step`, so that a resumed run writes each step once.

    After a kill, the last line may be incomplete. If others are, a copy of the file is kept before
    they are dropped.

    Returns:
      the last step that had a line; -1 if there was none.
    """
    if not path.exists():
        return -1
    texts = split(path)
    lines = [parse(text) for text in texts]
    damaged = [number for number, line in enumerate(lines[:-1], 1) if line is None]
    if damaged:
        copy = cli.name_for_damaged(path)
        path.copy(copy)
        log.warning(
            "%s: line %d%s can't be read and is dropped; a copy of the file is kept as %s",
            path,
            damaged[0],
            f" (and {len(damaged) - 1} more)" if damaged[1:] else "",
            copy.name,
        )
    kept = [
        text + "\n"
        for text, line in zip(texts, lines, strict=True)
        if line is not None and line["step"] <= step
    ]
    cli.replace_file(path, "".join(kept))
    return max((line["step"] for line in lines if line is not None), default=-1)


def settings(config) -> dict[str, bool | int | float | str]:
    """The config by the names of its keys, as TensorBoard shows it."""
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in configs.flatten(config)
    }


def as_markdown(config) -> str:
    """A line for each key, which Markdown shows as code."""
    return "\n".join(f"    {key} = {value!r}" for key, value in configs.flatten(config))


def fetch(step_metrics: dict) -> dict[str, float]:
    """Waits for the metrics of a step."""
    return {name: np.asarray(value).item() for name, value in jax.device_get(step_metrics).items()}


class MetricWriter:
    """Writes the scalars of a step, on process 0.

    If the disk is full, training goes on: lines wait in memory until they can be written.
    """

    def __init__(self, files: Files, resumed_step: int, config):
        """`files`: of the workdir."""
        self.files = files
        self.is_leader = jax.process_index() == 0
        self.tensorboard = None
        self.trackers = []
        self.waiting = []  # lines that could not be written yet
        self.next = {}  # scalars that belong to the next line
        self.is_missing = False  # whether the step that the run continues from has no line
        if self.is_leader:
            from clu import metric_writers  # imports TensorFlow

            self.path = files.path("metrics.jsonl")
            last_step = rewind(self.path, resumed_step)
            self.is_missing = last_step < resumed_step
            self.tensorboard = metric_writers.create_default_writer(
                str(files.folder), just_logging=False
            )
            text = as_markdown(config)
            self.to_tensorboard(lambda writer: writer.write_texts(resumed_step, {"config": text}))
            self.to_tensorboard(lambda writer: writer.write_hparams(settings(config)))
            earlier = trackers.Earlier(last_step, lambda: self.lines_until(resumed_step))
            self.trackers = trackers.start(config, files, earlier)

    def lines_until(self, step: int) -> list[dict[str, float]]:
        return [line for line in read_lines(self.path) if line["step"] <= step]

    def add(self, scalars: dict[str, float]) -> None:
        """Keeps scalars for the next line."""
        self.next |= scalars

    def rewind(self, step: int) -> None:
        """Drops all lines after `step`, also those in memory: the run goes back there."""
        self.next = {}
        self.waiting = [line for line in self.waiting if json.loads(line)["step"] <= step]
        if self.is_leader:
            rewind(self.path, step)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One line per step: call once, with everything that the step measured."""
        scalars = scalars | self.next
        self.next = {}
        if not self.is_leader:
            return
        self.waiting.append(json.dumps({"step": step, **scalars}) + "\n")
        self.write_waiting()
        finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
        self.to_tensorboard(lambda writer: writer.write_scalars(step, finite))
        for tracker in self.trackers:
            tracker.write(step, finite)

    def write_pictures(self, step: int, name: str, pictures: np.ndarray) -> None:
        """uint8 [n, H, W, 3], to TensorBoard and trackers; on process 0."""
        images = {f"pictures/{name}": pictures}
        self.to_tensorboard(lambda writer: writer.write_images(step, images))
        for tracker in self.trackers:
            tracker.pictures(step, name, pictures)

    def to_tensorboard(self, use: Callable) -> None:
        """If its events can't be written, TensorBoard lacks the rest of this run; metrics.jsonl has
        everything.
        """
        try:
            if self.tensorboard is not None:
                use(self.tensorboard)
        except Exception as error:  # of TensorFlow and clu
            self.tensorboard = None
            log.warning("TensorBoard's events can't be written any more: %s", one_line(error)[:160])

    def deliver(self) -> None:
        """Returns once everything written so far is in the workdir, unless its store fails."""
        self.to_tensorboard(lambda writer: writer.flush())
        with waiting(f"{self.files.workdir} to take log and metrics"):
            self.files.deliver()

    def write_waiting(self) -> None:
        size = self.path.stat().length if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self.waiting))
        except Exception as error:  # every store has errors of its own
            if self.path.exists() and self.path.stat().length > size:  # a part was written
                os.truncate(self.path, size)
            if len(self.waiting) == 1:
                problem = storage_problem(error) or one_line(error)[:160]
                log.warning(
                    "%s can't be written (%s): its lines wait in memory", self.path, problem
                )
            return
        self.waiting.clear()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.waiting:
            self.write_waiting()
        self.to_tensorboard(lambda writer: writer.close())
        trackers.finish(self.trackers, error)
