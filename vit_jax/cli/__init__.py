"""How every command starts, writes and ends: `log.py` where it logs, `spool.py` how it writes to a
store, `objects.py` the client of stores.

A command is a `Command`: its arguments, the function that does the work, and what is true after it
was stopped. It ends with exit code 0 (done), 1 (the answer is no), 2 (the input is wrong), 69
(something does not answer), 75 (preempted, and saved) or 130 (interrupted). The last line on stderr
says what is wrong.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

from etils import epath

from vit_jax import config as configs
from vit_jax import errors
from vit_jax.cli import objects, quiet
from vit_jax.cli.log import logging_to as logging_to  # cli.logging_to is what commands call
from vit_jax.cli.log import restored, silent
from vit_jax.errors import NegativeResult, Preempted, Unavailable, UserError, one_line, printable

WEIGHTS = "file, folder, workdir or address, or a name such as augreg/B_16-384 or hf:ORG/NAME"
CLEAN_UP_S = 3
TALKATIVE = ("absl", "asyncio")  # print what is raised to us a second time

# --- from arguments to an exit code ---


class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: in one line, which is the last."""

    def error(self, message: str):
        print(f"error: {printable(one_line(message))}: see --help", file=sys.stderr)
        sys.exit(UserError.exit_code)


def check_encoding() -> None:
    """Raises UserError if Python would take names of files and classes for others."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        raise UserError(
            f"Python reads names of files in {encoding}, which gives classes wrong names: set "
            "PYTHONUTF8=1, or a locale with UTF-8"
        )


class Interrupt:
    """What Ctrl-C does to a command: it is an exception, for what has to be cleaned up, and ends
    the process soon if a library swallows that.
    """

    def __init__(self, recovery: str):
        self.line = f"error: interrupted: {recovery}"
        self.timer = threading.Timer(CLEAN_UP_S, self.end)
        self.timer.daemon = True
        if signal.getsignal(signal.SIGINT) is errors.end_on_signal:
            signal.signal(signal.SIGINT, self)

    def over(self) -> None:
        self.timer.cancel()
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __call__(self, number: int, frame) -> None:
        if self.timer.is_alive() or is_importing(frame):
            self.end()
        self.timer.start()
        raise KeyboardInterrupt

    def end(self) -> None:
        errors.say(self.line)
        os._exit(128 + signal.SIGINT)


def is_importing(frame) -> bool:
    """Whether a module is being imported, where libraries show or swallow exceptions."""
    while frame:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def run(work: Callable[[], None], debug: bool, recovery: str = "run the same command again") -> int:
    """Calls `work` and returns the exit code; `debug` lets exceptions through with a traceback.

    Args:
      recovery: what is true, and what to do, after an interruption or on a full disk.
    """
    objects.limit_retries()
    quiet.begin()
    interrupt = Interrupt(recovery)
    if not debug:
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        check_encoding()
        work()
        if sys.stdout:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        ending = ending_of(error, recovery)
        if ending is None or (debug and not isinstance(error, KeyboardInterrupt | Preempted)):
            raise
        line, code = ending
        if line:
            with contextlib.suppress(OSError):  # the terminal was closed
                print(f"error: {printable(line)}", file=sys.stderr)
        return code
    finally:
        interrupt.over()
    return 0


def ending_of(error: BaseException, recovery: str) -> tuple[str, int] | None:
    """(line, exit code) for an error; None if it is a mistake of ours."""
    if isinstance(error, Preempted):
        return "", Preempted.exit_code
    if isinstance(error, UserError):
        return one_line(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted: {recovery}", 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError) and nobody_reads():
        return "", 128 + signal.SIGPIPE
    problem = errors.storage_problem(error)
    if problem:
        return f"{problem}: fix it or choose another path; {recovery}", UserError.exit_code
    lost = errors.read_problem(getattr(error, "filename", None) or "a file", error)
    if lost:
        return f"{lost}; {recovery}", lost.exit_code
    problem = errors.memory_problem(error)
    if problem:
        do = "choose a smaller model, image or batch, or a larger machine"
        return f"{problem}: {do}; {recovery}", NegativeResult.exit_code
    return None


KINDS = {kind.exit_code: kind for kind in (UserError, NegativeResult, Unavailable)}


@contextlib.contextmanager
def raising_user_errors(recovery: str) -> Iterator[None]:
    """For callers in Python: what `run` reports in one line is raised as a UserError with it."""
    objects.limit_retries()
    try:
        check_encoding()
        with restored(), silent(*TALKATIVE):
            yield
    except Exception as error:
        line, code = ending_of(error, recovery) or ("", 0)
        if isinstance(error, UserError) or code not in KINDS:
            raise
        raise KINDS[code](line) from error


def nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has ended, as `head` does; the rest is dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    is_broken = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_broken


@dataclasses.dataclass(frozen=True)
class Command:
    """`python -m vit_jax.NAME`; call `main` with its arguments for the exit code."""

    name: str
    doc: str  # its first line is what --help says
    work: Callable[[argparse.Namespace], None]
    # (parser, name of the sub-command) -> adds arguments.
    add_arguments: Callable[[argparse.ArgumentParser, str], None] = lambda parser, name: None
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # sub-commands and help
    config: str | None = None  # help of --config; None: the command takes no config
    # Sub-command ("" if there are none) -> default of --config; without one it is required. With
    # "" it may be left out, and then `args.config` is None.
    default_configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    takes_weights: bool = False  # --init_from=WEIGHTS is short for --config.init_from=WEIGHTS
    json: str = ""  # help of --json; "": it writes none
    recovery: str = "run the same command again"
    run: Callable[[Callable[[], None], bool, str], int] = run

    def main(self, argv: list[str]) -> int:
        """Parses, loads the config, and runs `work`, which gets these arguments:

        config: the loaded config, location: FILE.py[:ARG], overrides: --config.KEY=VALUE, part:
        the sub-command, json, debug, and those of the command's own.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal can show every name
            sys.stdout.reconfigure(errors="backslashreplace")
        args, overrides = self.parser().parse_known_args(argv)
        if self.config is None and overrides:
            self.parser().error(f"unrecognized arguments: {' '.join(overrides)}")
        return self.run(lambda: self.begin(args, overrides), args.debug, self.recovery)

    def begin(self, args: argparse.Namespace, overrides: list[str]) -> None:
        if self.config is not None:
            args.location = args.config
            if self.takes_weights and args.init_from is not None:
                overrides = [f"--config.init_from={args.init_from}", *overrides]
            args.overrides = overrides
            args.config = configs.load(args.location, overrides) if args.location else None
        if self.json:
            check_file(args.json)
        self.work(args)

    def parser(self) -> ArgumentParser:
        summary = self.doc.split("\n\n")[0].replace("\n", " ")
        parser = ArgumentParser(f"vit_jax.{self.name}", description=summary, allow_abbrev=False)
        if not self.parts:
            self.fill(parser, "")
            return parser
        parts = parser.add_subparsers(dest="part", required=True, metavar="|".join(self.parts))
        for name, text in self.parts.items():
            part = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
            self.fill(part, name)
        return parser

    def fill(self, parser: argparse.ArgumentParser, part: str) -> None:
        if self.config is not None:
            default = self.default_configs.get(part)
            parser.add_argument(
                "--config",
                metavar="FILE.py[:ARG]",
                help=self.config,
                required=default is None,
                default=default,
            )
        if self.takes_weights:
            parser.add_argument("--init_from", metavar="WEIGHTS", help=WEIGHTS)
        self.add_arguments(parser, part)
        if self.json:
            parser.add_argument("--json", metavar="FILE", help=self.json)
        parser.add_argument("--debug", action="store_true", help="show tracebacks")


# --- files of results ---


def check_file(path: str | None, flag: str = "--json") -> None:
    """Raises UserError if `path` can't be a file; None is fine."""
    if not path:
        return
    objects.must_be_reachable(path, f"{flag}={path}")
    if "://" not in path and not epath.Path(path).parent.is_dir():  # a store needs no folders
        raise UserError(
            f"the folder of {flag}={path} does not exist: create it or choose another file"
        )
    if epath.Path(path).is_dir():
        raise UserError(f"{flag}={path} is a folder: choose a file")


def write_json(path: str | None, result) -> None:
    """Writes what --json asks for, if it was given."""
    if not path:
        return
    try:
        replace_file(epath.Path(path), json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"--json={path} can't be written ({error.strerror}): choose another file"
        ) from error


def name_for_damaged(path: epath.Path) -> epath.Path:
    """damaged_NAME.EXT, or damaged_NAME_2.EXT and so on if there is one."""
    numbers = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    names = (path.with_name(f"damaged_{path.stem}{number}{path.suffix}") for number in numbers)
    return next(name for name in names if not name.exists())


def replace_file(path: epath.Path, content: str | bytes, writer: str = "") -> None:
    """Writes a file in one step: a reader sees the old content or the new one, also after a kill.

    Text is written as UTF-8; names of files that are not UTF-8 keep their bytes.

    Args:
      writer: a name of this process, if others may write the same file at the same time.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "surrogateescape")
    if "://" not in str(path):
        path = epath.Path(os.path.realpath(path))  # a link stays one
        if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout
            path.write_bytes(content)
            return
    fresh = path.with_name(f"{path.name}{writer}.tmp")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(Exception):
            fresh.unlink(missing_ok=True)
        raise
