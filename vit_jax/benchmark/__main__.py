"""Measures a part of the framework with the settings of a config.

python -m vit_jax.benchmark data --config=FILE.py[:ARG] [--topology=v5e:16x16]
python -m vit_jax.benchmark data --config=FILE.py[:ARG] --against=big_vision --peer=DIR
python -m vit_jax.benchmark step [--config=FILE.py[:ARG]] [--models=VARIANT:IMAGES,...]
python -m vit_jax.benchmark checkpoint|startup [--config=FILE.py[:ARG]]
"""

import argparse
import importlib
import json
import logging
import pathlib
import sys

from rich.console import Console
from rich.table import Table

from vit_jax import cli, errors
from vit_jax import config as configs

PARTS = {
    "step": "training step and inference on random images: images/s, MFU, memory, compilation time",
    "data": "the input pipeline, stage by stage, and the host cores that a pod needs",
    "checkpoint": "saving and restoring the state of a model",
    "startup": "seconds to the first step, with an empty and a filled cache, and to an error",
}
MODULES = {
    "step": "vit_jax.benchmark.step",
    "data": "vit_jax.benchmark.data",
    "checkpoint": "vit_jax.benchmark.checkpoint",
    "startup": "vit_jax.benchmark.startup",
}
DEFAULT = str(pathlib.Path(__file__).parent.parent.parent / "configs/step.py")


def add_arguments(part: str, parser: argparse.ArgumentParser) -> None:
    """The arguments of one benchmark, declared here so that --help needs no TensorFlow."""
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="rounds, of which the medians are reported (default: %(default)s)",
    )
    if part == "step":
        text = "models with their batch sizes, such as Ti/16:16,S/16:8; default: the config's"
        parser.add_argument("--models", default="", metavar="VARIANT:IMAGES,...", help=text)
        parser.add_argument("--steps", type=int, default=5, help="per round (default: %(default)s)")
    if part == "checkpoint":
        parser.add_argument(
            "--folder",
            metavar="DIR",
            help="where to save, local or gs://; default: a temporary one",
        )
    if part == "data":
        parser.add_argument(
            "--images", type=int, default=2048, help="per measurement (default: %(default)s)"
        )
        parser.add_argument(
            "--topology", default="", metavar="CHIP:AxB", help="a pod to feed, such as v5e:16x16"
        )
        parser.add_argument(
            "--mfu", type=float, default=0.5, help="share of its peak FLOP/s that the pod reaches"
        )
        parser.add_argument(
            "--against",
            default="",
            choices=["", "big_vision"],
            help="measure this framework, too, in alternating runs",
        )
        parser.add_argument("--peer", default="", metavar="DIR", help="its checkout")
        parser.add_argument(
            "--alone",
            action="store_true",
            help="measure only the host pipeline; print JSON",
        )


def table(rows: list[dict]) -> Table:
    shown = Table()
    for column in ("name", "median", "unit", "runs"):
        shown.add_column(column, justify="right" if column == "median" else "left", overflow="fold")
    for row in rows:
        runs = " ".join(f"{run:.4g}" for run in row["runs"])
        shown.add_row(row["name"], f"{row['median']:.4g}", row["unit"], runs)
    return shown


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.benchmark", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="part", required=True, metavar="|".join(PARTS))
    for name, text in PARTS.items():
        part = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        wanted = dict(required=True) if name == "data" else dict(default=DEFAULT)
        part.add_argument(
            "--config", metavar="FILE.py[:ARG]", help="--config.KEY=VALUE overrides", **wanted
        )
        add_arguments(name, part)
        part.add_argument(
            "--json", metavar="FILE", help="write the result here: name, unit, median, runs of each"
        )
        part.add_argument("--debug", action="store_true", help="show tracebacks")
    args, overrides = parser.parse_known_args(argv)

    def work():
        config = configs.load(args.config, overrides)
        cli.check(args.json)
        logging.getLogger("absl").setLevel(logging.ERROR)
        if args.runs < 1:
            raise errors.UserError(f"--runs={args.runs} is too few: give 1 or more")
        rows = importlib.import_module(MODULES[args.part]).run(config, args, overrides)
        if args.part == "data" and args.alone:
            return print(json.dumps(rows))
        Console().print(table(rows))
        cli.write(args.json, rows)

    return cli.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
