"""Weights of the Hugging Face hub, by its own client, which keeps them in its cache, continues
downloads, and knows tokens and mirrors.
"""

import logging
import pathlib
import re
import sys
import warnings

from vit_jax.cli.log import process_index
from vit_jax.errors import Unavailable, UserError, one_line
from vit_jax.weights.formats.safetensors_folder import (
    CONFIG,
    INDEX,
    PREPROCESSOR,
    WEIGHTS,
    files_of,
)

log = logging.getLogger(__name__)

BUSY = (408, 429)
DENIED = (401, 403)


def fetch(name: str, revision: str | None) -> pathlib.Path:
    """The folder of a model in the client's cache, with config.json, preprocessor_config.json and
    .safetensors, all of one commit.

    Args:
      name: ORG/NAME.
      revision: a branch, tag or commit; None for the main branch.

    Raises:
      Unavailable: the hub does not answer, and the model is not in the cache.
      UserError: there is no such model, it is not public, or has no .safetensors.
    """
    from huggingface_hub import constants

    quiet()
    shown = f"hf:{name}@{revision}" if revision else f"hf:{name}"
    log.info("%s is at %s/%s", shown, constants.ENDPOINT, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of links, which some disks do not have
            folder = fetch_files(name, revision, shown)
    except UserError:
        raise
    except Exception as error:  # of the client, of its HTTP library, of the disk
        if isinstance(error, OSError) and error.errno:
            raise
        raise failure(name, shown, error) from error
    log.info("%s: commit %s, in %s", shown, folder.name, folder)
    return folder


def quiet() -> None:
    """Lets the client show progress bars on a terminal only, and none of its log."""
    from huggingface_hub import utils

    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty() or process_index():
        utils.disable_progress_bars()


def fetch_files(name: str, revision: str | None, shown: str) -> pathlib.Path:
    """The folder with all files that are read."""
    config = download(name, CONFIG, revision)
    commit = config.parent.name if config else revision
    download(name, PREPROCESSOR, commit)
    weights = download(name, WEIGHTS, commit)
    if weights:
        return weights.parent
    index = download(name, INDEX, commit)
    if not index:
        raise UserError(
            f"{shown} has no {WEIGHTS} (PyTorch pickles, .bin and .pth, are never read): choose a "
            "revision that has one, such as hf:ORG/NAME@refs/pr/N, or other weights"
        )
    for file in files_of(index.parent):
        if not download(name, file.name, commit):
            raise UserError(f"{shown} has no {file.name}, which its {INDEX} names: choose others")
    return index.parent


def download(name: str, file: str, revision: str | None) -> pathlib.Path | None:
    """A file in the client's cache; None if the model has no such file."""
    import huggingface_hub
    from huggingface_hub import errors

    is_commit = re.fullmatch("[0-9a-f]{40}", revision or "")
    known = huggingface_hub.try_to_load_from_cache(name, file, revision=revision)
    if is_commit and known is huggingface_hub._CACHED_NO_EXIST:  # also without a network
        return None
    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(name, file, revision=revision))
    except errors.LocalEntryNotFoundError:  # the hub does not answer
        raise
    except errors.EntryNotFoundError:
        return None


def failure(name: str, shown: str, error: Exception) -> UserError:
    """What an error of the client means."""
    from huggingface_hub import constants, errors

    address = f"{constants.ENDPOINT}/{name}"
    reason = error.__cause__ or error
    problem = one_line(reason)[:160] or type(reason).__name__
    status = getattr(getattr(reason, "response", None), "status_code", 0)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    is_unknown = isinstance(error, errors.RepositoryNotFoundError)
    if is_unknown and not isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{shown} does not exist at {address}, or is private: check the name; or {login}"
        )
    if status in DENIED:
        return UserError(f"{shown} needs access ({problem}): ask for it at {address}, and {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{shown} has no such revision at {address}: give a branch, tag or commit")
    if isinstance(reason, errors.OfflineModeIsEnabled):
        return UserError(
            f"{shown} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: "
            "unset it, or copy the model there"
        )
    text = f"{address} can't be fetched ({problem}): check network, HF_ENDPOINT and HF_HUB_CACHE"
    return UserError(text) if 400 <= status < 500 and status not in BUSY else Unavailable(text)
