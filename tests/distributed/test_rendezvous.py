"""How processes wait for each other: as threads here, over real sockets."""

import contextlib
import json
import logging
import socket
import threading
import time

import pytest

from vit_jax.distributed import peers, rendezvous
from vit_jax.distributed.job import Job
from vit_jax.errors import UserError


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record):
        self.seen.append(record.getMessage())

    def wait_for(self, *parts: str) -> None:
        """Returns when a line has all parts."""
        while not any(all(part in line for part in parts) for line in self.seen):
            time.sleep(0.01)


@pytest.fixture
def lines(monkeypatch):
    """What is said, every 20 ms instead of every ten seconds."""
    monkeypatch.setattr(peers, "LINE_S", 0.02)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.02)
    monkeypatch.setattr(rendezvous, "NEWS_S", 0.02)
    handler = Lines()
    peers.project.addHandler(handler)
    yield handler
    peers.project.removeHandler(handler)


class Process(threading.Thread):
    """A process that comes to the rendezvous."""

    def __init__(self, address: str, count: int, index: int, seconds: int = 60, hint: str = ""):
        super().__init__(daemon=True)
        self.job = Job(address, count, index, hint=hint)
        self.seconds = seconds
        self.error = ""
        self.start()

    def run(self):
        try:
            rendezvous.meet(self.job, self.seconds)
        except UserError as error:
            self.error = str(error)

    def end(self) -> str:
        self.join(60)
        assert not self.is_alive()
        return self.error


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def test_each_says_for_whom_it_waits_until_all_are_here(lines):
    address = free_address()
    two = Process(address, 4, 2)
    lines.wait_for(f"process 2 of 4: can't reach process 0 at {address} yet (Connection refused")
    zero = Process(address, 4, 0, hint="; MEGASCALE")
    host = socket.gethostname()
    lines.wait_for(
        f"process 0 of 4: waits at {address} for processes 1, 3; here: 2 on {host}",
        "; gives up in ",
        " s (VIT_JAX_START_TIMEOUT); MEGASCALE",
    )
    lines.wait_for(f"process 2 of 4: connected to {address}, waits for processes 1, 3; gives up")
    three = Process(address, 4, 3)
    lines.wait_for("process 2 of 4: ", "waits for process 1;")
    one = Process(address, 4, 1)
    assert [process.end() for process in (zero, one, two, three)] == [""] * 4
    socket.create_server(("localhost", int(address.split(":")[1]))).close()  # the port is free


def test_a_process_that_goes_away_is_missing_again(lines):
    address = free_address()
    zero = Process(address, 3, 0)
    lines.wait_for("for processes 1, 2;")
    with socket.create_connection(("localhost", int(address.split(":")[1]))) as connection:
        connection.sendall(json.dumps(dict(index=1, count=3, host="far")).encode() + b"\n")
        lines.wait_for("for process 2; here: 1 on far")
    lines.seen.clear()
    lines.wait_for("for processes 1, 2;")
    others = [Process(address, 3, index) for index in (1, 2)]
    assert [process.end() for process in (zero, *others)] == [""] * 3


def test_processes_that_disagree_are_named(lines):
    address = free_address()
    zero = Process(address, 3, 0)
    one = Process(address, 3, 1)
    lines.wait_for("process 1 of 3: connected")
    assert (
        f"started as one of 9, but process 0 on {socket.gethostname()} expects 3"
        in Process(address, 9, 2).end()
    )
    lines.wait_for("process 0 of 3", "refused 2 of 9 on", "VIT_JAX_NUM_PROCESSES must be the same")
    assert "process 1 is there already, from" in Process(address, 3, 1, seconds=1).end()
    lines.wait_for("process 0 of 3", "refused a second 1 on", "VIT_JAX_PROCESS_ID must differ")
    assert Process(address, 3, 2).end() == zero.end() == one.end() == ""


def test_what_comes_by_does_not_disturb(lines):
    address = free_address()
    zero = Process(address, 2, 0)
    lines.wait_for("for process 1")
    for text in (
        b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"index": "x"}\n', b"\xff\n", b"[" * 999 + b"\n",
        b'{"index": 1.0, "count": 2, "host": "x"}\n', b'{"index": 1, "count": 2, "host": ["x"]}\n',
        b'{"index": NaN, "count": 2, "host": "x"}\n', b'{"index": -1, "count": 2, "host": "x"}\n',
    ):  # fmt: skip
        with socket.create_connection(("localhost", int(address.split(":")[1]))) as connection:
            connection.sendall(text)
    assert Process(address, 2, 1).end() == zero.end() == ""


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("no-such-host.invalid:1", "the name no-such-host.invalid does not resolve"),
        ("localhost:1", "Connection refused"),
    ],
)
def test_a_leader_that_can_not_be_reached_is_named(address, problem, lines):
    process = Process(address, 2, 1, seconds=1)
    lines.wait_for(problem)
    error = process.end()
    assert error.startswith(f"process 1 can't reach the coordinator, process 0 at {address}")
    assert problem in error and "to wait longer, set VIT_JAX_START_TIMEOUT=SECONDS" in error


@pytest.mark.parametrize("answer", [b"", b"220 mail ready\r\n", b"220\n"])
def test_another_program_at_the_port_is_noticed(answer, lines):
    with socket.create_server(("localhost", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        address = f"localhost:{server.getsockname()[1]}"
        assert "does not answer as process 0 does" in Process(address, 2, 1, seconds=1).end()
        zero = Process(address, 2, 0, seconds=1)
        lines.wait_for("process 0 of 2: waits for another program to leave the port of")
        assert "(Address already in use): choose a free port" in zero.end()
        server.shutdown(socket.SHUT_RDWR)


def test_who_did_not_come_is_in_the_error(lines):
    address = free_address()
    zero = Process(address, 3, 0, seconds=1)
    one = Process(address, 3, 1, seconds=1)
    assert f"not all 3 processes joined process 0 at {address} within 1 s" in zero.end()
    assert "process 2 did not come" in zero.error or "processes 1, 2 did not come" in zero.error
    assert one.end().startswith("process 1 ")


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([3], "process 3"),
        ([2, 1], "processes 1, 2"),
        ([1, 2, 3, 7], "processes 1-3, 7"),
        ([0, 2, 3, 5, 6, 7], "processes 0, 2, 3, 5-7"),
    ],
)
def test_many_processes_in_few_words(indices, text):
    assert peers.names(indices) == text
