"""Lines of JSON over a connection to whoever is there, which may be any program."""

import contextlib
import json
import socket
import time

from vit_jax.errors import printable

LARGEST = 10**9  # number of a process


class Lines:
    """What comes over a connection."""

    def __init__(self, connection: socket.socket, size: int):
        """`size`: the most bytes that wait for the end of a line."""
        self.connection = connection
        self.size = size
        self.rest = b""

    def read(self, seconds: float) -> dict:
        """The object in the next line; ValueError for anything else, OSError if no line comes."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            if len(self.rest) > self.size:
                raise ValueError("the line is too long")
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self.connection.recv(4096)
            if not part:
                raise ConnectionError("the connection ended")
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            message = json.loads(line)
        except RecursionError:
            raise ValueError("the line is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError("the line is not an object")
        return message


def numbers(values) -> list[int]:
    """A list of numbers of processes; ValueError for anything else."""
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise ValueError("these are not whole numbers")
    if any(not 0 <= each < LARGEST for each in values):
        raise ValueError("there are no such processes")
    return values


def shown(text) -> str:
    """What another program says, for a line of ours; ValueError if it is no text."""
    if not isinstance(text, str):
        raise ValueError("this is not text")
    return printable(" ".join(text.split()))[:200]


def wake(connection: socket.socket) -> None:
    """Ends what a thread waits for at a socket."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def send(connection: socket.socket, **message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
