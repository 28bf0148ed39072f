"""How a failure reaches the user: one line on stderr and an exit code, never a traceback by
surprise.
"""

import errno
import os
import re


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
    """SIGTERM came, the state is saved, and the same command continues the run. Exit code 75
    (EX_TEMPFAIL).
    """

    exit_code = 75


STORAGE_ERRORS = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than is allowed",
    errno.EACCES: "permission is denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
}


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
    while error is not None:
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


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
