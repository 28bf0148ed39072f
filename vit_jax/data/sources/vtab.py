"""Finds the data of a VTAB task and opens its parts; if they differ from the table in
`vtab_tasks`, says how.
"""

import dataclasses
import os

from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import tfds_labels
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.vtab_tasks import Task
from vit_jax.errors import UserError, one_line


@dataclasses.dataclass(frozen=True)
class Found:
    """What is on disk for a task. `state` is ready, missing, manual (the user must download it),
    wrong version, wrong count or missing files.
    """

    state: str
    detail: str
    builder: object


def find(task: Task, data_dir: str) -> Found:
    """Looks for the data of a task.

    Raises:
      UserError: TFDS can't open them, for example because dataset_info.json is damaged.
    """
    builders = []
    for version in task.versions:
        try:
            builders.append(tfds_source.open_builder(f"{task.builder}:{version}", data_dir))
        except UserError:  # TFDS has no code for this version, and it is not prepared
            if version == task.versions[-1] and not builders:
                raise
    for builder in builders:
        if builder.info.splits:
            return compare(task, builder)
    builder = builders[-1]
    versions = builder.data_dir_root / task.builder
    others = sorted(path.parent.name for path in versions.glob("*/dataset_info.json"))
    if others:
        accepted = " or ".join(task.versions)
        detail = f"{', '.join(others)} of {task.builder} is there, not {accepted}"
        return Found("wrong version", detail, builder)
    state = "manual" if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else "missing"
    return Found(state, f"not in {builder.data_dir}", builder)


def compare(task: Task, builder) -> Found:
    """Compares the number of examples of every part with the table, and looks for the files."""
    for name in task.splits:
        problem = wrong_count(task, name, builder.info.splits)
        if problem:
            return Found("wrong count", problem, builder)
    files = [path for info in builder.info.splits.values() for path in info.filepaths]
    missing = [path for path in files if not path.exists()]
    if missing:
        detail = f"{len(missing)} of {len(files)}, the first is {missing[0]}"
        return Found("missing files", detail, builder)
    return Found("ready", os.fspath(builder.data_dir), builder)


def wrong_count(task: Task, name: str, splits) -> str | None:
    """What is wrong with the size of a part, or None."""
    expression, expected = task.splits[name]
    try:
        count = splits[expression].num_examples
    except (ValueError, KeyError, AssertionError) as error:
        return f"{name} is {expression}, which can't be read: {one_line(error)[:160]}"
    accepted = [expected]
    if name in ("train", "trainval"):
        accepted.append(expected - task.left_out)
    if count in accepted:
        return None
    return f"{name}, {expression}, has {count:,} examples, not {expected:,}"


def open_part(name: str, task: Task, found: Found, split: str, labelled: bool = True) -> Source:
    """Opens a part of a task by its name, such as train800."""
    if split not in task.splits:
        raise UserError(f"{name} has no part {split!r}: choose one of {', '.join(task.splits)}")
    if found.state != "ready":
        raise UserError(
            f"{name} is not ready ({found.state}: {found.detail}): see `python -m vit_jax.vtab "
            "check`"
        )
    rule = tfds_labels.RULES.get(task.label) if labelled else tfds_labels.NO_LABEL
    if rule is None:
        rule = tfds_labels.of_feature(found.builder.info.features, task.label)
    rule = dataclasses.replace(rule, what=f"{task.label} {task.scale}")
    expression, _ = task.splits[split]
    return tfds_source.Records(found.builder, name, expression, "image", rule, task.scale)
