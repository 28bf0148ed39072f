"""Lets TFDS download and prepare a data set; failures are one line that says what to do."""

import logging
import os
import sys

from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab_tasks
from vit_jax.errors import NegativeResult, UserError, one_line, storage_problem

log = logging.getLogger("vit_jax.data.prepare")

# If one of these is missing, TFDS prepares a data set that lacks a split, with only a warning.
MANUAL_FILES = {"imagenet2012": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")}


def check_manual(builder, name: str) -> None:
    """Raises NegativeResult if files are missing that the user has to download."""
    folder = builder.data_dir_root / "downloads" / "manual"
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    missing = [file for file in MANUAL_FILES.get(builder.name, ()) if file not in names]
    if names and not missing:
        return
    problem = f"{folder} is empty or does not exist"
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        problem = f"{' and '.join(missing)} {verb} not in {folder}"
    raise NegativeResult(
        f"{name} has files that you must download yourself, {problem}: put them there; TFDS says: "
        f"{one_line(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)}"
    )


def fetch(builder, name: str) -> None:
    """Lets TFDS download and prepare, as array_record."""
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        builder.download_and_prepare(file_format="array_record")
    except Exception as error:  # builders are third-party code
        problem = storage_problem(error)
        if problem:
            raise UserError(f"{problem}: make room, or choose another data.data_dir") from error
        hint = (
            "try again later, or, if this machine has no network, prepare it on another one and "
            f"copy {builder.data_path} here"
        )
        if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
            instructions = one_line(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
            hint = f"one of the files that you downloaded may be missing: {instructions}"
        raise NegativeResult(
            f"TFDS fails to prepare {name}: {type(error).__name__}: {one_line(error)[:300]}: {hint}"
        ) from error


def prepare_builder(builder, name: str) -> None:
    """Lets TFDS prepare a data set that is missing."""
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        check_manual(builder, name)
    log.info("TFDS prepares %s in %s", name, builder.data_path)
    fetch(builder, name)


def prepare(config, splits: list[str]) -> dict:
    """Prepares `config.data` with TFDS and returns the report of `vit_jax.data prepare`.

    Args:
      splits: those that it must have.
    """
    name, data_dir = config.data.name, config.data.data_dir
    if name.startswith(vtab_tasks.PREFIX):
        task = name.removeprefix(vtab_tasks.PREFIX)
        command = f"python -m vit_jax.vtab prepare --config=configs/vtab.py --tasks={task}"
        raise UserError(f"{name} is a task of VTAB, which another command prepares: {command}")
    builder = tfds_source.open_builder(name, data_dir)
    status = "already prepared"
    if not builder.info.splits:
        prepare_builder(builder, name)
        status = "prepared"
    examples = {split: int(info.num_examples) for split, info in builder.info.splits.items()}
    missing = [split for split in splits if split not in examples]
    if missing:
        raise NegativeResult(
            f"{name} is {status} in {builder.data_path}, but has no split {missing[0]!r}, only "
            f"{', '.join(examples)}: correct the config; if its files were incomplete, add them, "
            "delete the folder, and prepare again"
        )
    counts = ", ".join(f"{split} {count:,}" for split, count in examples.items())
    log.info("%s in %s: %s", status, builder.data_path, counts)
    features = builder.info.features
    num_classes = features["label"].num_classes if "label" in features else 0
    use = [f"--config.data.name={name}"]
    if data_dir:
        use.append(f"--config.data.data_dir={data_dir}")
    return dict(
        status=status,
        name=name,
        data_dir=os.fspath(builder.data_dir_root),
        folder=os.fspath(builder.data_path),
        num_classes=num_classes,
        examples=examples,
        skipped=[],
        use=use,
    )
