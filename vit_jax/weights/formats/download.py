"""Asks a server for a file. It may be slow, broken or hostile, so what it sends is limited in size
and in time.
"""

import functools
import http.client
import io
import pathlib
import re
import shutil
import socket
import ssl
import string
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from vit_jax.errors import Unavailable, UserError, one_line, printable, without_secrets

STALL_S = 60  # without a byte
WINDOW_S = 60  # over which the rate is measured, and in which a server has to answer
LOWEST_RATE = 1024  # bytes/s
REDIRECTS = 5
RESERVE = 2**26  # bytes that stay free on the disk
CHECK = 2**20  # bytes after which the room is looked at again
CHUNK = 2**15  # bytes, which the lowest rate fills within a window
OVERHEAD = 2**24  # bytes between two chunks that are no content, such as headers

MOVED = (301, 302, 303, 307, 308)
NOT_MODIFIED = 304
OUT_OF_RANGE = 416
ABSENT = (403, 404)
BUSY = (408, 429)


class Absent(UserError):
    """The server does not have the file."""


def is_address(path) -> bool:
    return str(path).lower().startswith(("https://", "http://"))


def shown(path) -> str:
    """A path as messages name it: an address without user, password and query."""
    if not is_address(path):
        return without_secrets(str(path))
    quoted = urllib.parse.quote(str(path), safe=string.punctuation, errors="surrogatepass")
    return without_secrets(quoted)


class Progress:
    """How much content has come lately."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.since = time.monotonic()
        self.content = 0
        self.overhead = 0

    def mark(self, size: int) -> None:
        """Notes that `size` bytes of content came."""
        self.content += size
        self.overhead = 0

    def check(self) -> None:
        """Raises TimeoutError if less came than the lowest rate, ValueError if too much else."""
        if self.overhead > OVERHEAD:
            raise ValueError(f"{OVERHEAD:,} bytes came without content")
        if time.monotonic() - self.since < WINDOW_S:
            return
        if self.content < LOWEST_RATE * WINDOW_S:
            raise TimeoutError(f"less than {LOWEST_RATE:,} bytes a second came for {WINDOW_S} s")
        self.restart()


class Checked(io.RawIOBase):
    """A stream that checks the progress before every read."""

    def __init__(self, source: io.RawIOBase, progress: Progress):
        self.source = source
        self.progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self.progress.check()
        count = self.source.readinto(buffer)
        self.progress.overhead += count
        return count

    def close(self) -> None:
        self.source.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """Reads all of it, also the headers, from a `Checked` stream."""

    def __init__(self, progress: Progress, *args, **options):
        super().__init__(*args, **options)
        self.fp = io.BufferedReader(Checked(self.fp.detach(), progress))


class Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens addresses whose answers are checked for progress."""

    def __init__(self, progress: Progress):
        super().__init__()
        self.progress = progress

    def connect(self, kind, *args, **options):
        connection = kind(*args, **options)
        connection.response_class = functools.partial(Answer, self.progress)
        return connection

    def http_open(self, request):
        return self.do_open(functools.partial(self.connect, http.client.HTTPConnection), request)

    def https_open(self, request):
        return self.do_open(functools.partial(self.connect, http.client.HTTPSConnection), request)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect raises an HTTPError."""

    def http_error_302(self, *args):
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def check(url: str) -> None:
    """Raises ValueError, without any secret, if `url` can't be an address."""
    if not re.fullmatch("[!-~]+", url):
        raise ValueError(
            "it has spaces, or control or other characters outside ASCII: percent-encode them"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ValueError("it is not of the form https://HOST[:PORT]/FILE")
    if "@" in parts.netloc:
        raise ValueError("a user or password in an address is not supported")


def must_be_address(url: str) -> None:
    try:
        check(url)
    except ValueError as error:
        raise failure(url, error) from None


def redirected(url: str, location: str) -> str:
    """The address that `url` redirects to; ValueError if it is none, or leaves https."""
    location = urllib.parse.quote(location, safe=string.punctuation, encoding="iso-8859-1")
    target = urllib.parse.urljoin(url, location)
    before = urllib.parse.urlsplit(url).scheme
    after = urllib.parse.urlsplit(target).scheme
    if after not in (before, "https"):
        raise ValueError(f"it redirects from {before} to {after}, which is not allowed")
    check(target)
    return target


def opened(url: str, progress: Progress, headers: dict[str, str]) -> http.client.HTTPResponse:
    """The answer of the server, after redirects.

    Raises:
      OSError, ValueError, HTTPException: there is none, or not one of success, nor that the file
        was not modified or has no such range.
    """
    opener = urllib.request.build_opener(Handler(progress), NoRedirects)
    for _ in range(REDIRECTS + 1):
        progress.restart()
        try:
            request = urllib.request.Request(url, headers=headers)
            return opener.open(request, timeout=STALL_S)
        except urllib.error.HTTPError as error:
            if error.code in (NOT_MODIFIED, OUT_OF_RANGE) and headers:
                return error
            location = error.headers.get("Location")
            if error.code not in MOVED or not location:
                raise
            error.close()
            url = redirected(url, location)
    raise ValueError(f"it redirects more than {REDIRECTS} times")


def declared_size(response: http.client.HTTPResponse) -> int | None:
    """Bytes by the Content-Length; None if there is none."""
    sizes = {size.strip() for size in response.headers.get_all("Content-Length", ())}
    if not sizes:
        return None
    size = sizes.pop()
    if sizes or not re.fullmatch("[0-9]{1,18}", size):
        raise ValueError("the server gives a Content-Length that is not a number")
    return int(size)


def check_room(folder: pathlib.Path, url: str, size: int = 0) -> None:
    """Raises UserError if `size` bytes more do not fit."""
    free = shutil.disk_usage(folder).free
    if free < size + RESERVE:
        raise UserError(
            f"{shown(url)} does not fit in {folder}, where {free / 2**20:,.0f} MiB are free and "
            f"{RESERVE / 2**20:,.0f} MiB must stay free: make room, or set VIT_JAX_CACHE (TMPDIR "
            "for an address with a query) to another folder"
        )


def request(url: str, progress: Progress, headers: dict[str, str]) -> http.client.HTTPResponse:
    """The answer to a request for a file: see `opened`.

    Raises:
      Absent: the server does not have the file.
      Unavailable: it does not answer.
      UserError: anything else is wrong.
    """
    try:
        response = opened(url, progress, headers)
        declared_size(response)  # an answer with a wrong one is as bad as none
        return response
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise failure(url, error) from error


def content(
    url: str, response: http.client.HTTPResponse, progress: Progress, folder: pathlib.Path
) -> Iterator[bytes]:
    """The content of an answer, in parts, as long as what is written fits in `folder`.

    Raises:
      Unavailable: the server is slow, or ends too early.
      UserError: anything else is wrong.
    """
    received = checked = 0
    try:
        expected = declared_size(response)
        check_room(folder, url, expected or 0)
        progress.restart()
        while part := response.read(CHUNK):
            progress.mark(len(part))
            received += len(part)
            if received >= checked:
                check_room(folder, url)
                checked = received + CHECK
            yield part
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise failure(url, error) from error
    if expected not in (None, received):
        raise Unavailable(f"{shown(url)} ended after {received} of {expected} bytes: try again")


def failure(url: str, error: Exception) -> UserError:
    problem = printable(one_line(error))[:160] or type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        error.close()
    return kind_of(error)(f"{shown(url)} can't be fetched ({problem}): check address and network")


def kind_of(error: Exception) -> type[UserError]:
    """Unavailable for what may pass."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code in ABSENT:
            return Absent
        return Unavailable if error.code >= 500 or error.code in BUSY else UserError
    reason = getattr(error, "reason", error)  # of a URLError
    if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
        return UserError
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError
    may_pass = isinstance(reason, (OSError, http.client.IncompleteRead))
    return Unavailable if may_pass else UserError


def has_no_answer(error: UserError) -> bool:
    """Whether a request failed before the server said anything of the file."""
    reason = getattr(error.__cause__, "reason", None)
    return isinstance(error, Unavailable) or isinstance(reason, socket.gaierror)
