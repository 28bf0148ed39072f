"""Archives of numpy arrays, as vision_transformer and big_vision publish them. Pickles are never
read.
"""

import warnings
import zipfile
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.distributed.runtime import check_fits
from vit_jax.errors import UserError, one_line


def read(path, select: Callable[[list[str]], Iterable[str]] = list) -> dict[str, np.ndarray]:
    """The arrays of an .npz as float32, by their names in the file.

    Args:
      path: of the file.
      select: f(names) -> those wanted; the others are not read.

    Raises:
      UserError: the file is damaged, no .npz, or holds anything but arrays of floats.
    """
    try:
        with epath.Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.namelist()
            if any(entry.endswith("data.pkl") for entry in entries):
                raise UserError(
                    f"{path} is a pickle of PyTorch, which may run code: save it as .safetensors"
                )
            wanted = list(select([entry.removesuffix(".npy") for entry in entries]))
            check_fits(sum(archive.getinfo(f"{name}.npy").file_size for name in wanted), path)
            return {
                name: as_float32(read_entry(archive, f"{name}.npy"), name, path) for name in wanted
            }
    except UserError:
        raise
    except (
        Exception
    ) as error:  # zipfile and numpy have a dozen kinds for what a damaged file makes them do
        raise UserError(
            f"{path} can't be read as .npz ({one_line(error)[:160]}): fetch the file again"
        ) from error


def read_entry(archive: zipfile.ZipFile, entry: str) -> np.ndarray:
    """One array; its bytes must be used up, which also makes zipfile check them."""
    with warnings.catch_warnings(), archive.open(entry) as stream:
        warnings.simplefilter("error")  # numpy guesses at a damaged header
        array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError(f"{entry} is longer than its header says")
    return array


def as_float32(value, name: str, path) -> np.ndarray:
    """A weight in float32, without a copy where it is.

    Raises:
      UserError: it is no array of floats.
    """
    if value.dtype == np.dtype("V2"):  # bfloat16, which .npz stores as raw bytes
        value = value.view(ml_dtypes.bfloat16)
    if (
        not value.ndim
        or not value.size
        or (value.dtype.kind != "f" and value.dtype != ml_dtypes.bfloat16)
    ):
        raise UserError(
            f"{path} has {name} of type {value.dtype}, shape {value.shape}: weights are arrays of "
            "floats"
        )
    return value.astype(np.float32, copy=False)


def write(path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an uncompressed .npz of float32."""
    with epath.Path(path).open("wb") as file:
        np.savez(file, **{name: np.asarray(value, np.float32) for name, value in arrays.items()})
