"""Trials with broken and hostile servers of weights, hostile clients of the rendezvous, and where
the coordinator of a job listens.
"""

import contextlib
import io
import json
import os
import pathlib
import random
import resource
import select
import socket
import struct
import tempfile
import threading
import time
import types
from unittest import mock

import numpy as np
from conftest import golden_file
from processes_at_hand import LightJob, error_lines, expect, free_port

from vit_jax import convert
from vit_jax.distributed import peers, rendezvous
from vit_jax.distributed.job import Job
from vit_jax.errors import UserError
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats import download

SECRET = "s3cret"
LIMITS = dict(STALL_S=0.3, WINDOW_S=0.2, LOWEST_RATE=50_000, OVERHEAD=200_000)
UNAVAILABLE = 69
END_S = 30  # in which every command ends


def reset(line: socket.socket) -> None:
    """Ends a connection so that the other side gets an error, not the end of a file."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def drip(line: socket.socket, text: bytes, pause: float = 0.02) -> None:
    """Sends byte by byte, for ever."""
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        for byte in text:
            line.sendall(bytes([byte]))
            time.sleep(pause)


def flood(line: socket.socket, text: bytes) -> None:
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        line.sendall(text)


def head(*headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode("latin-1")


def sized(body: bytes, *headers: str, size=None) -> bytes:
    return head(f"Content-Length: {len(body) if size is None else size}", *headers) + body


def chunked(body: bytes, sizes) -> bytes:
    """The body in chunks of the given sizes, the last of which repeats."""
    text = b""
    while body:
        size = next(sizes)
        text += f"{len(body[:size]):x}\r\n".encode() + body[:size] + b"\r\n"
        body = body[size:]
    return head("Transfer-Encoding: chunked") + text + b"0\r\n\r\n"


class Server:
    """Answers each connection by `behave(line, path)`, which may do anything."""

    def __init__(self, behave):
        self.behave = behave
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(line,), daemon=True).start()

    def answer(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError), line:
            line.settimeout(END_S)
            request = line.recv(65536)
            self.behave(line, request.split()[1].decode())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


# --- what servers of weights do: (behaviour, exit codes that are right); none is a success ---


def bad_length(rng, body):
    size = rng.choice(("abc", "-1", "1e3", "", "1_0", "0x10", "\xb2", "9" * 5000, "5, 5"))
    return lambda line, path: line.sendall(sized(body, size=size)), {2}


def two_lengths(rng, body):
    other = f"Content-Length: {rng.choice((len(body) - 1, len(body) + 1, 0, 'x'))}"
    return lambda line, path: line.sendall(sized(body, other)), {2}


def truncated(rng, body):
    end = rng.randrange(len(body))
    return lambda line, path: line.sendall(sized(body[:end], size=len(body))), {UNAVAILABLE}


def larger_than_the_disk(rng, body):
    size = 10 ** rng.randrange(15, 18)
    return lambda line, path: line.sendall(sized(body, size=size)), {2}


def without_end(rng, body):
    def behave(line, path):
        line.sendall(rng.choice((head(), head("Transfer-Encoding: chunked"))))
        flood(line, b"8000\r\n" + bytes(2**15) + b"\r\n")

    return behave, {2}


def broken_chunks(rng, body):
    text = chunked(body, iter(lambda: rng.randrange(1, 5000), 0))
    end = rng.randrange(text.index(b"\r\n\r\n") + 4, len(text) - 5)
    rest = rng.choice((b"", b"zz\r\n", b"-1\r\n", b"-9\r\n", b"\xff" * 9, b"1" * 70_000))
    return lambda line, path: line.sendall(text[:end] + rest), {2, UNAVAILABLE}


def reset_in_the_middle(rng, body):
    text = sized(body)
    end = rng.randrange(len(text))

    def behave(line, path):
        line.sendall(text[:end])
        reset(line)

    return behave, {UNAVAILABLE}


def silent(rng, body):
    text = sized(body)[: rng.choice((0, 5, 30, 200))]

    def behave(line, path):
        line.sendall(text)
        time.sleep(2)

    return behave, {UNAVAILABLE}


def slow(rng, body):
    start = rng.choice(
        (b"", head()[:9], head()[:-2] + b"X: ", sized(b"", size=10**6), head("A: b"),
         head("Transfer-Encoding: chunked"), head("Transfer-Encoding: chunked") + b"5;x=")
    )  # fmt: skip

    def behave(line, path):
        line.sendall(start)
        drip(line, b"1")

    return behave, {UNAVAILABLE}


def no_content(rng, body):
    """Bytes without end, none of which is content."""
    start, again = rng.choice(
        (
            (b"", b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n"),
            (head("Transfer-Encoding: chunked") + b"0\r\n", b"A: " + b"b" * 999 + b"\r\n"),
            (head("Transfer-Encoding: chunked") + b"-1\r\n", bytes(999)),
            (head()[:-2], b"A: b\r\n"),
            (head()[:-2], b"b"),
        )
    )

    def behave(line, path):
        line.sendall(start)
        flood(line, again)

    return behave, {2, UNAVAILABLE}


def status(rng, body):
    code = rng.choice((300, 400, 401, 403, 404, 408, 410, 418, 429, 451, 500, 502, 503, 504, 599))
    reason = rng.choice(("No", "", "\x1b[2J\x1b]0;owned\x07", "\x9b31m \xe9", "x" * 3000))
    text = head("Content-Length: 0", status=f"{code} {reason}")
    later = code in (408, 429) or code >= 500
    return lambda line, path: line.sendall(text), {UNAVAILABLE if later else 2}


def garbage(rng, body):
    text = rng.choice((b"220 mail ready\r\n", b"\r\n", b"\x16\x03\x01\x02\x00", rng.randbytes(99)))
    return lambda line, path: line.sendall(text), {2, UNAVAILABLE}


def elsewhere(rng, body):
    target = rng.choice(
        (
            f"file:///etc/passwd?{SECRET}",
            f"ftp://u:{SECRET}@127.0.0.1/w.npz",
            f"gopher://{SECRET}.invalid/",
            f"data:,{SECRET}",
            f"javascript:{SECRET}",
            f"http://u:{SECRET}@127.0.0.1/w.npz",
            f"http://[::1/{SECRET}",
            f"http://127.0.0.1:99999/?{SECRET}",
            f"//?{SECRET}",
            "http://",
            f"\x1b[2J?{SECRET}",
            f"/again.npz?{SECRET}",
        )
    )
    code = rng.choice((301, 302, 303, 307, 308))

    def behave(line, path):
        line.sendall(head(f"Location: {target}", "Content-Length: 0", status=f"{code} Moved"))

    return behave, {2}


SERVERS = (
    bad_length,
    two_lengths,
    truncated,
    larger_than_the_disk,
    without_end,
    broken_chunks,
    reset_in_the_middle,
    silent,
    slow,
    no_content,
    status,
    garbage,
    elsewhere,
)
SAYS = {"larger_than_the_disk": "does not fit in", "without_end": "does not fit in"}
KINDS = (*SERVERS, *[None] * 5)  # None: the address is wrong


def bad_address(rng, port: int) -> str:
    """What can't be an address, or has no server."""
    bad = rng.choice((" ", "\n", "\x1b[2J", "\x00", "\u202e", "\xe9", "\udc80", "\t"))
    return rng.choice(
        (
            f"http://127.0.0.1:{port}/a{bad}b.npz?sig={SECRET}",
            f"http://127.0.0.1:{port}/w.npz?sig={SECRET}{bad}{SECRET}",
            f"http://127.0.0.1{bad}:{port}/w.npz?{SECRET}",
            f"http://u:{SECRET}@127.0.0.1:{port}/w.npz",
            f"http://u:{SECRET}/{SECRET}@127.0.0.1:{port}/w.npz",
            f"HTTP://{SECRET}@127.0.0.1:{port}/w.npz?{SECRET}",
            f"http://127.0.0.1:{rng.choice(('65536', '99999999', '-1', 'x', '0'))}/w.npz?{SECRET}",
            f"http://?{SECRET}",
            f"https:///w.npz?{SECRET}",
            f"http://[::1/w.npz?{SECRET}",
            f"http://{'a' * 64}.invalid/w.npz?{SECRET}",
            f"http://..invalid/w.npz?{SECRET}",
            f"http://127.0.0.1:1/w.npz?{SECRET}",
            f"https://127.0.0.1:{port}/w.npz?{SECRET}",  # the server does not speak TLS
            f"ftp://u:{SECRET}@127.0.0.1/w.npz?{SECRET}",
        )
    )


@contextlib.contextmanager
def lower_limits(folder: pathlib.Path):
    """Short time-outs, and a disk on which 4 MiB may be written."""
    folder.mkdir()

    def disk_usage(path):
        used = sum(file.stat().st_size for file in pathlib.Path(path).iterdir())
        return types.SimpleNamespace(free=download.RESERVE + 2**22 - used)

    with (
        mock.patch.multiple(download, shutil=mock.Mock(disk_usage=disk_usage), **LIMITS),
        mock.patch.object(tempfile, "tempdir", str(folder)),
        mock.patch.dict(os.environ, VIT_JAX_CACHE=str(folder.parent / "cache")),
    ):
        yield


def ends_well(address: str, folder: pathlib.Path, codes: set[int], kind: str) -> None:
    """Runs a command on these weights: one line, without the secret, and nothing is written."""
    err = io.StringIO()
    begun = time.monotonic()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        code = convert.main([address, str(folder / "new.npz")])
    text = err.getvalue()
    what = f"{kind}: {address!r}: exit {code}: {text!r}"
    expect(code in codes and SAYS.get(kind, "") in text, what)
    expect(len(error_lines(text)) == 1 and text.count("\n") == 1, what)
    expect(len(text) < 700 and text[:-1].isprintable() and SECRET not in text, what)
    expect(time.monotonic() - begun < END_S, f"hung: {what}")
    expect(not any((folder / "tmp").iterdir()), f"files are left: {what}")
    expect(not (folder / "new.npz").exists(), what)


def weights_servers(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Servers that are broken or hostile, and addresses that are none."""
    body = golden_file(folder, "vit_token_rep").read_bytes()
    counts = dict(tried=count, addresses=0)
    with lower_limits(folder / "tmp"):
        for number in range(count):
            make = KINDS[number % len(KINDS)]
            behave, codes = make(rng, body) if make else (garbage(rng, body)[0], {2, UNAVAILABLE})
            query = rng.choice((f"?X-Goog-Signature={SECRET}", ""))  # without it, it is kept
            with Server(behave) as server:
                name = rng.choice(("w.npz", "w.safetensors", "folder"))
                address = f"http://127.0.0.1:{server.port}/{name}{query}"
                if make is None:
                    address = bad_address(rng, server.port)
                    counts["addresses"] += 1
                ends_well(address, folder, codes, make.__name__ if make else "address")
    return counts


# --- what a server may do ---


def good_answer(rng, body: bytes) -> bytes:
    return rng.choice(
        (
            sized(body, "Content-Type: text/html"),
            sized(body, f"Content-Length: {len(body)}"),
            sized(body) + rng.randbytes(rng.randrange(1, 999)),  # more than it declares
            head("Connection: close") + body,
            chunked(body, iter(lambda: rng.randrange(1, 20_000), 0)),
            head(status="100 Continue") + sized(body),
        )
    )


def good_server(rng, body: bytes):
    """After a few redirects, and in a few parts, it sends the file."""
    text = good_answer(rng, body)
    hops = rng.randrange(download.REDIRECTS + 1)
    cut = rng.randrange(len(text))

    def behave(line, path):
        number = int(path.split("-")[1].split(".")[0])
        if number < hops:
            target = f"/w-{number + 1}.npz?a b\xe9"
            line.sendall(head(f"Location: {target}", status=f"{rng.choice((301, 302, 308))} Go"))
            return
        line.sendall(text[:cut])
        time.sleep(rng.choice((0, 0.01)))
        line.sendall(text[cut:])

    return behave


def good_servers(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Weights from servers that are unusual but right are those of the file."""
    path = golden_file(folder, "vit_token_rep")
    wanted = pretrained.read(path)
    with lower_limits(folder / "tmp"):
        for _ in range(count):
            with Server(good_server(rng, path.read_bytes())) as server:
                address = f"http://127.0.0.1:{server.port}/w-0.npz"
                query = rng.choice((f"?sig={SECRET}", ""))
                weights = pretrained.read(f"{address}{query}")
            expect(weights.path == address + ("?..." if query else ""), weights.path)
            expect(weights.params.keys() == wanted.params.keys(), "other parameters")
            same = [np.array_equal(weights.params[k], v) for k, v in wanted.params.items()]
            expect(all(same), "other values")
            expect(not any((folder / "tmp").iterdir()), "files are left")
    return dict(tried=count)


# --- clients of the rendezvous that are no processes of the job ---


def hello(**more) -> bytes:
    return json.dumps(dict(index=1, count=2, host="x") | more).encode() + b"\n"


def wrong_hello(rng) -> bytes:
    control = "\x1b[2J\n\x07"
    return rng.choice(
        (
            rng.randbytes(rng.randrange(1, 2000)),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\n" * 99,
            b"[" * 990 + b"\n",
            b'{"index":' * 110 + b"\n",
            b"[1]\n",
            b"null\n",
            b"NaN\n",
            b'{"index": NaN, "count": 2, "host": "x"}\n',
            b'{"index": 1e999, "count": 2, "host": "x"}\n',
            b'{"index": ' + b"9" * 900 + b', "count": 2, "host": "x"}\n',
            hello(index=rng.choice((-1, -(10**9), 1.5, 1.0, True, "1", [1], {}, None))),
            hello(count=rng.choice((-2, 2.0, 3, 10**8, True, "2", [2], None))),
            hello(host=rng.choice((None, 1, [control], {control: control}))),
            hello(host=control * 50, count=3),
            hello(index=0, host=control),
            b"x" * rng.choice((999, 1001, 10**6)),
        )
    )


def short_visit(rng, address) -> None:
    with socket.create_connection(address, 5) as line:
        line.sendall(wrong_hello(rng))
        if rng.random() < 0.3:
            reset(line)


def crowd(rng, address) -> list[socket.socket]:
    """More connections than files may be open, none of which says anything."""
    lines = []
    with contextlib.suppress(OSError):
        for _ in range(150):
            lines.append(socket.create_connection(address, 5))
    return lines


def slow_line(rng, address) -> None:
    """A line that never ends: it has to be hung up on."""
    with socket.create_connection(address, 5) as line:
        for _ in range(500):
            line.sendall(b"[")
            time.sleep(0.01)
            if select.select([line], [], [], 0)[0]:
                return
    expect(False, "a slow line is listened to for 5 s")


@contextlib.contextmanager
def few_files():
    """Lets this process open 250 files more than it has; few enough for a crowd to matter."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 250, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def listening():
    """Short pauses; what is said must be short and printable, and no thread may fail."""
    said = []
    uncaught = []
    with (
        mock.patch.multiple(rendezvous, CONNECT_S=0.2, RETRY_S=0.02, NEWS_S=0.02),
        mock.patch.multiple(peers, LINE_S=0.002, say=said.append),
        mock.patch.object(threading, "excepthook", uncaught.append),
    ):
        yield
    expect(not uncaught, uncaught)
    odd = [line for line in said if not line.isprintable() or len(line) > 700]
    expect(not odd, odd)


class Meeting(threading.Thread):
    """A process of the job."""

    def __init__(self, port: int, index: int):
        super().__init__(daemon=True)
        self.job = Job(f"127.0.0.1:{port}", 2, index)
        self.problem: Exception | None = None
        self.start()

    def run(self):
        try:
            rendezvous.meet(self.job, END_S)
        except Exception as error:
            self.problem = error


def wait_for_port(address) -> None:
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(address, 5):
            return
        time.sleep(0.002)


def disturbed(rng, kind) -> None:
    """A rendezvous of two processes, before the second of which strangers come."""
    address = ("127.0.0.1", free_port())
    zero = Meeting(address[1], 0)
    wait_for_port(address)
    guests = kind(rng, address) or []
    one = Meeting(address[1], 1)
    for process in (zero, one):
        process.join(END_S + 5)
        expect(not process.is_alive(), f"{kind.__name__}: process {process.job.index} hangs")
        expect(process.problem is None, f"{kind.__name__}: {process.problem}")
    for guest in guests:
        guest.close()


def strangers(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Strangers at the rendezvous: the job starts, and says only what can be printed."""
    kinds = (*[short_visit] * 6, slow_line, crowd)
    with listening(), few_files():
        for number in range(count):
            disturbed(rng, kinds[number % len(kinds)])
    return dict(tried=count)


# --- strangers at the place of process 0 ---


def wrong_news(rng) -> bytes:
    control = "\x1b[2J\n\x07"
    values = (None, 1, "x", [None], ["1"], [1.5], [float("nan")], {}, [-1], [10**12], True)
    return rng.choice(
        (
            rng.randbytes(rng.randrange(1, 2000)),
            b"220 mail ready\r\n",
            b"[" * 100_000 + b"\n",
            b"x" * (2**21),
            b"[1]\n",
            json.dumps(dict(missing=rng.choice(values))).encode() + b"\n",
            json.dumps(dict(problem=rng.choice((1, None, [control], control)))).encode() + b"\n",
            json.dumps(dict(conflict=rng.choice((1, None, [control])))).encode() + b"\n",
        )
    )


def impostors(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """Another program listens where process 0 should: one line within the time."""
    with listening():
        for number in range(count):
            text = b"" if number % 4 == 0 else wrong_news(rng)

            def behave(line, path, text=text):
                line.sendall(text)
                drip(line, b"1") if not text else time.sleep(rng.choice((0, 0.1)))

            with Server(behave) as server:
                job = Job(f"127.0.0.1:{server.port}", 2, 1)
                begun = time.monotonic()
                try:
                    rendezvous.meet(job, 0.3)
                    problem = "joined"
                except UserError as error:
                    problem = str(error)
            expect(problem.startswith("process 1 "), f"{text[:99]}: {problem}")
            expect(problem.isprintable(), f"{text[:99]}: {problem!r}")
            expect(time.monotonic() - begun < 5, f"{text[:99]}: longer than the time-out")
    return dict(tried=count)


# --- where the coordinator listens ---


def listens_at(port: int) -> set[str]:
    """Numeric addresses at which some process of this machine listens on `port`."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state != "0A" or int(address.split(":")[1], 16) != port:
                continue
            words = bytes.fromhex(address.split(":")[0])
            network = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            found.add(socket.inet_ntop(family, network).removeprefix("::ffff:"))
    return found


class JobAt(LightJob):
    """A job whose coordinator is expected at `host`."""

    def variables(self) -> dict[str, str]:
        return dict(VIT_JAX_COORDINATOR=f"{self.host}:{self.port}")


HOSTS = {"localhost": {"127.0.0.1"}, "127.0.0.1": {"127.0.0.1"}, "[::1]": {"::1"}}


def coordinators(rng: random.Random, folder: pathlib.Path, count: int) -> dict:
    """While a job of two processes runs, its port listens at its own address only."""
    counts = dict(tried=count)
    for number in range(count):
        host = (*HOSTS, socket.gethostname())[number % (len(HOSTS) + 1)]
        job = JobAt(folder / f"run_{number}", 2, steps=20)
        job.host = host
        job.port = free_port()
        job.start()
        job.wait_for_steps(1)
        found = listens_at(job.port)
        ends = job.finish()
        expect([code for code, _ in ends] == [0, 0], ends)
        expect(found, f"{host}: nothing listens on the port")
        expect(found == HOSTS.get(host, found), f"{host}: it listens at {found}")
        name = "by_name" if host not in HOSTS else "at_loopback"
        counts[name] = counts.get(name, 0) + 1
    return counts
