"""How a failure reaches the user: one line on stderr and an exit code, never a traceback by surprise."""

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable


class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: in one line that is the last."""

    def error(self, message: str):
        print(f"error: {message}: see --help", file=sys.stderr)
        sys.exit(UserError.exit_code)


class UserError(Exception):
    """The input is wrong: the message says what, where, and what to do. Exit code 2."""

    exit_code = 2


class NegativeResult(UserError):
    """The command ran and the answer is no (a non-finite loss, a missing data set). Exit code 1."""

    exit_code = 1


class Preempted(Exception):
    """SIGTERM came, the state is saved, and the same command continues the run. Exit code 75 (EX_TEMPFAIL)."""

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
    """What is wrong with the disk, where `error` comes from one that is full or can't be written; else None.

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


def run(main: Callable[[], None], debug: bool) -> int:
    """Runs `main` and returns the exit code; `debug` lets every exception through with its traceback."""
    if not debug:
        for library in ("absl", "asyncio"):  # they would print what is raised to us a second time, with tracebacks
            logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        main()
    except Preempted:
        return Preempted.exit_code
    except UserError as error:
        if debug:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the last saved checkpoint is whole, and the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        problem = storage_problem(error)
        if debug or problem is None:
            raise
        print(
            f"error: {problem}: earlier checkpoints are intact; mend it or choose another --workdir, then run the same "
            "command again",
            file=sys.stderr,
        )
        return UserError.exit_code
    return 0
