"""How every command starts, writes and ends: `log.py` where it logs, `spool.py` how it writes to a
store, `objects.py` the client of stores.

A command is a `Command`: its arguments, the function that does the work, and what is true after it
was stopped. It ends with exit code 0 (done), 1 (the answer is no), 2 (the input is wrong), 69
(something does not answer), 75 (preempted, and saved) or 130 (interrupted). The last line on stderr
says what is wrong.
"""

import argparse
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping

from etils import epath

from vit_jax import config as configs
from vit_jax import errors
from vit_jax.cli import objects
from vit_jax.cli.log import logging_to as logging_to  # cli.logging_to is what commands call
from vit_jax.errors import Preempted, UserError, one_line

# --- from arguments to an exit code ---


class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: in one line, which is the last."""

    def error(self, message: str):
        print(f"error: {message}: see --help", file=sys.stderr)
        sys.exit(UserError.exit_code)


def run(work: Callable[[], None], debug: bool, recovery: str = "run the same command again") -> int:
    """Calls `work` and returns the exit code; `debug` lets exceptions through with a traceback.

    Args:
      recovery: what is true, and what to do, after an interruption or on a full disk.
    """
    objects.limit_retries()
    if not debug:  # these libraries would print what is raised to us a second time
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        work()
    except Preempted:
        return Preempted.exit_code
    except UserError as error:
        if debug:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted: {recovery}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        problem = errors.storage_problem(error)
        if debug or problem is None:
            raise
        print(f"error: {problem}: fix it or write elsewhere; {recovery}", file=sys.stderr)
        return UserError.exit_code
    return 0


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
    # Sub-command ("" if there are none) -> default of --config; without one it is required.
    default_configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    json: str = ""  # help of --json; "": it writes none
    recovery: str = "run the same command again"
    run: Callable[[Callable[[], None], bool, str], int] = run

    def main(self, argv: list[str]) -> int:
        """Parses, loads the config, and runs `work`, which gets these arguments:

        config: the loaded config, location: FILE.py[:ARG], overrides: --config.KEY=VALUE, part:
        the sub-command, json, debug, and those of the command's own.
        """
        args, overrides = self.parser().parse_known_args(argv)
        if self.config is None and overrides:
            self.parser().error(f"unrecognized arguments: {' '.join(overrides)}")
        return self.run(lambda: self.begin(args, overrides), args.debug, self.recovery)

    def begin(self, args: argparse.Namespace, overrides: list[str]) -> None:
        if self.config is not None:
            args.location = args.config
            args.overrides = overrides
            args.config = configs.load(args.location, overrides)
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
        epath.Path(path).write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"--json={path} can't be written ({error.strerror}): choose another file"
        ) from error


def replace_file(path: epath.Path, text: str) -> None:
    """Writes a file in one step: a reader sees the old text or the new one, also after a kill."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text)
    fresh.replace(path)
