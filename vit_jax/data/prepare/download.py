"""Data sets that TFDS itself downloads and prepares; what stops that is said soon, and in one line."""

import logging
import os
import queue
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable

from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab_tasks
from vit_jax.errors import NegativeResult, UserError, one_line, storage_problem

log = logging.getLogger("vit_jax.data.prepare")

HOST_SECONDS = 10.0  # for any host to answer; TFDS alone would try for 3.5 minutes
# Without one of its files TFDS prepares a data set that lacks a split, and says so only in a
# warning.
MANUAL_FILES = {"imagenet2012": ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")}


def hosts_of(urls: Iterable[str]) -> list[tuple[str, int]]:
    """(host, port) of addresses, each once."""
    parts = [urllib.parse.urlsplit(url) for url in urls]
    ports = {"http": 80, "https": 443, "ftp": 21}
    return sorted(
        {(part.hostname, part.port or ports[part.scheme]) for part in parts if part.scheme in ports}
    )


def first_answer(hosts: list[tuple[str, int]]) -> tuple[str, int] | None:
    """The host that answers first, None where none does in time. In threads, for look-ups of names
    know no limit.
    """
    answers = queue.SimpleQueue()

    def ask(host: tuple[str, int]) -> None:
        try:
            socket.create_connection(host, HOST_SECONDS).close()
            answers.put(host)
        except OSError:
            answers.put(None)

    for host in hosts:
        threading.Thread(target=ask, args=(host,), daemon=True).start()
    end = time.monotonic() + HOST_SECONDS
    for _ in hosts:
        try:
            if host := answers.get(timeout=max(0.0, end - time.monotonic())):
                return host
        except queue.Empty:
            break
    return None


def check_network(builder, name: str) -> None:
    """Raises NegativeResult where no host of the data set answers and nothing has been downloaded
    earlier.
    """
    hosts = hosts_of(builder.url_infos or ())[:16]
    if not hosts or urllib.request.getproxies() or first_answer(hosts):
        return
    told, downloads = ", ".join(host for host, _ in hosts), builder.data_dir_root / "downloads"
    if any(downloads.glob("*.INFO")):
        log.warning(
            "%s can't be reached: trying with the files in %s, for up to 4 minutes", told, downloads
        )
        return
    raise NegativeResult(
        f"{name} can't be downloaded, {told} can't be reached from here: run this on a machine "
        f"with a network and copy {builder.data_path} here, or set HTTPS_PROXY"
    )


def check_manual(builder, name: str) -> None:
    """Raises NegativeResult where files are missing that the user has to fetch."""
    folder = builder.data_dir_root / "downloads" / "manual"
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    wanted = MANUAL_FILES.get(builder.name, ())
    if missing := [file for file in wanted if file not in there]:
        what = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in {folder}"
    elif not there:
        what = f"{folder} is empty or does not exist"
    else:
        return
    raise NegativeResult(
        f"{name} has files that you must fetch yourself, {what}: put them there; TFDS says: "
        f"{one_line(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)}"
    )


def fetch(builder, name: str) -> None:
    """Lets TFDS download and prepare, as array_record.

    Raises:
      UserError: the disk is full or can't be written.
      NegativeResult: anything else has stopped TFDS.
    """
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        builder.download_and_prepare(file_format="array_record")
    except Exception as error:  # a builder is code of others
        if problem := storage_problem(error):
            raise UserError(f"{problem}: make room, or choose another data.data_dir") from error
        manual = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
        hint = (
            f"the files that you fetched may lack one: {one_line(manual)}"
            if manual
            else "try again later"
        )
        raise NegativeResult(
            f"TFDS fails to prepare {name}: {type(error).__name__}: {one_line(error)[:300]}: {hint}"
        ) from error


def prepare_builder(builder, name: str) -> None:
    """Lets TFDS prepare what is not there yet, once it can be.

    Raises:
      UserError, NegativeResult: see `check_manual`, `check_network` and `fetch`.
    """
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        check_manual(builder, name)
    else:
        check_network(builder, name)
    log.info("TFDS prepares %s in %s", name, builder.data_path)
    fetch(builder, name)


def prepare(config, wanted: list[str]) -> dict:
    """Prepares `config.data` by TFDS; see `prepare.run`.

    Args:
      wanted: splits that it must have.
    """
    name, data_dir = config.data.name, config.data.data_dir
    if name.startswith(vtab_tasks.PREFIX):
        task = name.removeprefix(vtab_tasks.PREFIX)
        command = f"python -m vit_jax.vtab prepare --config=configs/vtab.py --tasks={task}"
        raise UserError(f"{name} is a task of VTAB, which another command prepares: {command}")
    builder = tfds_source.open_builder(name, data_dir)
    if is_new := not builder.info.splits:
        prepare_builder(builder, name)
    examples = {split: int(info.num_examples) for split, info in builder.info.splits.items()}
    status = "prepared" if is_new else "already prepared"
    if missing := [split for split in wanted if split not in examples]:
        raise NegativeResult(
            f"{name} is {status} in {builder.data_path}, but has no split {missing[0]!r}, only "
            f"{', '.join(examples)}: correct the config; if its files were incomplete, add them, "
            "delete the folder, and prepare again"
        )
    log.info(
        "%s in %s: %s",
        status,
        builder.data_path,
        ", ".join(f"{s} {n:,}" for s, n in examples.items()),
    )
    features = builder.info.features
    num_classes = features["label"].num_classes if "label" in features else 0
    use = [f"--config.data.name={name}"] + (
        [f"--config.data.data_dir={data_dir}"] if data_dir else []
    )
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
