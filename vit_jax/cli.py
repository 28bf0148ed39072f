"""How every command starts, reports and ends."""

import argparse
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable

import jax
from etils import epath

from vit_jax import errors
from vit_jax.errors import Preempted, UserError, one_line

log = logging.getLogger(__name__)


def check(path: str | None, flag: str = "--json") -> None:
    """Raises UserError where `path` is a folder or lies in none; without a path there is nothing to
    check.
    """
    if path and not epath.Path(path).parent.is_dir():
        raise UserError(
            f"the folder of {flag}={path} does not exist: create it or choose another file"
        )
    if path and epath.Path(path).is_dir():
        raise UserError(f"{flag}={path} is a folder: choose a file")


def replace(path: epath.Path, text: str) -> None:
    """Writes a file at once or not at all."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text)
    fresh.replace(path)


def write(path: str | None, result) -> None:
    """Writes a result, if there is a path for it.

    Raises:
      UserError: it can't be written.
    """
    if not path:
        return
    try:
        epath.Path(path).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"--json={path} can't be written ({error.strerror}): choose another file"
        ) from error


class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: in one line that is the last."""

    def error(self, message: str):
        print(f"error: {message}: see --help", file=sys.stderr)
        sys.exit(UserError.exit_code)


def run(main: Callable[[], None], debug: bool) -> int:
    """Runs `main` and returns the exit code; `debug` lets every exception through with its
    traceback.
    """
    if not debug:
        for library in (
            "absl",
            "asyncio",
        ):  # they would print what is raised to us a second time, with tracebacks
            logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        main()
    except Preempted:
        return Preempted.exit_code
    except UserError as error:
        if debug:
            raise
        print(f"error: {errors.one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "error: interrupted; the last saved checkpoint is whole, and the same command "
            "continues",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    except Exception as error:
        problem = errors.storage_problem(error)
        if debug or problem is None:
            raise
        print(
            f"error: {problem}: earlier checkpoints are intact; mend it or choose another "
            "--workdir, then run the same command again",
            file=sys.stderr,
        )
        return UserError.exit_code
    return 0


class StderrHandler(logging.StreamHandler):
    """Looks up sys.stderr at every line: the progress bar replaces it so that lines pass above the
    bar.
    """

    def __init__(self):
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    @property
    def stream(self):
        return sys.stderr


class FileHandler(logging.StreamHandler):
    """A line that can't be written, because the disk is full, stands on stderr alone."""

    def handleError(self, record):
        pass


@contextlib.contextmanager
def logging_to(workdir: epath.Path | None):
    """Sends the project's log to stderr and to log.txt in `workdir` if there is one.

    Of several processes all but the leading one write logs/process_I.txt instead, and only warnings
    to stderr.
    """
    several = (
        jax.distributed.is_initialized()
    )  # asked before the devices, which some commands do without
    root, index = logging.getLogger("vit_jax"), jax.process_index() if several else 0
    root.setLevel(logging.INFO)
    root.propagate = False
    form = "%(asctime)s %(levelname).1s %(message)s"
    with contextlib.ExitStack() as stack:
        root.handlers[:] = [StderrHandler()]
        root.handlers[0].setFormatter(
            logging.Formatter(form if index == 0 else f"[process {index}] {form}", "%H:%M:%S")
        )
        root.handlers[0].setLevel(logging.INFO if index == 0 else logging.WARNING)
        if workdir is not None:
            path = log_path(workdir, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            root.addHandler(FileHandler(stack.enter_context(path.open("a"))))
            root.handlers[1].setFormatter(logging.Formatter(form, "%H:%M:%S"))
        try:
            yield
        except Exception as error:
            if several and not isinstance(error, Preempted):  # on stderr of many it is hard to find
                log.error(
                    "%s: %s", type(error).__name__, one_line(error), extra=dict(file_only=True)
                )
            raise
        finally:
            root.handlers[:] = root.handlers[:1]


def log_path(workdir: epath.Path, process: int) -> epath.Path:
    return workdir / "logs" / f"process_{process}.txt" if process else workdir / "log.txt"
