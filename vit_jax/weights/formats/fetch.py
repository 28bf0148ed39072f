"""Weights that lie elsewhere: what is behind https:// is fetched first, and what a library reads
from disk only.
"""

import http.client
import pathlib
import shutil
import urllib.error
import urllib.request

from etils import epath

from vit_jax.errors import UserError, one_line
from vit_jax.weights.formats.safetensors_folder import CONFIG, PREPROCESSOR, WEIGHTS, is_folder


def locate(path, folder: pathlib.Path):
    """Where to read `path`, which may need a copy in the temporary `folder`.

    Raises:
      UserError: it does not exist or can't be reached.
    """
    if str(path).startswith(("https://", "http://")):
        return epath.Path(fetch(str(path), folder))
    is_remote = "://" in str(path)
    try:
        location = epath.Path(path) if is_remote else epath.Path(path).expanduser().resolve()
        if location.exists():
            return copy(location, folder) if is_remote else location
    except Exception as error:  # every store has errors of its own
        raise UserError(
            f"{path} can't be reached ({one_line(error)[:160]}): check path, network and access"
        ) from error
    raise UserError(
        f"{path} does not exist: give a workdir, a checkpoint folder, an .npz, a .safetensors, or "
        "a folder of timm or Hugging Face"
    )


def copy(location, folder: pathlib.Path):
    """A local copy of .safetensors with what stands beside them; anything else is read where it
    lies.
    """
    if location.is_dir() and is_folder(location):
        names = [
            child.name for child in location.iterdir() if child.suffix in (".safetensors", ".json")
        ]
        source, found = location, folder
    elif location.suffix == ".safetensors":
        names = [location.name, CONFIG, PREPROCESSOR]
        source, found = location.parent, folder / location.name
    else:
        return location
    for name in names:
        if (source / name).exists():
            (source / name).copy(folder / name)
    return epath.Path(found)


def fetch(url: str, folder: pathlib.Path) -> pathlib.Path:
    """Downloads a file, or config.json and model.safetensors below an address, and returns what to
    read.
    """
    address, _, query = url.partition("?")
    suffix = f"?{query}" if query else ""
    if not address.endswith((".npz", ".safetensors")):
        files = [(WEIGHTS, True), (CONFIG, False), (PREPROCESSOR, False)]
        found, address = folder, address.rstrip("/")
    else:
        address, _, name = address.rpartition("/")
        beside = [(CONFIG, False), (PREPROCESSOR, False)] if name.endswith(".safetensors") else []
        found, files = folder / name, [(name, True), *beside]
    for name, required in files:
        download(f"{address}/{name}{suffix}", folder / name, required)
    return found


def download(url: str, target: pathlib.Path, required: bool) -> None:
    """Fetches one file.

    Raises:
      UserError: it can't be fetched, or not whole; where it is not `required`, it may be absent.
    """
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
