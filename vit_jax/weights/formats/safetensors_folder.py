"""Folders with config.json and model.safetensors, the format of timm and Hugging Face, and single
.safetensors files.
"""

import json
import pathlib

import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vit_jax.cli import regular
from vit_jax.distributed.runtime import check_fits
from vit_jax.errors import UserError, one_line, read_problem
from vit_jax.weights.formats.npz import as_float32

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # contains the same for models with a tokenizer
BLOCK = 1 << 23  # bytes read at a time

# What reading a damaged file can raise.
DAMAGED = (
    SafetensorError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    MemoryError,
)


def is_folder(folder) -> bool:
    return any((epath.Path(folder) / name).exists() for name in (WEIGHTS, INDEX))


def read_json(path) -> dict:
    """A JSON object; {} if there is no such file."""
    path = epath.Path(path)
    if not path.exists():
        return {}
    try:
        value = json.loads(regular.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise read_problem(path, error) or UserError(
            f"{path} can't be read as JSON ({one_line(error)[:160]}): fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, not an object: fetch the file again")
    return value


def read(path) -> tuple[dict[str, np.ndarray], dict, dict]:
    """Arrays by their names in the file, config.json, and preprocessor_config.json ({} if absent).

    Args:
      path: a local .safetensors file, or a folder with one, or with the index of several.
    """
    path = epath.Path(path)
    folder = path.parent
    files = [path]
    if path.is_dir():
        folder = path
        files = files_of(path)
    check_fits(sum(file.stat().length for file in files if file.exists()), path)
    arrays = {}
    for file in files:
        arrays |= read_file(file)
    processor = read_json(folder / PREPROCESSOR)
    if not processor:
        processor = read_json(folder / PROCESSOR).get("image_processor", {})
    return arrays, read_json(folder / CONFIG), processor


def files_of(folder) -> list:
    """The .safetensors files of a folder: the single one if there is one, as in transformers, else
    those of the index.
    """
    index = None
    if not (folder / WEIGHTS).exists():
        index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict):
        return [folder / WEIGHTS]
    names = sorted(set(index.values()))
    for name in names:
        if name != pathlib.PurePath(name).name or name == "..":
            raise UserError(
                f"{INDEX} of {folder} names {name!r}, which is not beside it: fetch the folder "
                "again"
            )
    return [folder / name for name in names]


def must_be_readable(path) -> None:
    """Reads a file once. The library maps it, and a page that the disk does not give would then
    kill the process.
    """
    with regular.open_file(path) as file:
        while file.read(BLOCK):
            pass


def read_file(path) -> dict[str, np.ndarray]:
    try:
        must_be_readable(path)
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            return {name: as_float32(file.get_tensor(name), name, path) for name in names}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: fetch the whole folder again") from None
    except DAMAGED as error:
        raise read_problem(path, error) or UserError(
            f"{path} can't be read as .safetensors ({one_line(error)[:160]}): fetch the file again"
        ) from error


def write(folder, arrays: dict[str, np.ndarray], **configs: dict) -> None:
    """Writes the files of a folder.

    Args:
      folder: must exist.
      arrays: written as float32.
      **configs: JSON objects by file name without .json, such as `config`.
    """
    folder = epath.Path(folder)
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    for stem, values in configs.items():
        (folder / f"{stem}.json").write_text(json.dumps(values, indent=2) + "\n")
