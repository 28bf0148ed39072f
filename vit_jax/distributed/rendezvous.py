"""The rendezvous: the processes of a job find each other before JAX joins them.

JAX waits in silence until all have come, and its coordinator can't be asked who has. So process 0
first listens at the same address itself. The others connect, say who they are, and hear who is
missing, in lines of JSON. When all have come, process 0 frees the port for JAX.
"""

import contextlib
import errno
import os
import socket
import threading
import time

from vit_jax.distributed import peers
from vit_jax.distributed.job import (
    COORDINATOR,
    COUNT,
    INDEX,
    START_TIMEOUT,
    Job,
    bind_address,
)
from vit_jax.distributed.lines import Lines, numbers, send, shown, wake
from vit_jax.errors import UserError

RETRY_S = 0.5
CONNECT_S = 5
PORT_S = 30  # for another program to leave the port of process 0
NEWS_S = 5  # between two messages to a process that waits
SILENCE_S = 30  # after which process 0 counts as lost
NAMED = 4  # hosts in a line
FAREWELL_S = 5  # for the last message to each process
STRANGERS = 64  # connections at a time that have not said who they are
HELLO_SIZE = 1000  # bytes
NEWS_SIZE = 2**20
SILENT = "what listens there does not answer as process 0 does"


def meet(job: Job, seconds: int) -> None:
    """Returns when all processes of the job have called this; says every ten seconds who has not.

    Raises:
      UserError: not all came within `seconds`, or they disagree about the job.
    """
    place = Leader(job) if job.index == 0 else Follower(job)
    deadline = time.monotonic() + seconds

    def describe() -> str:
        rest = max(deadline - time.monotonic(), 0)
        return (
            f"process {job.index} of {job.count}: {place.status()}; gives up in {rest:.0f} s "
            f"({START_TIMEOUT}){job.hint}"
        )

    with peers.awaited(describe):
        complete = place.wait(deadline)
    if not complete:
        raise UserError(
            f"{place.failure(seconds)}; to wait longer, set {START_TIMEOUT}=SECONDS{job.hint}"
        )


class Leader:
    """Process 0: admits the others, and tells each of them who is missing."""

    def __init__(self, job: Job):
        self.job = job
        self.hosts = {0: socket.gethostname()}  # of the processes that are here
        self.refused = ""
        self.gave_up = False
        self.is_over = False
        self.strangers: dict[socket.socket, None] = {}  # from the oldest to the newest
        self.talks: list[threading.Thread] = []
        self.changed = threading.Condition()
        self.listener: socket.socket | None = None

    def missing(self) -> list[int]:
        return [i for i in range(self.job.count) if i not in self.hosts]

    def wait(self, deadline: float) -> bool:
        self.listener = self.listen(min(deadline, time.monotonic() + PORT_S))
        threading.Thread(target=self.accept, daemon=True).start()
        with self.changed:
            complete = self.changed.wait_for(
                lambda: not self.missing(), deadline - time.monotonic()
            )
            self.gave_up = not complete
            self.is_over = True
            waiting = [self.listener, *self.strangers]
            talks = self.talks
        for each in waiting:  # `accept` would keep the port
            wake(each)
        self.listener.close()
        if complete:
            last = time.monotonic() + FAREWELL_S
            for talk in talks:
                talk.join(max(last - time.monotonic(), 0))
        return complete

    def listen(self, deadline: float) -> socket.socket:
        """A socket at the port of this process; UserError if it can't be had. A process of the job
        before may still end.
        """
        while True:
            try:
                return server(self.job)
            except (OSError, OverflowError) as error:
                code = getattr(error, "errno", None)
                if code != errno.EADDRINUSE or time.monotonic() > deadline:
                    problem = os.strerror(code) if code else str(error)
                    raise UserError(
                        f"process 0 can't listen on {self.job.address} ({problem}): choose a free "
                        f"port in {COORDINATOR}"
                    ) from error
            time.sleep(RETRY_S)

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed, or too many files are open for now
                if self.is_over:
                    return
                time.sleep(RETRY_S)
                continue
            self.welcome(connection)

    def welcome(self, connection: socket.socket) -> None:
        """Begins to talk to a stranger, for whom the oldest one has to go if there are too many."""
        talk = threading.Thread(target=self.talk, args=(connection,), daemon=True)
        with self.changed:
            self.strangers[connection] = None
            talk.start()
            self.talks = [*filter(threading.Thread.is_alive, self.talks), talk]
            if len(self.strangers) > max(self.job.count, STRANGERS):
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                wake(oldest)

    def talk(self, connection: socket.socket) -> None:
        """Counts a process as here until it goes away or all have come."""
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                index, count, host = read_hello(connection)
            finally:
                with self.changed:
                    self.strangers.pop(connection, None)
            connection.settimeout(CONNECT_S)
            problem = self.admit(index, count, host)
            if problem:
                return send(connection, **problem)
            try:
                self.tell(connection)
            finally:
                with self.changed:
                    if self.missing():
                        del self.hosts[index]

    def admit(self, index: int, count: int, host: str) -> dict[str, str] | None:
        """Notes that a process is here; else says what is wrong: a `conflict` never passes."""
        with self.changed:
            if count != self.job.count or not 0 < index < count:
                self.refused = f"; refused {index} of {count} on {host}: {COUNT} must be the same"
                return dict(conflict=f"process 0 on {self.hosts[0]} expects {self.job.count}")
            if index in self.hosts:
                self.refused = f"; refused a second {index} on {host}: {INDEX} must differ"
                return dict(problem=f"process {index} is there already, from {self.hosts[index]}")
            self.hosts[index] = host
            self.changed.notify_all()
        return None

    def tell(self, connection: socket.socket) -> None:
        """Sends who is missing, until all are here or process 0 gives up."""
        while not self.gave_up:
            with self.changed:
                missing = self.missing()
            send(connection, missing=missing)
            if not missing:
                return
            with self.changed:
                self.changed.wait_for(lambda: not self.missing(), NEWS_S)

    def status(self) -> str:
        if self.listener is None:
            return f"waits for another program to leave the port of {self.job.address}"
        with self.changed:
            hosts = sorted(self.hosts.items())[1:]
        here = [f"{index} on {host}" for index, host in hosts[:NAMED]]
        if len(hosts) > NAMED:
            here.append(f"{len(hosts) - NAMED} more")
        came = f"; here: {', '.join(here)}" if here else ""
        return f"waits at {self.job.address} for {peers.names(self.missing())}{came}{self.refused}"

    def failure(self, seconds: int) -> str:
        return (
            f"not all {self.job.count} processes joined process 0 at {self.job.address} within "
            f"{seconds} s ({peers.names(self.missing())} did not come{self.refused}): check "
            "that all were started, can reach this address, and have the same number of processes"
        )


class Follower:
    """Any other process: comes to process 0, as often as necessary."""

    def __init__(self, job: Job):
        self.job = job
        self.missing: list[int] = []  # that process 0 waits for
        self.problem: str | None = SILENT

    def wait(self, deadline: float) -> bool:
        host, port = self.job.address.rsplit(":", 1)
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as line:
                    if self.listen(line, deadline):
                        return True
            except (OSError, OverflowError) as error:
                self.problem = connection_problem(error, host)
            time.sleep(RETRY_S)
        return False

    def listen(self, line: socket.socket, deadline: float) -> bool:
        """Whether process 0 says that all are here, before the connection or the time ends."""
        before = self.problem
        self.problem = SILENT
        send(line, index=self.job.index, count=self.job.count, host=socket.gethostname())
        lines = Lines(line, NEWS_SIZE)
        with contextlib.suppress(OSError, ValueError):  # silence, a reset, or another language
            while True:
                news = lines.read(min(SILENCE_S, deadline - time.monotonic()))
                if "conflict" in news:
                    raise UserError(
                        f"process {self.job.index} was started as one of {self.job.count}, but "
                        f"{shown(news['conflict'])}: give all processes the same {COUNT}"
                    )
                self.missing = numbers(news.get("missing", []))
                self.problem = shown(news["problem"]) if "problem" in news else None
                if self.problem is None and not self.missing:
                    return True
                if time.monotonic() > deadline:
                    return False
        if self.problem is None:
            self.problem = "process 0 ended the connection"
        if self.problem == SILENT and time.monotonic() > deadline:
            self.problem = before  # the time was too short for an answer
        return False

    def status(self) -> str:
        if self.problem:
            return f"can't reach process 0 at {self.job.address} yet ({self.problem})"
        return f"connected to {self.job.address}, waits for {peers.names(self.missing)}"

    def failure(self, seconds: int) -> str:
        job = self.job
        if self.problem:
            return (
                f"process {job.index} can't reach the coordinator, process 0 at {job.address}, "
                f"within {seconds} s ({self.problem}): start process 0 there and no other program, "
                f"open the port, or correct {COORDINATOR}"
            )
        return (
            f"process {job.index} of {job.count} reached {job.address}, but "
            f"{peers.names(self.missing)} did not come within {seconds} s: check that all "
            "were started and can reach this address"
        )


def read_hello(connection: socket.socket) -> tuple[int, int, str]:
    """(index, count, host) of a process that comes; ValueError if it is none."""
    hello = Lines(connection, HELLO_SIZE).read(CONNECT_S)
    index, count = numbers([hello.get("index"), hello.get("count")])
    if not index < count:
        raise ValueError("no job has such a process")
    return index, count, shown(hello.get("host"))


def server(job: Job) -> socket.socket:
    """Listens where JAX's coordinator will."""
    host, port = bind_address(job.address).rsplit(":", 1)
    options = dict(backlog=max(job.count, 128))
    if host == "[::]" and socket.has_dualstack_ipv6():
        options |= dict(family=socket.AF_INET6, dualstack_ipv6=True)
    elif host == "[::]":
        host = ""
    elif host.startswith("["):
        options |= dict(family=socket.AF_INET6)
    return socket.create_server((host.strip("[]"), int(port)), **options)


def connection_problem(error: Exception, host: str) -> str:
    """What a user can do something about."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} does not resolve"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S} s, perhaps because of a firewall"
    if isinstance(error, ConnectionRefusedError):
        return "Connection refused: nothing listens there"
    return getattr(error, "strerror", None) or str(error)
