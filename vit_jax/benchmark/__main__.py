"""Measures a part of the framework with the settings of a config.

python -m vit_jax.benchmark data --config=FILE.py[:ARG] [--topology=v5e:16x16]
python -m vit_jax.benchmark data --config=FILE.py[:ARG] --latency_ms=30 --connections=8
python -m vit_jax.benchmark data --config=FILE.py[:ARG] --threads=1,2,16
python -m vit_jax.benchmark data --config=FILE.py[:ARG] --against=big_vision --peer=DIR
python -m vit_jax.benchmark step [--config=FILE.py[:ARG]] [--models=VARIANT:IMAGES,...]
python -m vit_jax.benchmark checkpoint|startup [--config=FILE.py[:ARG]]
"""

import argparse
import importlib
import json
import logging
import sys

from rich.table import Table

from vit_jax import cli
from vit_jax.cli import objects
from vit_jax.cli.terminal import Console
from vit_jax.errors import UserError

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


def add_arguments(parser: argparse.ArgumentParser, part: str) -> None:
    """The arguments of one benchmark; declared here so that --help needs no TensorFlow."""
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
            "--threads",
            default="",
            metavar="N,...",
            help="measure only the host pipeline, with each of these numbers of threads",
        )
        parser.add_argument(
            "--topology", default="", metavar="CHIP:AxB", help="a pod to feed, such as v5e:16x16"
        )
        parser.add_argument(
            "--mfu", type=float, default=0.5, help="share of its peak FLOP/s that the pod reaches"
        )
        parser.add_argument(
            "--latency_ms",
            type=float,
            default=0,
            help="measure local array_record, tfrecord or tars also as on a store whose requests "
            "take that long, in alternating runs",
        )
        parser.add_argument(
            "--connections",
            type=int,
            default=objects.REQUESTS,
            help="its requests at a time (default: %(default)s, as for real stores)",
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


def work(args) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    if args.runs < 1:
        raise UserError(f"--runs={args.runs} is too few: give 1 or more")
    rows = importlib.import_module(MODULES[args.part]).run(args.config, args)
    if args.part == "data" and args.alone:
        print(json.dumps(rows))
        return
    Console().print(table(rows))
    cli.write_json(args.json, rows)


COMMAND = cli.Command(
    "benchmark",
    __doc__,
    work,
    add_arguments,
    parts=PARTS,
    config="--config.KEY=VALUE overrides",
    default_configs=dict.fromkeys(("step", "checkpoint", "startup"), "configs/step.py"),
    json="write the result here: name, unit, median, runs of each",
)

main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
