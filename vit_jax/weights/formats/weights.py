"""Loaded weights: parameters by published name, and the model that they are for."""

import contextlib
import dataclasses
import difflib

import numpy as np

from vit_jax.errors import UserError, read_problem

POSEMB = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_0"
MLP = f"{BLOCK}/MlpBlock_3"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters by published name, not stacked, and the model that they are for."""

    params: dict[str, np.ndarray]
    fields: dict  # constructor arguments of the model
    class_names: tuple[str, ...] = ()
    loss: str = ""  # of their training, if it is known
    format: str = "ours"
    # Published name -> name in the file.
    file_names: dict[str, str] = dataclasses.field(default_factory=dict)
    path: str = ""  # they were read from here, as messages name it
    step: int | None = None  # of a checkpoint of ours
    objective: str = ""  # of their training, if it is known
    settings: dict = dataclasses.field(default_factory=dict)  # its keys of a config
    # What it trained besides the model, by name.
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def naming(path):
    """Adds the path to every UserError raised inside that does not have it; `path` may be empty.

    An OSError that says that it can't be read becomes a UserError, too.
    """
    try:
        yield
    except OSError as error:
        problem = read_problem(path, error)
        if problem is None:
            raise
        raise problem from error
    except UserError as error:
        if not path or str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def nearest(name: str, names) -> str:
    """ "; the nearest name is X", or "" if no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest name is {close[0]}" if close else ""


def rename(arrays: dict, our_name, path) -> tuple[dict, dict]:
    """(arrays by our names, names in the file by our names)."""
    params = {}
    file_names = {}
    for name, value in arrays.items():
        ours = our_name(name)
        if ours in params:
            raise UserError(
                f"{path} has both {file_names[ours]} and {name}, which are one parameter: fetch it "
                "again"
            )
        params[ours] = value
        file_names[ours] = name
    return params, file_names


def in_file(name: str, file_names: dict[str, str]) -> str:
    """A published name, followed by that in the file if it is another one."""
    theirs = file_names.get(name, name)
    return f"{name} ({theirs} in the file)" if theirs != name else name


def unknown_names(params, file_names: dict[str, str]) -> list[str]:
    """Names in the file that are not in its format's name table."""
    return sorted(name for name in params if file_names and name not in file_names)
