"""A server of files on the loopback that can be told to misbehave."""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import re
import threading


@dataclasses.dataclass
class File:
    """A file on the server, and what the server does wrong with it."""

    body: bytes
    etag: str = ""  # the MD5 of the body by default, as on Google's storage
    breaks_at: tuple[int, ...] = ()  # bytes after which the first answers end
    ignores_range: bool = False
    length: int | None = None  # a wrong Content-Length
    md5: bytes | None = None  # a wrong checksum
    status: int = 200
    location: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        gate = self.server.gate
        if gate is not None:
            gate.wait(10)
        file = self.server.files.get(self.path) or File(b"", status=404)
        if file.location:
            self.answer(302, Location=file.location)
        elif file.status != 200:
            self.answer(file.status)
        else:
            self.send_file(file)

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, file: File):
        digest = base64.b64encode(file.md5 or hashlib.md5(file.body).digest()).decode()
        etag = file.etag or f'"{digest}"'
        headers = dict(ETag=etag, x_goog_hash=f"crc32c=AAAAAA==, md5={digest}") | dict(file.headers)
        if self.headers.get("If-None-Match") == etag:
            return self.answer(304, **headers)
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and self.headers.get("If-Range") == etag and not file.ignores_range:
            start = int(wanted[1])
            headers["Content_Range"] = f"bytes {start}-{len(file.body) - 1}/{len(file.body)}"
        end = len(file.body)
        if file.breaks_at:
            end, *rest = file.breaks_at
            file.breaks_at = tuple(rest)
        body = file.body[start:end]
        length = len(file.body) - start if file.length is None else file.length
        return self.answer(206 if start else 200, body, length, **headers)


class Server(http.server.ThreadingHTTPServer):
    """`files`: path -> File; `requests`: (path, headers) of each one so far."""

    def __init__(self, handler=Handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.files: dict[str, File] = {}
        self.requests: list[tuple[str, dict]] = []
        self.gate: threading.Event | None = None  # answers wait for it
        self.address = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *arguments):
        pass

    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for _, headers in self.requests]


@contextlib.contextmanager
def serving(handler=Handler):
    with Server(handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
