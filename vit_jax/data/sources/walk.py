"""All files below a folder, on a disk or a store, and what is left out on the way."""

import os
from collections.abc import Iterator

from vit_jax.data.sources import storage
from vit_jax.data.sources.ignored import BROKEN, HIDDEN, LOOP, Ignored, is_foreign
from vit_jax.errors import UserError


def walk(path: str, ignored: Ignored) -> Iterator[tuple[str, list[str], list[str]]]:
    """(folder, names of its folders, names of its files) for a folder and all below it, sorted.

    Follows links to folders. Counts what it leaves out in `ignored`: hidden files, folders that are
    hidden or `ignored.FOREIGN`, links that are broken or lead back to a folder above.
    """
    if storage.is_local(path):
        for folder, _, folders, files in walk_local(path, ignored):
            yield folder, folders, files
        return
    for found, _, files in storage.on_store(path).walk():
        folder = os.fspath(found)
        foreign = list(filter(is_foreign, folder.removeprefix(path).split("/")))
        if foreign:
            kind = "in hidden folders" if foreign[0].startswith(".") else f"in {foreign[0]}"
            for name in files:
                ignored.add(kind, f"{folder}/{name}")
            continue
        visible = sorted(name for name in files if name[0] != ".")
        for name in set(files) - set(visible):
            ignored.add(HIDDEN, f"{folder}/{name}")
        yield folder, [], visible


def walk_local(
    path: str, ignored: Ignored, problems: list[str] | None = None, above: tuple = ()
) -> Iterator[tuple[str, int, list[str], list[str]]]:
    """Like `walk`, with the time of the last change of each folder (ns), read before its names.

    Args:
      problems: gets what is otherwise an error: folders that can't be listed, and links that are
        broken and may have been folders.
    """
    try:
        status = os.stat(path)
        entries = list(os.scandir(path))
    except OSError as error:
        report_problem(
            f"folder {path} can't be listed ({error.strerror}): make it readable or remove it",
            problems,
        )
        return
    identities = (*above, (status.st_dev, status.st_ino))
    folders = []
    files = []
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            if not os.path.splitext(entry.name)[1]:
                report_problem(f"{entry.path} is a broken link: fix or remove it", problems)
            ignored.add(BROKEN, entry.path)
        elif entry.is_dir() and is_foreign(entry.name):
            ignored.add_folder(entry.path)
        elif entry.is_symlink() and identity(entry.path) in identities:
            ignored.add(LOOP, entry.path)
        elif entry.is_dir():
            folders.append(entry.name)
        elif entry.name.startswith("."):
            ignored.add(HIDDEN, entry.path)
        else:
            files.append(entry.name)
    folders.sort()
    yield path, status.st_mtime_ns, folders, sorted(files)
    for name in folders:
        yield from walk_local(os.path.join(path, name), ignored, problems, identities)


def report_problem(problem: str, problems: list[str] | None) -> None:
    """Raises UserError, or adds to the problems if they are to be collected."""
    if problems is None:
        raise UserError(problem)
    problems.append(problem)


def identity(path: str) -> tuple[int, int]:
    """Of the file or folder that a path leads to."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
