"""Plans the memory, time and cost of a config on a TPU pod, without the pod.

    python -m vit_jax.plan --config=FILE.py[:ARG] --topology=v5e:16x16 [--num_slices=N] [--search]

It compiles the training step with the TPU compiler, which needs no TPU.
"""

import logging
import math
import sys

from vit_jax import cli
from vit_jax.errors import NegativeResult, UserError
from vit_jax.plan import topology


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--topology", default="", metavar="CHIP:AxB", help="pod (default: config.topology)"
    )
    parser.add_argument(
        "--num_slices",
        type=int,
        default=1,
        metavar="N",
        help="pods, connected by the data-center network",
    )
    parser.add_argument(
        "--hbm_gib", type=float, metavar="X", help="memory per chip (default: the chip's)"
    )
    parser.add_argument(
        "--search", action="store_true", help="find the fastest mesh, remat, scan and accum_steps"
    )
    parser.add_argument(
        "--max_compiles",
        type=int,
        default=8,
        metavar="N",
        help="settings that --search compiles (default: %(default)s)",
    )


def check_arguments(args) -> None:
    if args.num_slices < 1:
        raise UserError(f"--num_slices={args.num_slices} is too few: give 1 or more")
    if args.max_compiles < 1:
        raise UserError(f"--max_compiles={args.max_compiles} is too few: give 1 or more")
    if args.hbm_gib is not None and not 0 < args.hbm_gib < math.inf:
        raise UserError(f"--hbm_gib={args.hbm_gib} is not above 0: give the GiB of a chip")
    if not args.topology:
        raise UserError("--topology is missing: name a pod, such as --topology=v5e:16x16")


def work(args) -> None:
    args.topology = args.topology or args.config.topology
    check_arguments(args)
    chip, _ = topology.parse(args.topology)
    topology.prepare_environment()
    logging.getLogger("vit_jax").setLevel(logging.ERROR)
    from vit_jax.plan import report, run

    plan = run.run(args, args.hbm_gib or chip.hbm_gib)
    report.show(plan)
    cli.write_json(args.json, plan)
    if not plan["fits"]:
        raise NegativeResult(
            f"{args.location} does not fit on {args.topology}: {plan['hbm_gib']['total']:.2f} GiB "
            f"of {plan['hbm_limit_gib']:.2f} GiB per chip: {plan['suggestions'][0]}"
        )


COMMAND = cli.Command(
    "plan",
    __doc__,
    work,
    add_arguments,
    config="experiment; --config.KEY=VALUE overrides",
    takes_weights=True,
    json="write the plan here",
)

main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
