"""Trains what a config says: pretraining, fine-tuning, and what continues a run.

python -m vit_jax.train --config=FILE.py[:ARG] --workdir=DIR [--config.KEY=VALUE ...] [--dry_run] [--debug]
"""

import sys

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.distributed import processes, runtime, watchdog
from vit_jax.errors import UserError
from vit_jax.train import loop, workdir


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.train", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE.py[:ARG]",
        help="experiment; --config.KEY=VALUE overrides",
    )
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
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args, overrides = parser.parse_known_args(argv)

    def work():
        config = configs.load(args.config, overrides)
        if args.dry_run:
            return loop.dry_run(config)
        if not args.workdir:
            raise UserError("--workdir is missing: say where the run writes, as --workdir=DIR")
        processes.start()
        runtime.keep_programs()
        runtime.keep_memory()
        folder = workdir.make(args.workdir)
        with cli.logging_to(folder):
            loop.train(config, folder)

    return watchdog.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
