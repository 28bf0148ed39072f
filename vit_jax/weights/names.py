"""Names of weights: those of the published collections, of timm, and hf:ORG/NAME of the Hugging
Face hub.
"""

import difflib
import logging
import re

from vit_jax.errors import UserError
from vit_jax.weights import published, timm_tags

log = logging.getLogger(__name__)

HUB = "hf:"
# As timm and fsspec write it, too.
HUB_NAME = re.compile(r"(?:hf|hf[-_]hub):(?://)?(.*)", re.DOTALL)
REPOSITORY = r"\w[\w.-]*/[\w.-]+"
PAGE = re.compile(rf"https://huggingface\.co/({REPOSITORY})(?:/tree/([\w./-]+?))?/?", re.ASCII)
FILE_PAGE = re.compile(rf"(https://huggingface\.co/{REPOSITORY})/blob/(.+)", re.ASCII)
FILES = (".npz", ".safetensors", ".bin", ".pth", ".pt", ".h5", ".msgpack", ".json")
MOST = 10  # names in a message


def is_hub_name(word: str) -> bool:
    return HUB_NAME.fullmatch(word) is not None


def hub_parts(word: str) -> tuple[str, str | None]:
    """("ORG/NAME", revision or None) of hf:ORG/NAME or hf:ORG/NAME@REVISION.

    Raises:
      UserError: it has another form.
    """
    name, mark, revision = HUB_NAME.fullmatch(word)[1].partition("@")
    is_revision = re.fullmatch(r"[\w./+-]+", revision) or not mark
    if not re.fullmatch(REPOSITORY, name, re.ASCII) or not is_revision or ".." in word:
        raise UserError(
            f"{word} is not the name of a model of the hub: write hf:ORG/NAME, or "
            "hf:ORG/NAME@REVISION with a branch, tag or commit"
        )
    return name, revision or None


def of_page(word: str) -> str:
    """hf:ORG/NAME of the page of a model, https://huggingface.co/ORG/NAME; the file itself of the
    page of a file; other words as they are.
    """
    file = FILE_PAGE.fullmatch(word)
    if file:
        return f"{file[1]}/resolve/{file[2]}"
    match = PAGE.fullmatch(word)
    if not match:
        return word
    return f"{HUB}{match[1]}" + (f"@{match[2]}" if match[2] else "")


def source_of(word: str) -> str | None:
    """What a name stands for, an https:// address or a name of the hub; None if it is not known.

    Raises:
      UserError: it is the name of a model, of which there are several weights.
    """
    if is_hub_name(word):
        return word
    if "://" in word or re.match("[./~]", word):
        return None
    path = published.path_of(word)
    if path:
        log.info("%s is %s", word, published.address(path))
        return published.address(path)
    if word.endswith(FILES) and "/" in word:  # such as runs/B_16.npz, a path that does not exist
        return None
    hub = None if word.endswith(FILES) else timm_tags.hub_name(word)
    if hub:
        log.info("%s is %s%s", word, HUB, hub)
        return f"{HUB}{hub}"
    names = published.files_of_model(word)
    if len(names) > 1:
        is_what = "is the name of a model, not of weights"
        if word.endswith(FILES):
            is_what = "does not exist as a file, nor as the name of weights"
        raise UserError(f"{word} {is_what}: choose one of {listed(names)}")
    if names:
        log.info("%s is %s, its only published weights", word, names[0])
        return published.address(published.PATHS[names[0]])
    return None


def listed(names: list[str]) -> str:
    """Names for a message."""
    rest = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {rest} more" if rest > 0 else "")


def suggestion(word: str) -> str:
    """What may be meant by a name that is not known, as the end of a message; "" if nothing."""
    collections = {name.split("/")[0] for name in published.PATHS}
    is_repository = re.fullmatch(REPOSITORY, word, re.ASCII) and not word.endswith(FILES)
    if is_repository and word.split("/")[0] not in collections:
        return f"; if it is a model of the Hugging Face hub, give {HUB}{word}"
    known = {name.lower(): name for name in (*published.PATHS, *timm_tags.TAGS)}
    close = difflib.get_close_matches(word.lower().removesuffix(published.SUFFIX), known, n=3)
    names = ", ".join(known[name] for name in close)
    return f"; the nearest names of weights are {names}" if names else ""
