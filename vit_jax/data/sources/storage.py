"""Bytes of files: on local disks by the operating system, elsewhere (gs://) by TensorFlow's file
systems.
"""

import os
import socket
from collections.abc import Iterator

from vit_jax.errors import UserError, one_line


def is_local(path: str) -> bool:
    return "://" not in path


def file_systems():
    """TensorFlow's file systems; imported only for what is not local."""
    from tensorflow.io import gfile

    return gfile


def exists(path: str) -> bool:
    return os.path.exists(path) if is_local(path) else file_systems().exists(path)


def is_folder(path: str) -> bool:
    return os.path.isdir(path) if is_local(path) else file_systems().isdir(path)


def read(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


def open_file(path: str):
    """A binary file to read, with seek and tell."""
    return open(path, "rb") if is_local(path) else file_systems().GFile(path, "rb")


def read_range(path: str, position: int, length: int) -> bytes:
    """`length` bytes from `position` on. Keeps no file open: ImageNet alone has over 1,024 shards."""
    if not is_local(path):
        with open_file(path) as file:
            file.seek(position)
            return file.read(length)
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, length, position)
    finally:
        os.close(handle)


def stamp(path: str) -> tuple[int, int]:
    """(size in bytes, time of the last change in nanoseconds): another one means another content."""
    found = os.stat(path) if is_local(path) else file_systems().stat(path)
    return (
        (found.st_size, found.st_mtime_ns) if is_local(path) else (found.length, found.mtime_nsec)
    )


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(folder, names of folders in it, names of files in it) for a folder and all below it, in
    sorted order.

    Hidden names are left out. Links to folders are followed.
    """
    if not is_local(path):
        for folder, folders, files in file_systems().walk(path):
            hidden = any(part.startswith(".") for part in folder.removeprefix(path).split("/"))
            if not hidden:
                clean = sorted(name.rstrip("/") for name in folders if name[0] != ".")
                yield folder.rstrip("/"), clean, sorted(name for name in files if name[0] != ".")
        return
    for folder, _, folders, files in walk_local(path):
        yield folder, folders, files


def walk_local(path: str, above: tuple = ()) -> Iterator[tuple[str, int, list[str], list[str]]]:
    """Like `walk`, with the time of the last change of each folder, taken before it is listed.

    Raises:
      UserError: a folder can't be read, a link leads nowhere, or links go round in a circle.
    """
    try:
        status = os.stat(path)
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"folder {path} can't be listed ({error.strerror}): make it readable or remove it"
        ) from None
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise UserError(f"folder {path} is a link to a folder that it is in: remove it")
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise UserError(f"{entry.path} is a link that leads nowhere: mend or remove it")
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    yield (
        path,
        status.st_mtime_ns,
        folders,
        sorted(entry.name for entry in entries if not entry.is_dir()),
    )
    for name in folders:
        yield from walk_local(os.path.join(path, name), (*above, identity))


def must_be_reachable(path: str) -> None:
    """Raises UserError at once where a store can't be reached, which its own client tries for
    minutes.
    """
    try:
        socket.create_connection(("storage.googleapis.com", 443), timeout=5).close()
    except OSError as error:
        raise UserError(f"{path} can't be reached ({one_line(error)}): check the network") from None


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if is_local(path) else path.rstrip("/")


def must_exist(path: str, what: str, do: str) -> None:
    """Raises UserError "WHAT PATH does not exist: DO", also for a store that can't be reached."""
    try:
        if exists(path):
            return
    except Exception as error:  # every store has errors of its own
        raise UserError(f"{what} {path} can't be reached ({one_line(error)[:160]}): {do}") from None
    raise UserError(f"{what} {path} does not exist: {do}")
