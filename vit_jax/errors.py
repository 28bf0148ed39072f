"""How a failure reaches the user: one line on stderr and an exit code, never a traceback by surprise."""

import errno
import signal
import sys
from collections.abc import Callable


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
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
}


def storage_error(error: BaseException) -> OSError | None:
    """The OSError of a full or unwritable disk behind `error` (libraries wrap them), or None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in STORAGE_ERRORS:
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def run(main: Callable[[], None], debug: bool) -> int:
    """Runs `main` and returns the exit code; `debug` lets every exception through with its traceback."""
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
        cause = storage_error(error)
        if debug or cause is None:
            raise
        where = f" at {cause.filename}" if cause.filename else ""
        print(
            f"error: {STORAGE_ERRORS[cause.errno]}{where}: earlier checkpoints are intact; "
            "make room or choose another --workdir, then run the same command again",
            file=sys.stderr,
        )
        return UserError.exit_code
    return 0
