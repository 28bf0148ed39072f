"""Weights on their way: parameters by published name, and the model that they are for."""

import contextlib
import dataclasses
import difflib

import numpy as np

from vit_jax.errors import UserError

POSEMB = "Transformer/posembed_input/pos_embedding"
BLOCK = "Transformer/encoderblock_0"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters by published name (one entry per layer), and the constructor arguments of the
    model they fit.
    """

    params: dict[str, np.ndarray]
    fields: dict
    class_names: tuple[str, ...] = ()
    loss: str = ""  # that they were trained with, where it is known
    format: str = "ours"
    file_names: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # published name -> name in the file
    path: str = ""  # where they were read from


@contextlib.contextmanager
def naming(path):
    """Lets every UserError that leaves it name the file that it is about; `path` may be empty."""
    try:
        yield
    except UserError as error:
        if not path or str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def nearest(name: str, names) -> str:
    """ "; the nearest name is X", or nothing where none is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest name is {close[0]}" if close else ""


def rename(held: dict, our_name, path) -> tuple[dict, dict]:
    """(arrays by our names, names in the file by our names).

    Raises:
      UserError: two entries have one name of ours.
    """
    params, file_names = {}, {}
    for name, value in held.items():
        ours = our_name(name)
        if ours in params:
            raise UserError(
                f"{path} has both {file_names[ours]} and {name}, which are one parameter: fetch it "
                "again"
            )
        params[ours], file_names[ours] = value, name
    return params, file_names


def in_file(name: str, file_names: dict[str, str]) -> str:
    """A published name with that in the file, where they differ."""
    theirs = file_names.get(name, name)
    return f"{name} ({theirs} in the file)" if theirs != name else name


def left_over(params, file_names: dict[str, str]) -> list[str]:
    """Names in the file that its format's table does not have."""
    return sorted(name for name in params if file_names and name not in file_names)
