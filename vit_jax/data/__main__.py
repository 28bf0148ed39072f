"""Shows, checks and prepares the data sets that a config trains and evaluates on.

python -m vit_jax.data show|check|prepare --config=FILE.py[:ARG] [--config.KEY=VALUE ...]
"""

import importlib
import logging
import sys

from vit_jax import cli, errors
from vit_jax import config as configs

COMMANDS = {
    "show": "the ids and random choices of one global batch",
    "check": "whether every data set of the config can be read",
    "prepare": "download, convert or shrink data sets",
}
MODULES = {
    "show": "vit_jax.data.show",
    "check": "vit_jax.data.check",
    "prepare": "vit_jax.data.prepare.command",
}


def add_arguments(command: str, parser) -> None:
    """The arguments of one command; declared here so that --help needs no TensorFlow."""
    if command == "show":
        parser.add_argument(
            "--step",
            type=int,
            default=0,
            help="number of updates done before the batch (default: 0)",
        )
    if command == "check":
        parser.add_argument(
            "--out", metavar="DIR", default="data_check", help="folder of the contact sheets"
        )
        parser.add_argument(
            "--scan", action="store_true", help="decode every image and name the corrupt ones"
        )
    if command == "prepare":
        parser.add_argument(
            "--from", dest="source", metavar="DIR", help="for imagenet21k: the folder of class tars"
        )
        parser.add_argument(
            "--partial", action="store_true", help="prepare an incomplete release of imagenet21k"
        )
        parser.add_argument(
            "--out", metavar="DIR", help="copy the data set to this data_dir of TFDS"
        )
        parser.add_argument("--name", help="name of the copy")
        parser.add_argument(
            "--short_side",
            type=int,
            default=0,
            metavar="N",
            help="shrink the shorter side to N pixels",
        )
        parser.add_argument(
            "--workers", type=int, default=0, metavar="N", help="threads (default: one per core)"
        )


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.data", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument(
            "--config", required=True, metavar="FILE.py[:ARG]", help="--config.KEY=VALUE overrides"
        )
        add_arguments(name, command)
        command.add_argument("--json", metavar="FILE", help="write the result here")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    args, overrides = parser.parse_known_args(argv)

    def work():
        config = configs.load(args.config, overrides)
        cli.check(args.json)
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # file names need not be text that a terminal can show
        logging.getLogger("absl").setLevel(logging.ERROR)
        with cli.logging_to(None):
            result = importlib.import_module(MODULES[args.command]).run(config, args)
        cli.write(args.json, result)
        if not result.get("ready", True):
            raise errors.NegativeResult(result["summary"])

    return cli.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
