"""Weights from servers in the user's cache: a folder for each address, with the facts of every
complete file beside it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import pathlib
import re
import time
from collections.abc import Iterator

from vit_jax.distributed import runtime
from vit_jax.errors import UserError, one_line
from vit_jax.weights.formats.download import Absent, has_no_answer, shown
from vit_jax.weights.formats.transfer import ALGORITHMS, checksum, is_readable, read_facts, transfer

log = logging.getLogger(__name__)

POLL_S = 0.2  # while another process downloads the same


def folder_of(url: str) -> pathlib.Path:
    """The folder of the cache for what is at an address."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    label = re.sub(r"[^A-Za-z0-9._+-]", "_", url.rstrip("/").rpartition("/")[2])[-80:]
    return runtime.folder() / "weights" / f"{label}-{digest}"


@contextlib.contextmanager
def locked(folder: pathlib.Path, url: str) -> Iterator[None]:
    """Keeps other processes out of a folder of the cache; waits for one that is there."""
    with (folder / "lock").open("a") as file:
        is_waiting = False
        while not take(file):
            if not is_waiting:
                log.info("another process downloads %s: waiting for it", shown(url))
            is_waiting = True
            time.sleep(POLL_S)
        yield


def take(file) -> bool:
    """Locks an open file until it is closed, unless another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def cached(url: str, files: dict[str, str], temporary: pathlib.Path, ask: bool) -> pathlib.Path:
    """The folder with the files of an address.

    Args:
      url: what the user gave.
      files: name in the folder -> address, the weights last; the others may be absent.
      temporary: a folder for the files if the cache can't be used.
      ask: the server is asked whether it has other files now; else complete ones are taken.

    Raises:
      Absent, Unavailable, UserError: see `transfer`.
    """
    folder = folder_of(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, url):
            return current(folder, url, files, ask)
    except OSError as error:
        log.warning(
            "the cache %s can't be used (%s), so %s is not kept: set VIT_JAX_CACHE to another "
            "folder",
            *(folder, one_line(error), shown(url)),
        )
    return fetch_all(temporary, files)


def current(folder: pathlib.Path, url: str, files: dict[str, str], ask: bool) -> pathlib.Path:
    """`cached` in a folder that is locked."""
    weights = folder / list(files)[-1]
    if not ask and is_intact(weights, url):
        return folder
    try:
        return fetch_all(folder, files)
    except UserError as error:
        if not has_no_answer(error) or not is_intact(weights, url):
            raise
        log.warning("%s; using the copy in %s", error, folder)
    return folder


def fetch_all(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """Downloads files, but for those that are there and have not changed; all but the last may be
    absent.
    """
    weights = list(files)[-1]
    for name, address in files.items():
        target = folder / name
        try:
            fetch_one(address, target)
        except Absent:
            if name == weights:
                raise
            forget(target)
    return folder


def fetch_one(address: str, target: pathlib.Path) -> None:
    """Downloads a file unless the server still has the one that is here."""
    known = read_facts(facts_path(target)) if is_intact(target, address) else {}
    facts = transfer(address, target, known)
    if facts is None:
        return
    # What can't be read is downloaded again the next time; the reader says what is wrong with it.
    if is_readable(target, target.suffix):
        facts_path(target).write_text(json.dumps(facts))
    else:
        facts_path(target).unlink(missing_ok=True)


def facts_path(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f"{target.name}.facts")


def forget(target: pathlib.Path) -> None:
    for path in (target, facts_path(target)):
        path.unlink(missing_ok=True)


def is_intact(target: pathlib.Path, url: str) -> bool:
    """Whether a file is here as it was downloaded."""
    facts = read_facts(facts_path(target))
    if not facts or not target.exists():
        return False
    is_same = target.stat().st_size == facts.get("size") and facts.get("algorithm") in ALGORITHMS
    if is_same and checksum(target, facts["algorithm"]) == facts.get("checksum"):
        return True
    log.warning("the copy of %s in %s is damaged: downloading it again", shown(url), target)
    forget(target)
    return False
