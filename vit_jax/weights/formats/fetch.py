"""Remote weights: downloads files behind https://, and copies of those that a library can only read
from disk.
"""

import http.client
import pathlib
import shutil
import urllib.error
import urllib.request

from etils import epath

from vit_jax.checkpoints.read import absolute
from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line
from vit_jax.weights.formats.safetensors_folder import CONFIG, PREPROCESSOR, WEIGHTS, is_folder


def locate(path, folder: pathlib.Path):
    """Where to read `path` from, which may be a copy in the temporary `folder`."""
    if str(path).startswith(("https://", "http://")):
        return epath.Path(fetch(str(path), folder))
    objects.must_be_reachable(str(path), path)
    try:
        location = absolute(path)
        if location.exists():
            if "://" in str(path):
                return copy(location, folder)
            return location
    except Exception as error:  # every store has errors of its own
        raise UserError(
            f"{path} can't be reached ({one_line(error)[:160]}): check path, network and access"
        ) from error
    raise UserError(
        f"{path} does not exist: give a workdir, a checkpoint folder, an .npz, a .safetensors, or "
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
    address, _, query = url.partition("?")
    suffix = f"?{query}" if query else ""
    result = folder
    name = WEIGHTS
    if address.endswith((".npz", ".safetensors")):
        address, _, name = address.rpartition("/")
        result = folder / name
    else:
        address = address.rstrip("/")
    download(f"{address}/{name}{suffix}", folder / name, required=True)
    if name.endswith(".safetensors"):
        for beside in (CONFIG, PREPROCESSOR):
            download(f"{address}/{beside}{suffix}", folder / beside, required=False)
    return result


def download(url: str, target: pathlib.Path, required: bool) -> None:
    """Downloads one file, completely; it may be absent if it is not `required`."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response, target.open("wb") as file:
            shutil.copyfileobj(response, file)
            expected = response.headers.get("Content-Length")
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if error.code in (403, 404) and not required:
                return
        raise UserError(
            f"{url} can't be fetched ({one_line(error)[:160]}): check address and network"
        ) from error
    if expected and int(expected) != target.stat().st_size:
        raise UserError(f"{url} ended after {target.stat().st_size} of {expected} bytes: try again")
