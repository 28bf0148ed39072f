"""Writes a data set as TFDS would: DIR/NAME/1.0.0 with array_record shards, a fixed random order,
metadata last.

All is written to DIR/NAME/.1.0.0.preparing, which gets its real name at the end: a data set that is
not whole is not there for readers. A shard is written under a temporary name and renamed; the same
command leaves out those that are done, and ends with the same bytes, whatever the number of
workers.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from vit_jax.data.prepare.shards import (
    ORDER_SEED,
    Corrupt,
    Examples,
    order,
    refuse_or_skip,
    write_json,
    write_shards,
)
from vit_jax.errors import NegativeResult, UserError, one_line, storage_problem

log = logging.getLogger("vit_jax.data.prepare")

VERSION = "1.0.0"
SHARD_BYTES = 512 << 20
# A smaller data set gets more shards than its size needs, so that many workers have some: up to 64,
# of 16 MiB or more.
MANY_SHARDS, MIN_SHARD_BYTES = 64, 16 << 20
SAMPLE = 64  # examples from which the size of the data set is estimated


@dataclasses.dataclass(frozen=True)
class Target:
    """The data set to write. `origin`, what it is made of and how, is plain JSON and kept beside
    the shards.
    """

    name: str
    data_dir: str
    class_names: Sequence[str]  # () where classes have only numbers
    num_classes: int
    origin: dict

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.data_dir) / self.name / VERSION

    @property
    def staging(self) -> pathlib.Path:
        return self.folder.with_name(f".{VERSION}.preparing")

    def shards(self, split: str, count: int) -> list[pathlib.Path]:
        return shard_paths(self.staging, self.name, split, count)


def shard_paths(folder: pathlib.Path, name: str, split: str, count: int) -> list[pathlib.Path]:
    """As TFDS names them."""
    return [folder / f"{name}-{split}.array_record-{i:05}-of-{count:05}" for i in range(count)]


def number_of_shards(examples: Examples, skip_corrupt: bool) -> int:
    """By the size of a sample, so the same for all workers."""
    sample = order(examples.count)[:SAMPLE].tolist()
    size = 0
    for i in sample:
        try:
            size += len(examples.read(i)[0])
        except Corrupt as error:
            refuse_or_skip(examples, i, error, skip_corrupt)
    total = size / len(sample) * examples.count
    wanted = max(-(-total // SHARD_BYTES), min(MANY_SHARDS, total // MIN_SHARD_BYTES))
    return int(min(max(wanted, 1), examples.count))


def inputs_of(target: Target, splits: Mapping[str, Examples]) -> dict:
    """All that the bytes of the data set depend on; the order is that of `ORDER_SEED`."""
    sources = {split: [examples.count, examples.fingerprint] for split, examples in splits.items()}
    return dict(origin=target.origin, splits=sources, order_seed=ORDER_SEED)


def plan(target: Target, splits: Mapping[str, Examples], skip_corrupt: bool) -> dict[str, int]:
    """The number of shards by split; that of an earlier attempt, if there is one.

    Raises:
      UserError: the earlier attempt was made of something else.
    """
    path, inputs = target.staging / "plan.json", inputs_of(target, splits)
    if path.exists():
        found = json.loads(path.read_text())
        if found["inputs"] != inputs:
            raise UserError(
                f"{target.staging} holds an unfinished data set made of other data or settings: "
                "run its command again, choose another --name, or delete the folder"
            )
        log.info("continuing in %s", target.staging)
        return found["shards"]
    shards = {split: number_of_shards(examples, skip_corrupt) for split, examples in splits.items()}
    write_json(path, dict(inputs=inputs, shards=shards))
    return shards


def dataset_info(target: Target, results: Mapping[str, list[dict]]):
    """What TFDS needs to know."""
    import tensorflow_datasets as tfds

    folder = os.fspath(target.staging)
    named = (
        dict(names=list(target.class_names))
        if target.class_names
        else dict(num_classes=target.num_classes)
    )
    features = dict(
        image=tfds.features.Image(shape=(None, None, 3)), label=tfds.features.ClassLabel(**named)
    )
    info = tfds.core.DatasetInfo(
        builder=tfds.core.dataset_info.DatasetIdentity(
            name=target.name, version=tfds.core.Version(VERSION), data_dir=folder, module_name=""
        ),
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
        description=f"Written by python -m vit_jax.data prepare; see prepared.json. {json.dumps(target.origin)[:1000]}",
    )
    info.set_file_format("array_record")
    info.set_splits(split_dict(target.staging, target.name, results))
    return info


def split_dict(folder: pathlib.Path, name: str, results: Mapping[str, list[dict]]):
    """What TFDS needs to know of the shards in a folder; `results`: split -> {"examples": count} by
    shard.
    """
    import tensorflow_datasets as tfds

    splits = []
    for split, parts in results.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=os.fspath(folder),
            dataset_name=name,
            split=split,
            filetype_suffix="array_record",
        )
        size = sum(path.stat().st_size for path in shard_paths(folder, name, split, len(parts)))
        lengths = [part["examples"] for part in parts]
        splits.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=lengths, num_bytes=size, filename_template=template
            )
        )
    return tfds.core.SplitDict(splits)


def finish(
    target: Target, splits: Mapping[str, Examples], results: Mapping[str, list[dict]]
) -> dict:
    """Writes the metadata, and gives the folder its name. Returns what prepared.json says.

    Raises:
      NegativeResult: every image of a split is corrupt.
    """
    counts = {split: sum(part["examples"] for part in parts) for split, parts in results.items()}
    if empty := [split for split, count in counts.items() if not count]:
        raise NegativeResult(f"not one image of {empty[0]} can be read: look at the data")
    skipped = [name for parts in results.values() for part in parts for name in part["skipped"]]
    summary = dict(inputs=inputs_of(target, splits), examples=counts, skipped=skipped)
    write_json(target.staging / "prepared.json", summary)
    dataset_info(target, results).write_to_directory(target.staging)
    for path in [
        *target.staging.glob("*array_record*.json"),
        target.staging / "plan.json",
        target.staging / "lock",
    ]:
        path.unlink(missing_ok=True)
    target.staging.rename(target.folder)
    return summary


def check(target: Target, splits: Mapping[str, Examples]) -> None:
    """Raises UserError for what TFDS could not read."""
    if "://" in target.data_dir:
        raise UserError(
            f"{target.data_dir} is no local folder: prepare on a local disk, then copy the folder "
            "there"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", target.name):
        raise UserError(
            f"--name={target.name!r} must be lower-case letters, digits and _: choose another"
        )
    if bad := [split for split in splits if not re.fullmatch(r"[A-Za-z0-9_]+", split)]:
        raise UserError(
            f"split {bad[0]!r} can't be named so by TFDS: rename it in letters, digits and _"
        )
    if bad := [
        name for name in target.class_names if name != name.strip() or not name or "\n" in name
    ]:
        raise UserError(
            f"class {bad[0]!r} has white space at its ends or is empty, which TFDS loses: rename it"
        )


@contextlib.contextmanager
def locked(target: Target):
    """One process writes at a time."""
    try:
        target.staging.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as below /proc
        raise UserError(
            f"{target.staging} can't be made ({error.strerror}): choose another --out"
        ) from None
    with (target.staging / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {target.staging}: wait for it, or end it"
            ) from None
        except OSError as error:
            log.warning(
                "%s can't be locked (%s): start no second process there",
                target.staging,
                one_line(error),
            )
        yield


def read_summary(target: Target) -> dict:
    """What prepared.json of the finished data set says.

    Raises:
      UserError: there is none, so it is not ours.
    """
    path = target.folder / "prepared.json"
    if not path.exists():
        raise UserError(
            f"{target.folder} exists, and is not written by prepare: choose another --name, or "
            "delete it"
        )
    return json.loads(path.read_text())


def already(target: Target, splits: Mapping[str, Examples]) -> dict:
    """Like `read_summary`; a data set that was made of something else is a UserError."""
    found = read_summary(target)
    if found["inputs"] != inputs_of(target, splits):
        raise UserError(
            f"{target.folder} exists, and was made of other data or settings: choose another "
            "--name, or delete it"
        )
    return found


def write(
    target: Target, splits: Mapping[str, Examples], skip_corrupt: bool, workers: int
) -> tuple[bool, dict]:
    """Writes a data set, or continues it: (whether there was something to do, what prepared.json
    says).

    Raises:
      UserError: an image is corrupt; the disk is full or can't be written; other data lie there.
    """
    check(target, splits)
    try:
        if target.folder.exists():
            return False, already(target, splits)
        with locked(target):
            shards = plan(target, splits, skip_corrupt)
            paths = {split: target.shards(split, count) for split, count in shards.items()}
            results = write_shards(splits, paths, skip_corrupt, workers)
            return True, finish(target, splits, results)
    except (OSError, RuntimeError) as error:
        if (problem := storage_problem(error)) is None:
            raise
        raise UserError(
            f"{problem} while writing below {target.data_dir}: mend it and run the same command "
            "again, which continues, or choose another folder"
        ) from error
