"""A file that a flag such as --json names: checked before the work begins, written when it is done."""

import json

from etils import epath

from vit_jax.errors import UserError


def check(path: str | None, flag: str = "--json") -> None:
    """Raises UserError where `path` is a folder or lies in none; without a path there is nothing to check."""
    if path and not epath.Path(path).parent.is_dir():
        raise UserError(f"the folder of {flag}={path} does not exist: create it or choose another file")
    if path and epath.Path(path).is_dir():
        raise UserError(f"{flag}={path} is a folder: choose a file")


def replace(path: epath.Path, text: str) -> None:
    """Writes a file at once or not at all."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def write(path: str | None, result) -> None:
    """Writes a result, if there is a path for it.

    Raises:
      UserError: it can't be written.
    """
    if not path:
        return
    try:
        epath.Path(path).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json={path} can't be written ({error.strerror}): choose another file") from error
