"""Where weights are: paths, stores, addresses and names. What a library can only read from disk is
copied there.
"""

import pathlib

from etils import epath

from vit_jax.checkpoints.read import absolute
from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line, read_problem
from vit_jax.weights import names
from vit_jax.weights.formats import download_cache, hub
from vit_jax.weights.formats.download import is_address, must_be_address, shown
from vit_jax.weights.formats.safetensors_folder import CONFIG, PREPROCESSOR, WEIGHTS, is_folder

ARCHIVE = "weights.npz"


def locate(path, folder: pathlib.Path):
    """Where to read weights from, which may be a copy in the cache or in the temporary `folder`.

    Args:
      path: a path, an address, or a name, unless there is such a path.
      folder: for copies that are not kept.
    """
    word = names.of_page(str(path))
    if is_address(word):
        return epath.Path(fetch(word, folder, ask=True))
    location = None if names.is_hub_name(word) and "://" in word else existing(path)
    if location is not None:
        return copy(location, folder) if "://" in word else location
    source = names.source_of(word)
    if source is None:
        raise UserError(
            f"{shown(path)} does not exist: give a workdir, a checkpoint folder, an .npz, a "
            ".safetensors, a folder of timm or Hugging Face, or a name of published weights"
            f"{names.suggestion(word)}"
        )
    if names.is_hub_name(source):
        return epath.Path(hub.fetch(*names.hub_parts(source)))
    return epath.Path(fetch(source, folder, ask=False))


def existing(path):
    """The location of a path, local or on a store; None if there is none."""
    name = shown(path)
    objects.must_be_reachable(str(path), name)
    try:
        location = absolute(path)
        return location if location.exists() else None
    except Exception as error:  # every store has errors of its own
        raise read_problem(name, error) or UserError(
            f"{name} can't be reached ({one_line(error)[:160]}): check path, network and access"
        ) from error


def copy(location, folder: pathlib.Path):
    """A local copy of .safetensors and the files beside them; other locations are returned as they
    are.
    """
    if location.is_dir() and is_folder(location):
        source = location
        result = folder
        suffixes = (".safetensors", ".json")
        files = [child.name for child in location.iterdir() if child.suffix in suffixes]
    elif location.suffix == ".safetensors":
        source = location.parent
        result = folder / location.name
        files = [location.name, CONFIG, PREPROCESSOR]
    else:
        return location
    for name in files:
        if (source / name).exists():
            (source / name).copy(folder / name)
    return epath.Path(result)


def fetch(url: str, folder: pathlib.Path, ask: bool) -> pathlib.Path:
    """Downloads a file, or config.json and model.safetensors below an address, and returns where
    they are.

    Args:
      url: its query may be a signature, which is another one the next time, so what is at an
        address with one is not kept.
      folder: for what is not kept.
      ask: the server is asked whether what is in the cache has changed.
    """
    must_be_address(url)
    files, result = files_at(url)
    if "?" in url:
        return download_cache.fetch_all(folder, files) / result
    return download_cache.cached(url, files, folder, ask) / result


def files_at(url: str) -> tuple[dict[str, str], str]:
    """Name -> address of the files to download, the weights last, and the name of what to read; ""
    for the folder.
    """
    address, mark, query = url.partition("?")
    if address.endswith(".npz"):
        return {ARCHIVE: url}, ARCHIVE
    weights = WEIGHTS
    result = ""
    if address.endswith(".safetensors"):
        address, _, weights = address.rpartition("/")
        result = WEIGHTS
    address = address.rstrip("/")
    remote = {CONFIG: CONFIG, PREPROCESSOR: PREPROCESSOR, WEIGHTS: weights}
    files = {name: f"{address}/{file}{mark}{query}" for name, file in remote.items()}
    return files, result
