"""Plans the memory, time and cost of a config on a TPU pod, without the pod.

    python -m vit_jax.plan --config=FILE.py[:ARG] --topology=v5e:16x16 [--num_slices=N] [--search]

It compiles the training step with the TPU compiler, which needs no TPU.
"""

import logging
import math
import sys

from vit_jax import cli, errors
from vit_jax import config as configs
from vit_jax.plan import topology


def parse(argv: list[str]):
    parser = cli.ArgumentParser(
        "vit_jax.plan", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE.py[:ARG]",
        help="experiment; --config.KEY=VALUE overrides",
    )
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
    parser.add_argument("--json", metavar="FILE", help="write the plan here")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args, overrides = parser.parse_known_args(argv)
    if (
        args.num_slices < 1
        or args.max_compiles < 1
        or not (args.hbm_gib is None or 0 < args.hbm_gib < math.inf)
    ):
        parser.error("--num_slices and --max_compiles must be at least 1, and --hbm_gib above 0")
    return args, overrides


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)

    def work():
        config = configs.load(args.config, overrides)
        args.topology = args.topology or config.topology
        if not args.topology:
            raise errors.UserError(
                "--topology is missing: name a pod, such as --topology=v5e:16x16"
            )
        chip, _ = topology.parse(args.topology)
        cli.check(args.json)
        topology.prepare_environment()
        logging.getLogger("vit_jax").setLevel(logging.ERROR)
        from vit_jax.plan import report, run

        plan = run.run(config, args, args.hbm_gib or chip.hbm_gib)
        report.show(plan)
        cli.write(args.json, plan)
        if not plan["fits"]:
            raise errors.NegativeResult(
                f"{args.config} does not fit on {args.topology}: {plan['hbm_gib']['total']:.2f} "
                f"GiB of {plan['hbm_limit_gib']:.2f} GiB per chip: {plan['suggestions'][0]}"
            )

    return cli.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
