"""Archives of numpy arrays, as vision_transformer and big_vision publish them. Pickles are never read."""

import zipfile
import zlib

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.errors import UserError, one_line

# What numpy and zipfile raise for damaged files; NotImplementedError: a zip compression that Python lacks.
DAMAGES = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    NotImplementedError,
    MemoryError,
    SyntaxError,  # of an array's header
)


def read(path) -> dict[str, np.ndarray]:
    """All arrays of an .npz as float32, by their names in the file.

    Raises:
      UserError: the file is damaged, no .npz, or holds anything but arrays of floats.
    """
    held = {}
    try:
        with epath.Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                held[name] = as_float32(archive[name], name, path)
    except DAMAGES as error:
        raise UserError(f"{path} can't be read as .npz ({one_line(error)[:160]}): fetch the file again") from error
    return held


def as_float32(value, name: str, path) -> np.ndarray:
    """A weight in float32, without a copy where it is.

    Raises:
      UserError: it is no array of floats.
    """
    if not isinstance(value, np.ndarray):
        raise UserError(f"{path} has the entry {name}, which is no array: these are not the weights of a ViT")
    if value.dtype == np.dtype("V2"):  # bfloat16, which .npz stores as raw bytes
        value = value.view(ml_dtypes.bfloat16)
    if not value.ndim or (value.dtype.kind != "f" and value.dtype != ml_dtypes.bfloat16):
        raise UserError(f"{path} has {name} of type {value.dtype}, shape {value.shape}: weights are arrays of floats")
    return value.astype(np.float32, copy=False)


def write(path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an uncompressed .npz of float32."""
    with epath.Path(path).open("wb") as file:
        np.savez(file, **{name: np.asarray(value, np.float32) for name, value in arrays.items()})
