"""Files that must be regular ones: opening a FIFO waits for another process, a device may never
end, and a library that opens one by its name can't be stopped.
"""

import os
import stat

from etils import epath

from vit_jax.errors import UserError

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class NotRegular(UserError):
    """A path is a FIFO, a device or a socket, or a link to one."""


def check_mode(path, mode: int) -> None:
    """Raises NotRegular unless `mode`, of a stat, is that of a file or folder."""
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind:
        raise NotRegular(f"{path} is {kind}, not a regular file: choose another, or move it away")


def check(path) -> None:
    """Raises NotRegular for what exists and is neither a file nor a folder; stores have neither."""
    if "://" in str(path):
        return
    try:
        mode = os.stat(path).st_mode
    except OSError:  # whoever opens it says so
        return
    check_mode(path, mode)


def check_folder(folder) -> None:
    """`check` for everything directly in a folder, if there is one."""
    if "://" in str(folder):
        return
    try:
        entries = list(os.scandir(folder))
    except OSError:  # whoever opens it says so
        return
    for entry in entries:
        if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False):
            check(entry.path)


def check_below(folder) -> None:
    """`check` for all files below a folder, if there is one."""
    for path, _, names in () if "://" in str(folder) else os.walk(folder):
        for name in names:
            check(os.path.join(path, name))


def handle(path, flags: int = os.O_RDONLY) -> int:
    """A file descriptor, as the `opener` of `open`.

    Raises:
      NotRegular, OSError
    """
    try:
        # Has no effect on files, and does not wait for the writer of a FIFO.
        opened = os.open(path, flags | os.O_NONBLOCK)
    except OSError:
        check(path)  # a socket can't be opened
        raise
    try:
        check_mode(path, os.fstat(opened).st_mode)
    except NotRegular:
        os.close(opened)
        raise
    return opened


def open_file(path):
    """A file to read, binary, also on a store.

    Raises:
      NotRegular, OSError, or errors of the store
    """
    if "://" in str(path):
        return epath.Path(path).open("rb")
    return open(path, "rb", opener=handle)


def read_text(path) -> str:
    """The text of a file in UTF-8; raises what `open_file` does, and UnicodeDecodeError."""
    with open_file(path) as file:
        return file.read().decode()
