"""Archives of numpy arrays, as in vision_transformer and big_vision. Pickles are never read."""

import warnings
import zipfile
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.cli import regular
from vit_jax.distributed.runtime import check_fits
from vit_jax.errors import UserError, one_line, read_problem


def read(path, select: Callable[[list[str]], Iterable[str]] = list) -> dict[str, np.ndarray]:
    """The arrays of an .npz as float32, by their names in the file.

    Args:
      path: of the file.
      select: f(names) -> the names to read.
    """
    try:
        with regular.open_file(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.namelist()
            if any(entry.endswith("data.pkl") for entry in entries):
                raise UserError(
                    f"{path} is a pickle of PyTorch, which may run code: save it as .safetensors"
                )
            names = list(select([entry.removesuffix(".npy") for entry in entries]))
            check_fits(sum(archive.getinfo(f"{name}.npy").file_size for name in names), path)
            return {
                name: as_float32(read_entry(archive, f"{name}.npy"), name, path) for name in names
            }
    except UserError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen types for damaged files
        raise read_problem(path, error) or UserError(
            f"{path} can't be read as .npz ({one_line(error)[:160]}): fetch the file again"
        ) from error


def read_entry(archive: zipfile.ZipFile, entry: str) -> np.ndarray:
    """One array; reading to the end of the entry also makes zipfile check its CRC."""
    with warnings.catch_warnings(), archive.open(entry) as stream:
        warnings.simplefilter("error")  # numpy guesses if a header is damaged
        array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError(f"{entry} is longer than its header says")
    return array


def as_float32(value, name: str, path) -> np.ndarray:
    """A weight in float32, copied only if needed; UserError if it is not an array of floats."""
    if value.dtype == np.dtype("V2"):  # bfloat16, which .npz stores as raw bytes
        value = value.view(ml_dtypes.bfloat16)
    is_float = value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16
    if not value.ndim or not value.size or not is_float:
        raise UserError(
            f"{path} has {name} of type {value.dtype}, shape {value.shape}: weights are arrays of "
            "floats"
        )
    return value.astype(np.float32, copy=False)


def write(path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an uncompressed .npz of float32."""
    with epath.Path(path).open("wb") as file:
        np.savez(file, **{name: np.asarray(value, np.float32) for name, value in arrays.items()})
