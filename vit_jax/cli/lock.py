"""One run at a time in a workdir: lock.json there says who holds it, and is renewed while the run
lives.

It is written on condition that it is what was read, by TensorStore, on disks as on stores: of two
processes that take it at the same time, one fails.
"""

import contextlib
import itertools
import json
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator

from etils import epath

from vit_jax import errors
from vit_jax.cli import objects
from vit_jax.errors import UserError, one_line, printable, storage_problem

log = logging.getLogger(__name__)

FILE = "lock.json"
RENEW_S = 15
EXPIRES_S = 60  # without a renewal, after which a holder on another host counts as dead
POLL_S = 5
RELEASE_S = 3  # a process that ends does not wait longer


def process_facts() -> dict:
    """What tells a process from all others, also after its host was started again."""
    pid = os.getpid()
    return dict(host=socket.gethostname(), pid=pid, born=born(pid), machine=machine())


def machine() -> str:
    """The start of this machine and the process numbers that are known here; "" if the system does
    not say.
    """
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def born(pid: int) -> str | None:
    """When a process of this machine began, in ticks; None if there is none."""
    with contextlib.suppress(OSError):
        state, *fields = (
            pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        )
        return None if state == "Z" else fields[18]
    return None


HELD = []  # by this process
NUMBERS = itertools.count(1)  # of the locks of this process


class Lock:
    """The lock of a workdir, as this process sees it."""

    def __init__(self, workdir: epath.Path):
        self.workdir = workdir
        self.store, self.key = objects.locate_any(f"{workdir}/{FILE}")
        self.me = process_facts() | dict(lock=next(NUMBERS))
        self.generation = b""  # of the file as this process wrote it
        self.writing = threading.Lock()
        self.released = threading.Event()
        self.thread = threading.Thread(target=self.renew, daemon=True)

    def acquire(self, take_over: bool) -> None:
        """Raises UserError if a process that lives holds it."""
        first = found = self.store.read(self.key).result()
        since = time.monotonic()
        while not self.is_free(found, since, first, take_over):
            if found is first:
                holder = name(parse(found.value))
                log.warning(
                    "%s is locked by %s: waiting %d s for a sign of life; --take_over skips this",
                    self.workdir,
                    holder,
                    EXPIRES_S,
                )
            time.sleep(POLL_S)
            found = self.store.read(self.key).result()
        if not self.write(found.stamp.generation) and self.loss():
            return self.acquire(take_over=False)  # another process was first
        self.thread.start()

    def is_free(self, found, since: float, first, take_over: bool) -> bool:
        """Whether nobody holds it; UserError if somebody does."""
        holder = parse(found.value) if found.state == "value" else None
        if found.state != "value" or take_over or self.is_dead(holder):
            return True
        if self.is_here(holder) or found.stamp.generation != first.stamp.generation:
            raise UserError(
                f"--workdir={self.workdir} is in use by {name(holder)}: wait for its end, stop it, "
                "or choose another --workdir; if it does not exist, add --take_over"
            )
        return time.monotonic() > since + EXPIRES_S

    def is_here(self, holder: dict) -> bool:
        """Whether this process can see the holder, if it lives."""
        return bool(self.me["machine"]) and holder.get("machine") == self.me["machine"]

    def is_dead(self, holder: dict) -> bool:
        return self.is_here(holder) and born(holder["pid"]) != holder["born"]

    def write(self, generation: bytes) -> bool:
        """Takes or renews it, unless it is not what it was."""
        text = json.dumps(self.me | dict(renewed=time.strftime("%Y-%m-%d %H:%M:%S")))
        written = self.store.write(self.key, text.encode(), if_equal=generation).result()
        if not written.generation:
            return False
        self.generation = written.generation
        return True

    def renew(self) -> None:
        while not self.released.wait(RENEW_S):
            try:
                loss = self.renew_once()
            except Exception as error:  # of many types; the next time may succeed
                log.warning(
                    "%s in %s can't be renewed: %s",
                    FILE,
                    self.workdir,
                    storage_problem(error) or one_line(error)[:160],
                )
                continue
            if loss and not self.released.is_set():
                self.end(loss)

    def renew_once(self) -> str | None:
        """See `loss`."""
        with self.writing:
            if self.released.is_set() or (self.is_there() and self.write(self.generation)):
                return None
            return self.loss()

    def is_there(self) -> bool:
        """Whether the file exists, on a disk, where a write would make the folder again."""
        return objects.is_object(str(self.workdir)) or (self.workdir / FILE).exists()

    def loss(self) -> str | None:
        """How the lock was lost; None if it was not: a store may repeat a write that was done."""
        found = self.store.read(self.key).result()
        if found.state != "value":
            return f"{FILE} is gone: the folder was moved or deleted"
        holder = parse(found.value)
        if holder.items() >= self.me.items():
            self.generation = found.stamp.generation
            return None
        return f"it was taken over by {name(holder)}"

    def end(self, loss: str) -> None:
        """Ends this process: what it writes now would damage the run of another one, or make half a
        workdir where one was moved away.
        """
        text = f"--workdir={self.workdir} is no longer that of this run: {loss}"
        errors.say(f"error: {printable(text)}; nothing more is saved")
        os._exit(UserError.exit_code)

    def release(self) -> None:
        self.released.set()
        if not self.generation or not self.writing.acquire(timeout=RELEASE_S):
            return  # it could not be written
        with contextlib.suppress(Exception):  # it expires
            self.store.write(self.key, None, if_equal=self.generation).result(timeout=RELEASE_S)


def parse(content: bytes) -> dict:
    """Facts about the holder; {} if they can't be read."""
    try:
        holder = json.loads(content)
        return holder if {"host", "pid", "born"} <= holder.keys() else {}
    except (ValueError, AttributeError, RecursionError):
        return {}


def name(holder: dict) -> str:
    if not holder:
        return f"an unknown process (its {FILE} can't be read)"
    return f"process {holder['pid']} on {holder['host']}, seen at {holder.get('renewed', '?')}"


@contextlib.contextmanager
def held(workdir: epath.Path, take_over: bool = False) -> Iterator[None]:
    """Keeps other runs out of a workdir.

    Raises:
      UserError: another process that lives holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = Lock(workdir)
            lock.acquire(take_over)
            HELD.append(lock)
            stack.callback(HELD.remove, lock)
            stack.callback(lock.release)
        except UserError:
            raise
        except Exception as error:  # of many types, such as on a file system without locks
            problem = storage_problem(error) or one_line(error)[:160]
            log.warning(
                "%s is not locked against other runs: %s can't be written (%s)",
                workdir,
                FILE,
                problem,
            )
        yield


def release_all() -> None:
    """For a process that ends at once."""
    for lock in list(HELD):
        lock.release()
