"""The folder that --out names, for a command that writes several files."""

import errno
import pathlib
import tempfile

from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line

REASONS = {errno.EEXIST: "it is a file", errno.ENOTDIR: "a part of the path is a file"}


def write_error(folder: str, error: OSError) -> UserError:
    reason = REASONS.get(error.errno) or error.strerror or one_line(error)
    return UserError(f"--out={folder} can't be written ({reason}): choose another folder")


def make(folder: str) -> None:
    """Creates the folder, if need be; a store needs none.

    Raises:
      UserError: nothing can be written there.
    """
    objects.must_be_reachable(folder, f"--out={folder}")
    if "://" in folder:
        return
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise write_error(folder, error) from None
