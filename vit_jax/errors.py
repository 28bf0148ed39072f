"""How a failure reaches the user: one line on stderr and an exit code, never a traceback by
surprise.
"""

import contextlib
import errno
import os
import re
import signal
import unicodedata
from collections.abc import Callable, Iterable, Iterator


class UserError(Exception):
    """The input is wrong: the message says what, where, and what to do. Exit code 2."""

    exit_code = 2


class NegativeResult(UserError):
    """The command ran and the answer is no (a non-finite loss, a missing data set). Exit code 1."""

    exit_code = 1


class Unavailable(UserError):
    """Another process, a store or a disk does not answer: the same command continues from the last
    checkpoint, and a launcher may run it again. Exit code 69 (EX_UNAVAILABLE).
    """

    exit_code = 69


class Preempted(Exception):
    """The run was asked to stop, the state is saved, and the same command continues. Exit code 75
    (EX_TEMPFAIL).
    """

    exit_code = 75


# Those that stop a command, and what users call them.
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
SHOW_CURSOR = "\x1b[?25h"
terminal = 2  # file descriptor of stderr; another one while that is held back


def is_ignored(number: int) -> bool:
    """Whether a signal does nothing, such as SIGHUP under nohup."""
    return signal.getsignal(number) is signal.SIG_IGN


def end_on_signals(*numbers: int) -> None:
    """Lets signals end this process at once, with a line.

    As exceptions, they could be swallowed by libraries that are being imported.
    """
    for number in numbers or SIGNALS:
        if not is_ignored(number):
            signal.signal(number, end_on_signal)


def end_on_signal(number: int, frame) -> None:
    say(f"error: stopped by {SIGNALS[number]}: run the same command again")
    os._exit(exit_code_of(number))


def exit_code_of(number: int) -> int:
    """Of a command that is stopped when it has nothing to save."""
    return 128 + number if number == signal.SIGINT else Preempted.exit_code


@contextlib.contextmanager
def handling(numbers: Iterable[int], handler: Callable) -> Iterator[None]:
    """Handles these signals in the body, but for those that are ignored."""
    taken = [number for number in numbers if not is_ignored(number)]
    before = [signal.signal(number, handler) for number in taken]
    try:
        yield
    finally:
        for number, old in zip(taken, before, strict=True):
            signal.signal(number, old)


def say(line: str) -> None:
    """Writes a line to stderr, also while another one is being written."""
    shown = SHOW_CURSOR if os.isatty(terminal) else ""  # a progress bar may have hidden it
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(terminal, f"{shown}{line}\n".encode(errors="backslashreplace"))


STORAGE_ERRORS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than is allowed",
    errno.EACCES: "permission is denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EISDIR: "a folder is in the place of a file",
    errno.ELOOP: "links form a loop",
    errno.ENAMETOOLONG: "a name is too long for the file system",
    errno.EMFILE: "this process has too many open files (raise the limit with ulimit -n)",
    errno.ENFILE: "this machine has too many open files",
}
# Of a disk that gives no answer, whatever is in the file.
LOST = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV}
DENIED = {errno.EACCES, errno.EPERM}
# What XLA, C++ and the system say.
OUT_OF_MEMORY = re.compile("[Oo]ut of memory|std::bad_alloc|[Cc]annot allocate memory")


# How the clients of stores say what the store answered: TensorFlow's, TensorStore's, Google's.
STORE_ANSWER = re.compile(
    r"(?:HTTP response code:? |http_response_code='|^)(\d{3})\b(?=.*(?:gs://|'|/storage/v1/))"
)
ANSWERS = {
    "401": "the store does not accept the credentials",
    "403": "the store denies permission",
    "404": "the store has no such bucket or object",
    "429": "the store had too many requests",
}
# What they say if there was no answer.
NO_ANSWER = re.compile(
    "executing an HTTP request|CURL error|Could not find directory gs://|/storage/v1/"
)


def store_problem(error: BaseException) -> str | None:
    """What is wrong with a store, where `error` comes from one of the clients; else None."""
    text = one_line(error)
    answer = STORE_ANSWER.search(text)
    if answer:
        code = answer[1]
        return f"{ANSWERS.get(code, f'the store answered {code}')}: {text[:300]}"
    if NO_ANSWER.search(text):
        return f"the store can't be used: {text[:300]}"
    if type(error).__module__.startswith("google.auth"):
        return f"no valid credentials for the store: {text[:300]}"
    return None


def storage_problem(error: BaseException) -> str | None:
    """What is wrong with the disk or store, where `error` comes from one that is full or can't be
    used; else None.

    Libraries wrap such an OSError, or (TensorStore) give only its text.
    """
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        problem = None if isinstance(error, UserError) else store_problem(error)
        if problem:
            return problem
        for code, meaning in STORAGE_ERRORS.items():
            if isinstance(error, OSError) and error.errno == code:
                return f"{meaning}: {error.filename}" if error.filename else meaning
            if not isinstance(error, OSError) and os.strerror(code) in str(error):
                return meaning
        error = error.__cause__ or error.__context__
    return None


def read_problem(path, error: BaseException) -> UserError | None:
    """The error to raise if it is the disk or its permissions, not the content, for which `path`
    can't be read; else None.
    """
    code = getattr(error, "errno", None)
    if code in DENIED:
        return UserError(f"{path} can't be read (permission is denied): make it readable")
    if code in LOST:
        return Unavailable(
            f"{path} can't be read ({os.strerror(code)}): check the disk, and run the same command "
            "again"
        )
    return None


def memory_problem(error: BaseException) -> str | None:
    """What is wrong, where `error` means that there is not enough memory; else None."""
    text = one_line(error)
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(text):
        return f"there is not enough memory ({text[:160] or type(error).__name__})"
    return None


def one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())


def escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


# User and password of an address, also if they have a "/", and the query, which may be a signature.
USER = re.compile(r"(?<=://)(?!\[)(?:[^\s/?#]*|[^\s/:?#]*:(?!\d*(?:[/\s]|$))\S*)@")
QUERY = re.compile(
    r"((?:https?|ftp)://[^\s?]*)\?(?!\.\.\.)\S*?(?=['\",:;.)\]]*(?:\s|$))", re.IGNORECASE
)


JOINERS = "\u200c\u200d"  # of letters in Persian and other languages, and of emoji


def without_secrets(text: str) -> str:
    """Text in which https://USER:PASSWORD@HOST/FILE?QUERY is https://...@HOST/FILE?..."""
    return QUERY.sub(r"\1?...", USER.sub("...@", text)) if "://" in text else text


def printable(text: str, kept: str = "\n\t") -> str:
    """Text for a terminal or a log, without secrets: names of files and classes may hold what would
    control a terminal.

    Args:
      kept: characters that are not printable, but fine there.
    """
    text = without_secrets(text)
    if text.isprintable():
        return text
    kept += JOINERS
    return "".join(c if is_harmless(c) or c in kept else escaped(c) for c in text)


def is_harmless(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces
