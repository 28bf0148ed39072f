"""One file from a server to the disk: continued where it broke off, and compared with the size and
the checksum that the server gives.
"""

import base64
import hashlib
import json
import logging
import pathlib
import re
import zipfile
from collections.abc import Callable

import google_crc32c
from safetensors import safe_open

from vit_jax.cli import progress
from vit_jax.errors import Unavailable, UserError
from vit_jax.weights.formats import download
from vit_jax.weights.formats.download import shown

log = logging.getLogger(__name__)

TRIES = 10  # of one download, each but the last of which brings GAIN
GAIN = 2**20  # bytes
BLOCK = 2**20  # bytes read at a time
# Google's names in x-goog-hash.
ALGORITHMS = {
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "crc32c": google_crc32c.Checksum,
}


def checksum(path: pathlib.Path, algorithm: str) -> str:
    """Of a file, as base64."""
    state = ALGORITHMS[algorithm]()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return base64.b64encode(state.digest()).decode()


def validator(value: str | None) -> str:
    """A header that tells versions of a file apart; "" if it can't be sent back."""
    return value if value and re.fullmatch("[ -~]{1,200}", value) else ""


def facts_of(response) -> dict:
    """What an answer says of the file: etag, modified, size (if it is all of the file), and
    algorithm and checksum.
    """
    headers = response.headers
    facts = dict(etag=validator(headers.get("ETag")), modified=validator(headers["Last-Modified"]))
    if response.status == 200:
        facts["size"] = download.declared_size(response)
    published = ",".join(headers.get_all("x-goog-hash", ()))
    if headers.get("x-goog-stored-content-encoding") == "gzip":  # the checksum is of other bytes
        return facts
    for algorithm in ALGORITHMS:
        match = re.search(rf"(?:^|,)\s*{algorithm}=([^,\s]+)", published)
        if match:
            return facts | dict(algorithm=algorithm, checksum=match[1])
    return facts


def read_facts(path: pathlib.Path) -> dict:
    """Those that were written beside a file; {} if there are none."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def conditions(facts: dict) -> dict[str, str]:
    """Headers of a request for a file, unless it is the one with these facts."""
    headers = {"If-None-Match": facts.get("etag"), "If-Modified-Since": facts.get("modified")}
    return {name: value for name, value in headers.items() if value}


class Part:
    """The part of a file that has arrived, and the facts of the file."""

    def __init__(self, target: pathlib.Path):
        self.path = target.with_name(f"{target.name}.part")
        self.facts_path = target.with_name(f"{target.name}.part.facts")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def facts(self) -> dict:
        return read_facts(self.facts_path)

    def headers(self) -> dict[str, str]:
        """Of a request for the rest; {} if there is no part, or no way to know that the rest is of
        the same file.
        """
        facts = self.facts()
        strong = [facts.get("etag", ""), facts.get("modified", "")]
        strong = [value for value in strong if value and not value.startswith("W/")]
        if not strong or not self.size():
            return {}
        return {"Range": f"bytes={self.size()}-", "If-Range": strong[0]}

    def begin(self, facts: dict) -> None:
        """Begins with a file of these facts, and nothing of it."""
        self.discard()
        self.facts_path.write_text(json.dumps(facts))

    def discard(self) -> None:
        for path in (self.path, self.facts_path):
            path.unlink(missing_ok=True)

    def is_complete(self) -> bool:
        return self.size() > 0 and self.size() == self.facts().get("size")

    def is_continued_by(self, response) -> bool:
        """Whether an answer to `headers` is the rest of this file."""
        given = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if response.status != 206 or not given or int(given[1]) != self.size():
            return False
        facts = self.facts()
        new = facts_of(response)
        is_same = all(value == facts.get(key) for key, value in new.items() if value)
        return is_same and given[2] in ("*", str(facts.get("size")))


def check_zip(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError("a member is damaged")


def check_safetensors(path: pathlib.Path) -> None:
    with safe_open(path, framework="np"):
        pass


def check_json(path: pathlib.Path) -> None:
    json.loads(path.read_text())


CHECKS: dict[str, Callable[[pathlib.Path], None]] = {
    ".npz": check_zip,
    ".safetensors": check_safetensors,
    ".json": check_json,
}


def is_readable(path: pathlib.Path, suffix: str) -> bool:
    """Whether a file is whole by its format: a server may have sent less than all of it, or a page
    that asks to sign in.
    """
    try:
        CHECKS[suffix](path)
    except Exception:  # damaged files raise a dozen types
        return False
    return True


def transfer(url: str, target: pathlib.Path, known: dict) -> dict | None:
    """Downloads a file to `target`, which appears when it is complete.

    Args:
      url: the address.
      target: a part of an earlier try may be beside it.
      known: facts of the copy that is here, or {}.

    Returns:
      its facts, with size, algorithm and checksum; None if it is the one that is here.

    Raises:
      Absent, Unavailable, UserError: see `download`; what has arrived stays for the next try.
    """
    part = Part(target)
    for _ in range(TRIES - 1):
        before = part.size()
        try:
            return attempt(url, target, part, known)
        except Unavailable as error:
            if part.size() < before + GAIN:
                raise
            log.warning("%s; continuing", str(error).removesuffix(": try again"))
    return attempt(url, target, part, known)


def attempt(url: str, target: pathlib.Path, part: Part, known: dict) -> dict | None:
    """`transfer` by one request, or two if the part is not of the file that the server has now."""
    if part.is_complete():
        return finish(url, target, part, known)
    rest = part.headers()
    rate = download.Progress()
    with download.request(url, rate, rest or conditions(known)) as response:
        if response.status == download.NOT_MODIFIED and not rest:
            return None
        if response.status == 200:
            part.begin(facts_of(response))
        elif not rest:
            raise download.failure(url, ValueError(f"the server answers {response.status}"))
        elif not part.is_continued_by(response):
            part.discard()
            return attempt(url, target, part, known)
        receive(url, response, rate, part)
    return finish(url, target, part, known)


def receive(url: str, response, rate: download.Progress, part: Part) -> None:
    """Adds the content of an answer to the part."""
    contents = download.content(url, response, rate, part.path.parent)
    with (
        part.path.open("ab") as file,
        progress.Download(shown(url), part.facts().get("size"), part.size()) as shows,
    ):
        for content in contents:
            file.write(content)
            shows.advance(len(content))


def finish(url: str, target: pathlib.Path, part: Part, known: dict) -> dict:
    """Makes a complete part the file, and returns its facts."""
    facts = part.facts()
    algorithm = facts.get("algorithm") or "md5"
    found = checksum(part.path, algorithm)
    problem = None
    if facts.get("size") not in (None, part.size()):
        problem = f"{part.size()} bytes, not {facts['size']}"
    elif facts.get("checksum") not in (None, found):
        problem = f"the {algorithm} {found}, not {facts['checksum']}"
    if problem:
        part.discard()
        raise Unavailable(f"{shown(url)} arrived damaged, with {problem}: try again")
    if known and not is_readable(part.path, target.suffix):
        part.discard()
        raise UserError(
            f"{shown(url)} gives what is not a {target.suffix} file, maybe a page to sign in: "
            f"check the address; the earlier copy stays in {target}"
        )
    facts |= dict(size=part.size(), algorithm=algorithm, checksum=found)
    part.path.replace(target)
    part.discard()
    return facts
