"""Shows, checks and prepares the data sets that a config trains and evaluates on.

python -m vit_jax.data show|check|prepare --config=FILE.py[:ARG] [--config.KEY=VALUE ...]
python -m vit_jax.data check FOLDER
"""

import importlib
import logging
import sys

from vit_jax import cli
from vit_jax.errors import NegativeResult

PARTS = {
    "show": "the ids and random choices of one global batch",
    "check": "what is in a folder of images, or in the data sets of a config, and what is wrong",
    "prepare": "download, convert or shrink data sets",
}
MODULES = {
    "show": "vit_jax.data.show",
    "check": "vit_jax.data.check.command",
    "prepare": "vit_jax.data.prepare.command",
}


def add_arguments(parser, part: str) -> None:
    """The arguments of one command; declared here so that --help needs no TensorFlow."""
    if part == "show":
        parser.add_argument(
            "--step",
            type=int,
            default=0,
            help="number of updates done before the batch (default: 0)",
        )
        parser.add_argument(
            "--workdir",
            metavar="DIR",
            help="the run whose steps are meant, if it left out batches after a loss spike",
        )
    if part == "check":
        parser.add_argument(
            "folder",
            nargs="?",
            default="",
            metavar="FOLDER",
            help="of images, or a .csv or .tar: every image is read, and every fault is named",
        )
        parser.add_argument(
            "--out", metavar="DIR", default="data_check", help="folder of the contact sheets"
        )
        parser.add_argument(
            "--unlabelled",
            action="store_true",
            help="with FOLDER: its images are for training without labels, and need no classes",
        )
        parser.add_argument("--scan", action="store_true", help="with --config: decode every image")
    if part == "prepare":
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


def work(args) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    with cli.logging_to(None):
        result = importlib.import_module(MODULES[args.part]).run(args.config, args)
    cli.write_json(args.json, result)
    if not result.get("ready", True):
        raise NegativeResult(result["summary"])


COMMAND = cli.Command(
    "data",
    __doc__,
    work,
    add_arguments,
    parts=PARTS,
    config="--config.KEY=VALUE overrides",
    default_configs={"check": ""},
    json="write the result here",
    recovery="finished files are kept, and the same command continues",
)

main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
