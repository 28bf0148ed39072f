"""Writes a data set as TFDS would: DIR/NAME/1.0.0 with array_record shards, in a fixed random
order, and metadata.

Everything is written to DIR/NAME/.1.0.0.preparing, which is renamed at the end, so that readers
never see an incomplete data set. A shard is written under a temporary name and renamed; the same
command skips finished shards and gives the same bytes, for any number of workers.
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

from vit_jax.cli import regular
from vit_jax.data.prepare.shards import (
    ORDER_SEED,
    Reader,
    order,
    write_json,
    write_shards,
)
from vit_jax.data.sources.source import Source
from vit_jax.errors import NegativeResult, UserError, one_line, storage_problem

log = logging.getLogger("vit_jax.data.prepare")

VERSION = "1.0.0"
SHARD_BYTES = 512 << 20
# A smaller data set gets up to 64 shards of at least 16 MiB, so that many workers can share it.
MANY_SHARDS = 64
MIN_SHARD_BYTES = 16 << 20
SAMPLE = 64  # examples from which the size of the data set is estimated


@dataclasses.dataclass(frozen=True)
class Target:
    """The data set to write. `origin`: what it is made from and how, JSON that is saved with it."""

    name: str
    data_dir: str
    class_names: Sequence[str]  # () if classes have only numbers
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


def number_of_shards(source: Source, reader: Reader) -> int:
    """By the size of a sample, so it does not depend on the number of workers."""
    sample = order(len(source))[:SAMPLE].tolist()
    examples = [reader.read(source, i) for i in sample]
    size = sum(len(example[0]) for example in examples if example)
    total = size / len(sample) * len(source)
    shards = max(-(-total // SHARD_BYTES), min(MANY_SHARDS, total // MIN_SHARD_BYTES))
    return int(min(max(shards, 1), len(source)))


def inputs_of(target: Target, splits: Mapping[str, Source]) -> dict:
    """Everything that the bytes of the data set depend on."""
    sources = {split: [len(source), source.fingerprint] for split, source in splits.items()}
    return dict(origin=target.origin, splits=sources, order_seed=ORDER_SEED)


def plan(target: Target, splits: Mapping[str, Source], reader: Reader) -> dict[str, int]:
    """The number of shards by split; that of an earlier attempt, if there is one."""
    path = target.staging / "plan.json"
    inputs = inputs_of(target, splits)
    if path.exists():
        found = json.loads(path.read_text())
        if found["inputs"] != inputs:
            raise UserError(
                f"{target.staging} is an unfinished data set made from other data or settings: "
                "run its command again, choose another --name, or delete the folder"
            )
        log.info("continuing in %s", target.staging)
        return found["shards"]
    shards = {split: number_of_shards(source, reader) for split, source in splits.items()}
    write_json(path, dict(inputs=inputs, shards=shards))
    return shards


def dataset_info(target: Target, results: Mapping[str, list[dict]]):
    """The metadata for TFDS."""
    import tensorflow_datasets as tfds

    features = dict(image=tfds.features.Image(shape=(None, None, 3)))
    if target.class_names:
        features["label"] = tfds.features.ClassLabel(names=list(target.class_names))
    elif target.num_classes:
        features["label"] = tfds.features.ClassLabel(num_classes=target.num_classes)
    folder = os.fspath(target.staging)
    origin = json.dumps(target.origin)[:1000]
    info = tfds.core.DatasetInfo(
        builder=tfds.core.dataset_info.DatasetIdentity(
            name=target.name, version=tfds.core.Version(VERSION), data_dir=folder, module_name=""
        ),
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label") if target.num_classes else None,
        description=f"Written by python -m vit_jax.data prepare; see prepared.json. {origin}",
    )
    info.set_file_format("array_record")
    info.set_splits(split_dict(target.staging, target.name, results))
    return info


def split_dict(folder: pathlib.Path, name: str, results: Mapping[str, list[dict]]):
    """The metadata of the shards in a folder for TFDS; `results`: split -> {"examples": count} by
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


def finish(target: Target, splits: Mapping[str, Source], results: Mapping[str, list[dict]]) -> dict:
    """Writes the metadata and renames the folder. Returns the content of prepared.json."""
    counts = {split: sum(part["examples"] for part in parts) for split, parts in results.items()}
    for split, count in counts.items():
        if not count:
            raise NegativeResult(f"no image of {split} can be read: check the data")
    skipped = [name for parts in results.values() for part in parts for name in part["skipped"]]
    summary = dict(inputs=inputs_of(target, splits), examples=counts, skipped=skipped)
    write_json(target.staging / "prepared.json", summary)
    dataset_info(target, results).write_to_directory(target.staging)
    temporary = [*target.staging.glob("*array_record*.json")]
    for path in [*temporary, target.staging / "plan.json", target.staging / "lock"]:
        path.unlink(missing_ok=True)
    target.staging.rename(target.folder)
    return summary


def check(target: Target, splits: Mapping[str, Source]) -> None:
    """Raises UserError for names that TFDS could not read."""
    if "://" in target.data_dir:
        raise UserError(
            f"{target.data_dir} is not a local folder: prepare on a local disk, then copy the "
            "folder there"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", target.name):
        raise UserError(
            f"--name={target.name!r} must be lower-case letters, digits and _: choose another"
        )
    for split in splits:
        if not re.fullmatch(r"[A-Za-z0-9_]+", split):
            raise UserError(
                f"split {split!r} is not a name that TFDS allows: rename it to letters, digits and "
                "_"
            )
    for name in target.class_names:
        if name != name.strip() or not name or "\n" in name:
            raise UserError(
                f"class {name!r} is empty, has white space at its ends or several lines, which "
                "TFDS does not preserve: rename it"
            )


@contextlib.contextmanager
def locked(target: Target):
    """Lets only one process write at a time."""
    try:
        target.staging.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # such as below /proc
        raise UserError(
            f"{target.staging} can't be created ({error.strerror}): choose another --out"
        ) from None
    with (target.staging / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing {target.staging}: wait for it, or stop it"
            ) from None
        except OSError as error:
            log.warning(
                "%s can't be locked (%s): do not start a second process there",
                target.staging,
                one_line(error),
            )
        yield


def read_summary(target: Target) -> dict:
    """The content of prepared.json of the finished data set."""
    path = target.folder / "prepared.json"
    if not path.exists():
        raise UserError(
            f"{target.folder} exists, but was not written by prepare: choose another --name, or "
            "delete it"
        )
    return json.loads(path.read_text())


def already(target: Target, splits: Mapping[str, Source]) -> dict:
    """Like `read_summary`; UserError if the data set was made from other data or settings."""
    found = read_summary(target)
    if found["inputs"] != inputs_of(target, splits):
        raise UserError(
            f"{target.folder} exists, but was made from other data or settings: choose another "
            "--name, or delete it"
        )
    return found


def write(
    target: Target, splits: Mapping[str, Source], reader: Reader, workers: int
) -> tuple[bool, dict]:
    """Writes a data set, or continues it.

    Returns:
      whether anything was written, content of prepared.json.
    """
    check(target, splits)
    regular.check_below(target.folder.parent)
    try:
        if target.folder.exists():
            return False, already(target, splits)
        with locked(target):
            shards = plan(target, splits, reader)
            paths = {split: target.shards(split, count) for split, count in shards.items()}
            results = write_shards(splits, paths, reader, workers)
            return True, finish(target, splits, results)
    except (OSError, RuntimeError) as error:
        if (problem := storage_problem(error)) is None:
            raise
        raise UserError(
            f"{problem} while writing below {target.data_dir}: fix it and run the same command "
            "again, which continues, or choose another folder"
        ) from error
