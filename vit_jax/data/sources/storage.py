"""Files as data sets need them: local ones directly; of those on a store (gs://) the content by
`objects`, many requests at a time, and the rest by `epath`.

For local files `epath` is too slow here (8 us to ask whether a file exists and 12 us to read a
small one, 10 and 4 times what the operating system takes), and its times of change are whole
seconds.
"""

import contextlib
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from vit_jax.cli import objects, regular
from vit_jax.data.sources.object_file import ObjectFile
from vit_jax.errors import Unavailable, UserError, one_line, read_problem

ANSWER_S = 300  # until a request is given up, with all its repetitions
POLL_S = 0.5
CHECKED = 4  # files on a store whose changes are looked for at the start; others when they are read

Wait = Callable[[], tuple[bytes, tuple[int, int]]]  # for an answer: (content, stamp of the file)


class StoreError(UserError):
    """A store can't be read: no fault of the images on it."""


class StoreUnavailable(StoreError, Unavailable):
    """It does not answer, or can't for now."""


def is_local(path: str) -> bool:
    return "://" not in path


def on_store(path: str) -> epath.Path:
    try:
        return epath.Path(path)
    except KeyError:
        raise UserError(f"{path} is not on a known store: use a local path or gs://") from None


def absolute(path: str) -> str:
    if is_local(path):
        return os.path.abspath(os.path.expanduser(path))
    return path.rstrip("/")


def exists(path: str) -> bool:
    return os.path.exists(path) if is_local(path) else on_store(path).exists()


def is_folder(path: str) -> bool:
    return os.path.isdir(path) if is_local(path) else on_store(path).is_dir()


# If local files are to be read as if they were on a store: see simulated_store.py.
simulated = None


def is_distant(path: str) -> bool:
    """Whether a request takes so long that several must be under way at a time."""
    return simulated is not None or not is_local(path)


def request(path: str, start: int | None = None, stop: int | None = None) -> Wait:
    """Begins to read a range of a distant file; a negative `start` counts from its end."""
    if is_local(path):
        return simulated.request(path, start, stop)
    if not objects.is_object(path):
        raise UserError(f"{path} is not on a known store: use a local path or gs://")
    return functools.partial(answer, path, objects.read(path, start, stop))


def answer(path: str, future) -> tuple[bytes, tuple[int, int]]:
    """Waits for a future of `objects.read`: (content, stamp).

    Raises:
      StoreError: the object does not exist, or the store does not give it.
    """
    result = result_of(path, future, ANSWER_S)
    if result.state != "value":
        raise StoreError(f"{path} does not exist: correct the path, or prepare the data set again")
    return result.value, (generation(result), 0)


def result_of(path: str, future, seconds: float):
    """Waits for a future of `objects.read`, or raises StoreError."""
    end = time.monotonic() + seconds
    while not future.done() and time.monotonic() < end and not stopped.is_set():
        with contextlib.suppress(Exception):  # it is raised below
            future.result(timeout=POLL_S)
    try:
        return future.result(timeout=0)
    except Exception as error:  # of many types
        raise read_error(path, error) from None


stopped = threading.Event()


def stop_waiting() -> None:
    """Ends all waits for a store, because the process ends."""
    stopped.set()


def read_error(path: str, error: Exception) -> StoreError:
    """What is wrong, and what to do, from an error of `tensorstore`'s client."""
    text = re.sub(r" *\[http_response_body=.*?'\]", "", one_line(error))[:200]
    problem = f"{path} can't be read: "
    if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in text:
        problem += f"the store does not answer ({text or 'time-out'}): check the network"
        return StoreUnavailable(problem)
    if "PERMISSION_DENIED" in text or "UNAUTHENTICATED" in text:
        problem += f"the store refuses access ({text}): check the credentials and who may read it"
        return StoreError(problem)
    if "OUT_OF_RANGE" in text:
        problem += f"it is shorter than expected ({text}): it has changed or is damaged"
        return StoreError(problem)
    return StoreUnavailable(f"{problem}{text}: check the network and the store")


def generation(result) -> int:
    """A number that differs if the content of an object differs."""
    return int.from_bytes(hashlib.blake2b(result.stamp.generation, digest_size=7).digest())


def open_file(path: str):
    """A binary file to read, with seek and tell, in a `with` statement."""
    if is_local(path):
        return regular.open_file(path)
    return ObjectFile(size(path), functools.partial(request, path))


def read(path: str) -> bytes:
    return read_all([path])[0]


def read_all(paths: Sequence[str]) -> list[bytes]:
    """The contents of whole files; of those on a store all at once."""
    waits = [None if is_local(path) else request(path) for path in paths]
    return [
        wait()[0] if wait else read_local(path) for path, wait in zip(paths, waits, strict=True)
    ]


def read_local(path: str) -> bytes:
    with regular.open_file(path) as file:
        return file.read()


def read_range(path: str, position: int, length: int) -> bytes:
    """`length` bytes from `position` on. Keeps no file open: ImageNet alone has 1,024 shards."""
    if not is_local(path):
        return request(path, position, position + length)()[0]
    handle = regular.handle(path)
    try:
        return os.pread(handle, length, position)
    finally:
        os.close(handle)


def read_end(path: str, start: int) -> bytes:
    """The bytes from `start` to the end; a negative `start` counts from the end."""
    if not is_local(path):
        return request(path, start)()[0]
    length = size(path)
    first = start if start >= 0 else max(length + start, 0)
    return read_range(path, first, max(length - first, 0))


def size(path: str) -> int:
    """In bytes."""
    return os.stat(path).st_size if is_local(path) else on_store(path).stat().length


def stamp(path: str) -> tuple[int, int]:
    """Differs if the content of the file differs; see `stamps`."""
    return tuple(stamps([path])[0].tolist())


def first_changed(paths: Sequence[str], before: np.ndarray) -> str | None:
    """The first of local files that does not have its stamp of before; None if all have.

    Raises:
      UserError: the disk does not say.
    """
    for path, expected in zip(paths, before.tolist(), strict=True):
        try:
            if stamp(path) != tuple(expected):
                return path
        except OSError as error:
            problem = read_problem(path, error)
            if problem:
                raise problem from error
            return path
    return None


def stamps(paths: Sequence[str]) -> np.ndarray:
    """int64 [files, 2]: (size, time of the last change) of local files; (generation, 0) of objects
    on a store, with one request each, all at once.
    """
    waits = [None if is_local(path) else request(path, 0, 0) for path in paths]
    found = []
    for path, wait in zip(paths, waits, strict=True):
        if wait:
            found.append(wait()[1])
        else:
            status = os.stat(path)
            found.append((status.st_size, status.st_mtime_ns))
    return np.asarray(found, np.int64).reshape(-1, 2)


def are_unchanged(paths: Sequence[str], before: np.ndarray) -> bool:
    """Whether files have the `stamps` of before; on a store only `CHECKED` of them are looked at.

    `Spans` checks the others when it reads them, without further requests.
    """
    if len(before) != len(paths):
        return False
    chosen = np.arange(len(paths))
    if len(paths) and not is_local(paths[0]):
        chosen = np.unique(np.linspace(0, len(paths) - 1, CHECKED).astype(int))
    return np.array_equal(stamps([paths[i] for i in chosen]), before[chosen])


def missing(paths: Sequence[str]) -> list[int]:
    """The numbers of those files that do not exist; a folder on a store is listed once."""
    listed = {}

    def is_there(path: str) -> bool:
        if is_local(path):
            return os.path.exists(path)
        folder, _, name = path.rpartition("/")
        if folder not in listed:
            listed[folder] = {each.name for each in on_store(folder).iterdir()}
        return name in listed[folder]

    return [number for number, path in enumerate(paths) if not is_there(path)]


@functools.cache
def must_be_reachable(path: str) -> None:
    """Raises UserError, soon, if `path` is on a store that can't be read."""
    objects.must_be_reachable(path, path)


def must_exist(path: str, what: str, do: str) -> None:
    """Raises UserError "WHAT PATH does not exist: DO", or if its store can't be reached."""
    try:
        if exists(path):
            return
    except Exception as error:  # each store has its own
        raise UserError(f"{what} {path} can't be reached ({one_line(error)[:160]}): {do}") from None
    raise UserError(f"{what} {path} does not exist: {do}")
