"""Opens the parts of a VTAB task; says what is wrong if they differ from the table `vtab_tasks`."""

import dataclasses
import os
from typing import Literal

from vit_jax.data.sources import storage, tfds_labels
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.vtab_tasks import Task
from vit_jax.errors import UserError, one_line

# The folder below a data_dir for data sets of generated images, and the name of the JSON file in
# each of them that marks it as one.
GENERATED = "generated"
State = Literal["ready", "missing", "manual", "wrong version", "wrong count", "missing files"]


def generated_dir(data_dir: str) -> str:
    return os.path.join(data_dir or tfds_source.default_data_dir(), GENERATED)


@dataclasses.dataclass(frozen=True)
class Found:
    """What is on disk for a task; the builder is set if the data are ready."""

    state: State
    detail: str
    builder: object = None

    @property
    def is_generated(self) -> bool:
        return storage.exists(os.path.join(os.fspath(self.builder.data_dir), f"{GENERATED}.json"))


def find(task: Task, data_dir: str) -> Found:
    """Looks for the data of a task."""
    builders = []
    for version in task.versions:
        try:
            builders.append(tfds_source.open_builder(f"{task.builder}:{version}", data_dir))
        except UserError:  # TFDS opens a version that it has no code for only if it is prepared
            if version == task.versions[-1] and not builders:
                raise
    for builder in builders:
        if builder.info.splits:
            return counted(task, builder)
    builder = builders[-1]
    versions = builder.data_dir_root / task.builder
    others = sorted(path.parent.name for path in versions.glob("*/dataset_info.json"))
    if others:
        expected = " or ".join(task.versions)
        detail = f"{', '.join(others)} of {task.builder} is there, not {expected}"
        return Found("wrong version", detail, builder)
    state = "manual" if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else "missing"
    return Found(state, f"not in {builder.data_dir}", builder)


def counted(task: Task, builder) -> Found:
    """Compares the number of examples of every part with the table, and looks for the files."""
    for name, (expression, expected) in task.splits.items():
        try:
            count = builder.info.splits[expression].num_examples
        except (ValueError, KeyError, AssertionError) as error:
            detail = f"{name} is {expression}, which is not valid: {one_line(error)[:160]}"
            return Found("wrong count", detail, builder)
        accepted = {expected}
        if name in ("train", "trainval"):
            accepted.add(expected - task.left_out)
        if count not in accepted:
            detail = f"{name}, {expression}, has {count:,} examples, not {expected:,}"
            return Found("wrong count", detail, builder)
    files = [path for info in builder.info.splits.values() for path in info.filepaths]
    missing = [path for path in files if not path.exists()]
    if missing:
        detail = f"{len(missing)} of {len(files)}, the first is {missing[0]}"
        return Found("missing files", detail, builder)
    return Found("ready", os.fspath(builder.data_dir), builder)


def open_part(name: str, task: Task, found: Found, split: str) -> Source:
    """Opens a part of a task by its name, such as train800."""
    if split not in task.splits:
        raise UserError(f"{name} has no part {split!r}: choose one of {', '.join(task.splits)}")
    if found.state != "ready":
        raise UserError(
            f"{name} is not ready ({found.state}: {found.detail}): see `python -m vit_jax.vtab "
            "check`"
        )
    rule = tfds_labels.RULES.get(task.label)
    if rule is None:
        rule = tfds_labels.of_feature(found.builder.info.features, task.label)
    rule = dataclasses.replace(rule, what=f"{task.label} {task.scale}")
    expression, _ = task.splits[split]
    return tfds_source.Records(found.builder, name, expression, "image", rule, task.scale)
