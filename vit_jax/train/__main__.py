"""Trains what a config says: pretraining, fine-tuning, and what continues a run.

python -m vit_jax.train --config=FILE.py[:ARG] --workdir=DIR [--config.KEY=VALUE ...] [--dry_run]
"""

import sys

from vit_jax import cli
from vit_jax.distributed import preemption, runtime, watchdog
from vit_jax.errors import UserError
from vit_jax.train import goodput, loop, summary, workdir
from vit_jax.train.experiment import Experiment


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="where the run writes, local or gs://; holds one run, which continues",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print parameters, FLOPs, shardings and schedule, and stop",
    )
    workdir.add_arguments(parser)


def work(args) -> None:
    if args.dry_run:
        with cli.logging_to(None):
            return summary.show(Experiment.declared(args.config))
    if not args.workdir:
        raise UserError("--workdir is missing: say where the run writes, such as --workdir=DIR")
    with goodput.stopwatch.spending("waiting"):
        runtime.start()
    folder = workdir.make(args.workdir)
    with (
        preemption.signals.listening(lambda: workdir.continuation(folder)),
        cli.logging_to(None),
        workdir.held(folder, args.take_over),
        cli.logging_to(folder, args.config.flush_every_s) as files,
    ):
        loop.train(args.config, folder, files)


COMMAND = cli.Command(
    "train",
    __doc__,
    work,
    add_arguments,
    config="experiment; --config.KEY=VALUE overrides",
    takes_weights=True,
    recovery="saved checkpoints are intact, and the same command continues from the last one",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
