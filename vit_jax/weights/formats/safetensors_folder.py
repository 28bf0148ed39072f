"""Folders of config.json and model.safetensors, as timm and Hugging Face publish them, and lone
.safetensors files.
"""

import json
import pathlib

import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vit_jax.errors import UserError, one_line
from vit_jax.weights.formats.npz import as_float32

WEIGHTS, INDEX, CONFIG, PREPROCESSOR = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "preprocessor_config.json",
)
PROCESSOR = "processor_config.json"  # holds the same inside, where a tokenizer belongs to the model


def is_folder(folder) -> bool:
    return any((epath.Path(folder) / name).exists() for name in (WEIGHTS, INDEX))


def read_json(path) -> dict:
    """A JSON object; {} where there is no such file.

    Raises:
      UserError: it holds something else.
    """
    path = epath.Path(path)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} can't be read as JSON ({one_line(error)[:160]}): fetch the file again"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, not an object: fetch the file again")
    return found


def read(path) -> tuple[dict[str, np.ndarray], dict, dict]:
    """Arrays by their names in the file, config.json, and preprocessor_config.json ({} where
    absent).

    Args:
      path: a local .safetensors file, or a folder with one, or with the index of several.

    Raises:
      UserError: a file is missing or damaged.
    """
    path = epath.Path(path)
    folder = path if path.is_dir() else path.parent
    files = [path]
    if path.is_dir() and (path / WEIGHTS).exists():
        files = [path / WEIGHTS]  # transformers takes it, too, where both are there
    elif path.is_dir():
        index = read_json(folder / INDEX).get("weight_map")
        names = sorted(set(index.values())) if isinstance(index, dict) else []
        if outside := [
            name for name in names if name != pathlib.PurePath(name).name or name == ".."
        ]:
            raise UserError(
                f"{INDEX} of {path} names {outside[0]!r}, which is not beside it: fetch the folder "
                "again"
            )
        files = [folder / name for name in names] if isinstance(index, dict) else [path / WEIGHTS]
    held = {}
    for file in files:
        held |= read_file(file)
    processor = read_json(folder / PREPROCESSOR) or read_json(folder / PROCESSOR).get(
        "image_processor", {}
    )
    return held, read_json(folder / CONFIG), processor


def read_file(path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: as_float32(file.get_tensor(name), name, path) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: fetch the whole folder again") from None
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        MemoryError,
    ) as error:
        raise UserError(
            f"{path} can't be read as .safetensors ({one_line(error)[:160]}): fetch the file again"
        ) from error


def write(folder, arrays: dict[str, np.ndarray], **configs: dict) -> None:
    """Writes a folder.

    Args:
      folder: exists.
      arrays: written as float32.
      **configs: JSON objects by the stem of their file, such as `config`.
    """
    folder = epath.Path(folder)
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    save_file(arrays, folder / WEIGHTS, metadata={"format": "pt"})
    for stem, values in configs.items():
        (folder / f"{stem}.json").write_text(json.dumps(values, indent=2) + "\n")
