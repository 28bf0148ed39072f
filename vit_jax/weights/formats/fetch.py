"""Remote weights: downloads files behind https://, and copies of those that a library can only read
from disk.
"""

import pathlib

from etils import epath

from vit_jax.checkpoints.read import absolute
from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line, read_problem
from vit_jax.weights.formats.download import download, is_address, must_be_address, shown
from vit_jax.weights.formats.safetensors_folder import CONFIG, PREPROCESSOR, WEIGHTS, is_folder

ARCHIVE = "weights.npz"


def locate(path, folder: pathlib.Path):
    """Where to read `path` from, which may be a copy in the temporary `folder`."""
    if is_address(path):
        return epath.Path(fetch(str(path), folder))
    name = shown(path)
    objects.must_be_reachable(str(path), name)
    try:
        location = absolute(path)
        if location.exists():
            if "://" in str(path):
                return copy(location, folder)
            return location
    except Exception as error:  # every store has errors of its own
        raise read_problem(name, error) or UserError(
            f"{name} can't be reached ({one_line(error)[:160]}): check path, network and access"
        ) from error
    raise UserError(
        f"{name} does not exist: give a workdir, a checkpoint folder, an .npz, a .safetensors, or "
        "a folder of timm or Hugging Face"
    )


def copy(location, folder: pathlib.Path):
    """A local copy of .safetensors and the files beside them; other locations are returned as they
    are.
    """
    if location.is_dir() and is_folder(location):
        source = location
        result = folder
        suffixes = (".safetensors", ".json")
        names = [child.name for child in location.iterdir() if child.suffix in suffixes]
    elif location.suffix == ".safetensors":
        source = location.parent
        result = folder / location.name
        names = [location.name, CONFIG, PREPROCESSOR]
    else:
        return location
    for name in names:
        if (source / name).exists():
            (source / name).copy(folder / name)
    return epath.Path(result)


def fetch(url: str, folder: pathlib.Path) -> pathlib.Path:
    """Downloads a file, or config.json and model.safetensors below an address, and returns where
    they are.
    """
    must_be_address(url)
    address, mark, query = url.partition("?")
    if address.endswith(".npz"):
        target = folder / ARCHIVE
        download(url, target, required=True)
        return target
    name = WEIGHTS
    is_file = address.endswith(".safetensors")
    if is_file:
        address, _, name = address.rpartition("/")
    address = address.rstrip("/")
    download(f"{address}/{name}{mark}{query}", folder / WEIGHTS, required=True)
    for beside in (CONFIG, PREPROCESSOR):
        download(f"{address}/{beside}{mark}{query}", folder / beside, required=False)
    return folder / WEIGHTS if is_file else folder
