"""Files of a workdir that grow line by line or are often rewritten: log, metrics, events.

An object on a store can't be appended to and accepts about one write a second. So on a store these
files are written to a local folder, and a thread uploads those that have changed: at most every few
seconds, before a checkpoint is saved, and at the end. Between uploads no request is made.
"""

import contextlib
import logging
import os
import pathlib
import queue
import shutil
import tempfile
import threading
import time

from etils import epath

from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

EVERY_S = 10.0
LAST_TRIES = 20  # once a second at the end, for a store that fails
AGREE_TRIES = 5  # in which a file is read as it was the time before
PATIENCE_S = 60  # for files to reach the store before a save, and at the end
UNFINISHED = ".tmp"  # end of the names of files that are being written


def stamp(path: pathlib.Path | epath.Path) -> tuple[int, int]:
    """(size in bytes, time of the last change in ns)."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


class LocalFiles:
    """The files of a local workdir, which are written where they belong."""

    def __init__(self, workdir: epath.Path):
        self.workdir = workdir
        self.folder = workdir

    def path(self, name: str) -> epath.Path:
        """Where to write the file `name`, which may be in a sub-folder; it need not exist."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def deliver(self) -> None:
        pass

    def close(self) -> None:
        pass


class Spool:
    """The files of a workdir on a store."""

    def __init__(self, workdir: epath.Path, every_s: float):
        """`every_s`: the fewest seconds between two writes of an object, except at a save."""
        self.workdir = workdir
        self.every_s = every_s
        self.folder = epath.Path(tempfile.mkdtemp(prefix="vit_jax_spool_"))
        self.sent: dict[str, tuple[int, int]] = {}  # name -> size and time of change
        self.is_failing = False
        self.end = threading.Event()  # the last request
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def path(self, name: str) -> epath.Path:
        """Where to write the file `name`; if it is on the store, it is brought here first.

        Raises:
          UserError: the store can't be read.
        """
        path = self.folder / name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = self.read(f"{self.workdir}/{name}")
        if content is not None:
            path.write_bytes(content)
            self.sent[name] = stamp(path)
        return path

    def read(self, path: str) -> bytes | None:
        """What the store has, None if it has nothing.

        The client does not check answers against the store's checksums, and lines that are read
        are written again. So two answers must agree.
        """
        try:
            content = objects.content(path)
            for _ in range(AGREE_TRIES):
                before = content
                content = objects.content(path)
                if content == before:
                    return content
            raise OSError("its content differs each time")
        except Exception as error:  # of many types
            raise UserError(
                f"{path} can't be read ({one_line(error)[:160]}): fix it, or choose another "
                "--workdir"
            ) from error

    def deliver(self) -> None:
        """Sends what has changed, and returns once that was tried, or after PATIENCE_S."""
        self.ask(threading.Event())

    def ask(self, tried: threading.Event) -> None:
        self.requests.put(tried)
        tried.wait(PATIENCE_S)

    def work(self) -> None:
        """Sends after every request, and every `every_s` seconds."""
        tried = None
        while tried is not self.end:
            tried = None
            with contextlib.suppress(queue.Empty):
                tried = self.requests.get(timeout=self.every_s)
            self.send_changed()
            if tried is self.end:
                self.try_again()
            if tried is not None:
                tried.set()

    def try_again(self) -> None:
        """Sends what is left at the end to a store that fails for a while."""
        for _ in range(LAST_TRIES):
            if not self.changed():
                return
            time.sleep(1)
            self.send_changed()

    def changed(self) -> dict[str, tuple[int, int]]:
        """Name -> stamp of the files that are not on the store as they are here."""
        found = {}
        for path in sorted(pathlib.Path(self.folder).rglob("*")):
            if path.is_file() and not path.name.endswith(UNFINISHED):
                name = path.relative_to(self.folder).as_posix()
                found[name] = stamp(path)
        return {name: now for name, now in found.items() if self.sent.get(name) != now}

    def send_changed(self) -> None:
        """One request per changed file; what fails is sent the next time."""
        problem = None
        for name, now in self.changed().items():
            try:
                self.write(name)
                self.sent[name] = now
            except Exception as error:  # every store has errors of its own
                problem = f"{self.workdir}/{name} can't be written ({one_line(error)[:160]})"
        self.report(problem)

    def write(self, name: str) -> None:
        bucket, key = objects.locate(f"{self.workdir}/{name}")
        bucket.write(key, (self.folder / name).read_bytes()).result()

    def report(self, problem: str | None) -> None:
        """Logs when the writing begins to fail, and when it works again."""
        was_failing = self.is_failing
        self.is_failing = problem is not None
        if problem and not was_failing:
            log.warning("%s: it is kept in %s, and sent later", problem, self.folder)
        if was_failing and not problem:
            log.warning("%s can be written again", self.workdir)

    def close(self) -> None:
        """Sends what is left; files that the store does not take stay where they are."""
        self.ask(self.end)
        left = self.changed()
        if left:
            log.warning(
                "%s can't be written: %s kept in %s", self.workdir, ", ".join(left), self.folder
            )
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


Files = LocalFiles | Spool


def open_files(workdir: epath.Path, every_s: float = EVERY_S) -> Files:
    """Where to write the growing files of a workdir."""
    if objects.is_object(str(workdir)):
        return Spool(workdir, every_s)
    return LocalFiles(workdir)
