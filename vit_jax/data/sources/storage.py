"""Files as data sets need them: local ones directly, those on a store (gs://) by `epath`.

For local files `epath` is too slow here (8 us to ask whether a file exists and 12 us to read a
small one, 10 and 4 times what the operating system takes), and its times of change are whole
seconds.
"""

import os
import socket
from collections.abc import Iterator

from etils import epath

from vit_jax.errors import UserError, one_line


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


def open_file(path: str):
    """A binary file to read, with seek and tell, in a `with` statement."""
    return open(path, "rb") if is_local(path) else on_store(path).open("rb")


def read(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


def read_range(path: str, position: int, length: int) -> bytes:
    """`length` bytes from `position` on. Keeps no file open: ImageNet alone has 1,024 shards."""
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
    """(size in bytes, time of the last change); differs if the content differs."""
    if is_local(path):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    found = on_store(path).stat()
    return found.length, found.mtime


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(folder, names of its folders, names of its files) for a folder and all below it, sorted.

    Leaves out hidden names and follows links to folders.
    """
    if is_local(path):
        for folder, _, folders, files in walk_local(path):
            yield folder, folders, files
        return
    for found, folders, files in on_store(path).walk():
        folder = os.fspath(found)
        if any(part.startswith(".") for part in folder.removeprefix(path).split("/")):
            continue
        visible = sorted(name.rstrip("/") for name in folders if name[0] != ".")
        yield folder, visible, sorted(name for name in files if name[0] != ".")


def walk_local(path: str, above: tuple = ()) -> Iterator[tuple[str, int, list[str], list[str]]]:
    """Like `walk`, with the time of the last change of each folder (ns), read before its names."""
    try:
        status = os.stat(path)
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"folder {path} can't be listed ({error.strerror}): make it readable or remove it"
        ) from None
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise UserError(f"folder {path} is a link to a folder that contains it: remove it")
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise UserError(f"{entry.path} is a broken link: fix or remove it")
    folders = sorted(entry.name for entry in entries if entry.is_dir())
    files = sorted(entry.name for entry in entries if not entry.is_dir())
    yield path, status.st_mtime_ns, folders, files
    for name in folders:
        yield from walk_local(os.path.join(path, name), (*above, identity))


def must_be_reachable(path: str) -> None:
    """Raises UserError within seconds if gs:// can't be reached; its client tries for minutes."""
    try:
        socket.create_connection(("storage.googleapis.com", 443), timeout=5).close()
    except OSError as error:
        raise UserError(f"{path} can't be reached ({one_line(error)}): check the network") from None


def must_exist(path: str, what: str, do: str) -> None:
    """Raises UserError "WHAT PATH does not exist: DO", or if its store can't be reached."""
    try:
        if exists(path):
            return
    except Exception as error:  # each store has its own
        raise UserError(f"{what} {path} can't be reached ({one_line(error)[:160]}): {do}") from None
    raise UserError(f"{what} {path} does not exist: {do}")
