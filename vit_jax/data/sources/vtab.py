"""Opens the parts of a task of `data.tasks`, and says what is wrong where they are not as its table
has them.
"""

import dataclasses
import os

from vit_jax.data.sources import storage, tfds_labels
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.vtab_tasks import Task
from vit_jax.errors import UserError, one_line

GENERATED = "generated"  # folder below a data_dir, and the file beside a data set, of pixels that we made up
STATES = ("ready", "missing", "manual", "wrong version", "wrong count", "missing files")


def generated_dir(data_dir: str) -> str:
    return os.path.join(data_dir or tfds_source.default_data_dir(), GENERATED)


@dataclasses.dataclass(frozen=True)
class Found:
    """What lies on disk for a task: one of `STATES`, and where that is "ready" a builder."""

    state: str
    detail: str
    builder: object = None

    @property
    def is_generated(self) -> bool:
        return storage.exists(os.path.join(os.fspath(self.builder.data_dir), f"{GENERATED}.json"))


def find(task: Task, data_dir: str) -> Found:
    """Looks for the data of a task.

    Raises:
      UserError: TFDS can't say, as where a dataset_info.json is damaged.
    """
    builders = []
    for version in task.versions:
        try:
            builders.append(tfds_source.open_builder(f"{task.builder}:{version}", data_dir))
        except UserError:  # TFDS opens a version that it has no code for only where it is prepared
            if version == task.versions[-1] and not builders:
                raise
    if ready := [builder for builder in builders if builder.info.splits]:
        return counted(task, ready[0])
    builder = builders[-1]
    versions = builder.data_dir_root / task.builder
    if others := sorted(path.parent.name for path in versions.glob("*/dataset_info.json")):
        wanted = " or ".join(task.versions)
        return Found(
            "wrong version",
            f"{', '.join(others)} of {task.builder} is there, not {wanted}",
            builder,
        )
    return Found(
        "manual" if builder.MANUAL_DOWNLOAD_INSTRUCTIONS else "missing",
        f"not in {builder.data_dir}",
        builder,
    )


def counted(task: Task, builder) -> Found:
    """Compares the number of examples of every part with the table, and looks for the files."""
    for name, (expression, wanted) in task.splits.items():
        try:
            count = builder.info.splits[expression].num_examples
        except (ValueError, KeyError, AssertionError) as error:
            return Found(
                "wrong count",
                f"{name} is {expression}, which can't be: {one_line(error)[:160]}",
                builder,
            )
        if count != wanted and not (
            count == wanted - task.left_out and name in ("train", "trainval")
        ):
            return Found(
                "wrong count",
                f"{name}, {expression}, has {count:,} examples, not {wanted:,}",
                builder,
            )
    files = [path for info in builder.info.splits.values() for path in info.filepaths]
    if missing := [path for path in files if not path.exists()]:
        return Found(
            "missing files", f"{len(missing)} of {len(files)}, the first is {missing[0]}", builder
        )
    return Found("ready", os.fspath(builder.data_dir), builder)


def open_part(name: str, task: Task, found: Found, split: str) -> Source:
    """Opens a part of a task by its name, as train800.

    Raises:
      UserError: it is not ready, or has no such part.
    """
    if split not in task.splits:
        raise UserError(f"{name} has no part {split!r}: choose of {', '.join(task.splits)}")
    if found.state != "ready":
        raise UserError(
            f"{name} is not ready ({found.state}: {found.detail}): see `python -m vit_jax.vtab "
            "check`"
        )
    rule = tfds_labels.RULES.get(task.label) or tfds_labels.of_feature(
        found.builder.info.features, task.label
    )
    rule = dataclasses.replace(rule, what=f"{task.label} {task.scale}")
    return tfds_source.open_split(
        found.builder, name, task.splits[split][0], "image", rule, task.scale
    )
