"""Indices of data on disk that take long to build: arrays in the user's cache, used while the data
are unchanged.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from vit_jax.cli import regular
from vit_jax.distributed import runtime

log = logging.getLogger(__name__)

VERSION = 2  # of the meaning of the arrays; raise it when that changes


class Strings(Sequence):
    """Many strings in two arrays: a million file names take their bytes, not an object each."""

    def __init__(self, bytes_: np.ndarray, ends: np.ndarray):
        """`bytes_`: uint8, UTF-8 of all strings, concatenated; `ends`: int64, the end of each."""
        self.bytes = bytes_
        self.ends = ends

    @classmethod
    def pack(cls, strings: Iterable[str]) -> "Strings":
        encoded = [os.fsencode(string) for string in strings]  # also if it is not valid UTF-8
        return cls(
            np.frombuffer(b"".join(encoded), np.uint8),
            np.cumsum([len(e) for e in encoded], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i = int(i) % len(self)
        start = self.ends[i - 1] if i else 0
        return os.fsdecode(self.bytes[start : self.ends[i]].tobytes())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}.bytes": self.bytes, f"{name}.ends": self.ends}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], name: str) -> "Strings":
        return cls(arrays[f"{name}.bytes"], arrays[f"{name}.ends"])


def digest(*parts) -> str:
    """A fingerprint of arrays and strings."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(os.fsencode(part) if isinstance(part, str) else np.ascontiguousarray(part))
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def read(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """The arrays of a cache file, or None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        with regular.open_file(path) as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged zip fails in many ways
        log.warning(
            "the cache file %s is damaged (%s) and is made again", path, type(error).__name__
        )
        return None


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a cache file atomically; if it can't be written, the next start rebuilds the index."""
    # The folder may be shared by processes on several hosts.
    fresh = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            np.savez(file, **arrays)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        log.warning(
            "the index %s can't be saved (%s): set VIT_JAX_CACHE to a writable folder",
            path,
            error,
        )


def path_of(kind: str, where: str) -> pathlib.Path:
    return runtime.folder() / f"{kind}-{VERSION}-{digest(where)}.npz"


def forget(kind: str, where: str) -> None:
    """Removes the arrays of `cached`, so that the next start builds them again."""
    with contextlib.suppress(OSError):
        path_of(kind, where).unlink(missing_ok=True)


def cached(
    kind: str,
    where: str,
    build: Callable[[], dict[str, np.ndarray]],
    is_current: Callable[[dict], bool],
) -> dict[str, np.ndarray]:
    """The arrays that `build` makes of the data at `where`, saved and used again while
    `is_current(arrays)`.
    """
    path = path_of(kind, where)
    arrays = read(path)
    if arrays is not None:
        try:
            if is_current(arrays):
                return arrays
        # Files are missing, or the cache is of another version.
        except (KeyError, ValueError, OSError):
            pass
        log.info("%s has changed since it was indexed: the index is rebuilt", where)
    arrays = build()
    write(path, arrays)
    return arrays
