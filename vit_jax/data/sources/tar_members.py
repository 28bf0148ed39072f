"""The files in a tar and where they are."""

import logging
import os
import posixpath
import tarfile

from vit_jax.data.sources import storage
from vit_jax.data.sources.ignored import Ignored
from vit_jax.data.sources.listing import SUFFIXES
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

BLOCK = 512  # bytes, the unit of a tar
CHUNK = 1 << 20  # bytes read at a time of the padding at the end of a tar
LABELS = (".cls", ".json")
LINKS = "symbolic links"
MAX_LABEL_MEMBER = 1 << 16  # of a .cls or .json member


def span_of(path: str, member: tarfile.TarInfo, spans: dict, size: int) -> tuple[int, int] | None:
    """(position, length) of a member; None if it is not a file.

    Args:
      spans: the same by the name of each earlier member, for hard links.
      size: of the tar, in bytes.
    """
    target = posixpath.normpath(member.linkname)
    if member.issparse() or (member.islnk() and target not in spans):
        raise UserError(
            f"member {member.name} of {path} is not supported (a sparse file, or a link to a later "
            "or missing member): make the tar again without it"
        )
    if member.islnk():
        return spans[target]
    if not 0 <= member.size <= size - member.offset_data:
        raise UserError(
            f"member {member.name} of {path} declares {member.size:,} bytes, but the tar ends "
            "before: it is damaged, fetch it again"
        )
    return (member.offset_data, member.size) if member.isreg() else None


def check_end(path: str, file, end: int, last: str) -> None:
    """Raises UserError unless a tar has nothing but zeros from `end` on, after its member `last`,
    and at least one block of them.

    Python's tarfile takes half a header, or nothing at all, for the end of a tar.
    """
    good = file.seek(0, os.SEEK_END) >= end + BLOCK
    file.seek(end)
    while good and (chunk := file.read(CHUNK)):
        good = not chunk.strip(b"\0")
    if not good:
        raise UserError(
            f"{path} does not end with zeros at byte {end}, after {last or 'its start'}: it is cut "
            "off, damaged, or several tars in one file: fetch it again, or split it"
        )


def label_content(file, name: str, position: int, length: int) -> bytes | None:
    """The content of a member that may be a label; it is read while the file is, from which a store
    gives large blocks.
    """
    if not name.lower().endswith(LABELS) or length > MAX_LABEL_MEMBER:
        return None
    file.seek(position)
    return file.read(length)


def members(path: str, unused: Ignored) -> list[tuple[str, int, int, bytes | None]]:
    """(name, position, length, content if it may be a label) of the files in a tar, in order; a
    hard link is the file that it names. Counts images that are symbolic links.

    Raises:
      UserError: the tar is damaged or has a member that is not supported.
    """
    spans = {}
    found = []
    last = ""
    try:
        with storage.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            size = storage.size(path)
            for member in archive:
                last = f"its member {member.name}"
                span = spans[posixpath.normpath(member.name)] = span_of(path, member, spans, size)
                if span:
                    content = label_content(file, member.name, *span)
                    found.append((member.name, *span, content))
                elif member.name.lower().endswith(SUFFIXES) and not member.isdir():
                    unused.add(LINKS, member.name)
            end = archive.offset
            check_end(path, file, end, last)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UserError(
            f"{path} is truncated or not a tar file ({one_line(error)}): fetch it again"
        ) from None
    if LINKS in unused:
        log.warning(
            "%d images of %s are symbolic links and are skipped, such as %s",
            unused[LINKS],
            path,
            unused.paths[LINKS][0],
        )
    return found
