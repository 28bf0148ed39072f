"""How a failure reaches the user: one line on stderr and an exit code, never a traceback by
surprise.
"""

import errno
import os


class UserError(Exception):
    """The input is wrong: the message says what, where, and what to do. Exit code 2."""

    exit_code = 2


class NegativeResult(UserError):
    """The command ran and the answer is no (a non-finite loss, a missing data set). Exit code 1."""

    exit_code = 1


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


def storage_problem(error: BaseException) -> str | None:
    """What is wrong with the disk, where `error` comes from one that is full or can't be written;
    else None.

    Libraries wrap such an OSError, or (TensorStore) give only its text.
    """
    while error is not None:
        for code, meaning in STORAGE_ERRORS.items():
            if isinstance(error, OSError) and error.errno == code:
                return f"{meaning}: {error.filename}" if error.filename else meaning
            if not isinstance(error, OSError) and os.strerror(code) in str(error):
                return meaning
        error = error.__cause__ or error.__context__
    return None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
