"""Files that a listing does not use: counted by kind and reported, so that none is missed silently.

(What a run leaves out after a loss spike is another matter: data/left_out.py.)
"""

import collections
import functools
import logging
import os
from collections.abc import Iterable, Mapping

import numpy as np

from vit_jax.data.sources import index_cache
from vit_jax.errors import printable

log = logging.getLogger(__name__)

# Folders that programs add to those of the user: macOS, Synology, Windows, Linux.
FOREIGN = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
HIDDEN = "hidden"
BROKEN = "behind a broken link"
LOOP = "behind a link to a folder above"
LONGEST_SUFFIX = 12  # with its dot; what is longer is a part of the name
SHOWN = 10  # kinds in a message
KEPT = 100  # paths of each kind


class Ignored(collections.Counter):
    """Kind -> number of files. Kinds are suffixes in lower case, and texts such as "hidden".

    `paths` has some of the files of each kind.
    """

    def __init__(self, counts: Mapping[str, int] = ()):
        super().__init__(counts)
        self.paths: dict[str, list[str]] = {}

    def add(self, kind: str, path: str) -> None:
        self[kind] += 1
        some = self.paths.setdefault(kind, [])
        if len(some) < KEPT:
            some.append(path)

    def add_folder(self, path: str) -> None:
        """Counts the files of a folder that is not looked into."""
        name = os.path.basename(path)
        kind = f"in {name}" if name in FOREIGN else "in hidden folders"
        for folder, _, files in os.walk(path):
            for file in files:
                self.add(kind, f"{folder}/{file}")

    def arrays(self) -> dict[str, np.ndarray]:
        """The counts for the cache of an index."""
        kinds = sorted(self)
        counts = np.asarray([self[kind] for kind in kinds], np.int64)
        return {"ignored": counts, **index_cache.Strings.pack(kinds).arrays("ignored")}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Ignored":
        kinds = index_cache.Strings.of(arrays, "ignored")
        return cls(dict(zip(kinds, arrays["ignored"].tolist(), strict=True)))


def is_foreign(folder: str) -> bool:
    """Whether a folder of this name is not looked into."""
    return folder.startswith(".") or folder in FOREIGN


def suffix_kind(name: str) -> str:
    """The kind of a file that is not an image."""
    suffix = os.path.splitext(name)[1].lower()
    if 1 < len(suffix) <= LONGEST_SUFFIX and suffix[1:].isalnum():
        return suffix
    return "without a suffix"


def selected(folder: str, names: Iterable[str], suffixes: tuple[str, ...], ignored: Ignored):
    """The names that end in one of the suffixes, in any case; counts the others."""
    found = []
    for name in names:
        if name.lower().endswith(suffixes):
            found.append(name)
        else:
            ignored.add(suffix_kind(name), f"{folder}/{name}")
    return found


def text(ignored: Mapping[str, int]) -> str:
    """Such as "14 files: 9 .mov, 3 beside the class folders, 2 in __MACOSX"."""
    kinds = sorted(ignored, key=lambda kind: (-ignored[kind], kind))
    parts = [f"{ignored[kind]:,} {kind}" for kind in kinds[:SHOWN]]
    rest = sum(ignored[kind] for kind in kinds[SHOWN:])
    if rest:
        parts.append(f"{rest:,} of other kinds")
    total = sum(ignored.values())
    return f"{total:,} file{'s' * (total != 1)}: {', '.join(parts)}"


def report(name: str, ignored: Mapping[str, int]) -> None:
    """Logs what the data set `name` does not use, once in a process."""
    if ignored:
        warn_once(printable(f"{name} ignores {text(ignored)}"))


@functools.cache
def warn_once(line: str) -> None:
    log.warning("%s", line)
