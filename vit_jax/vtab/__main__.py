"""VTAB-1k (arXiv 1910.04867): checks, prepares and runs 19 tasks with 1,000 training images each.

python -m vit_jax.vtab check   --config=configs/vtab.py
python -m vit_jax.vtab prepare --config=configs/vtab.py
python -m vit_jax.vtab run     --config=configs/vtab.py --config.init_from=WEIGHTS --workdir=DIR

--tasks=a,b restricts each of them to some of the tasks.
"""

import os
import signal
import sys

import jax

from vit_jax import cli, errors
from vit_jax import config as configs
from vit_jax.data.sources.vtab_tasks import VTAB, vtab
from vit_jax.distributed import processes, runtime, watchdog
from vit_jax.errors import NegativeResult, UserError
from vit_jax.train import workdir


def tasks_of(text: str) -> list[str]:
    """The tasks in a comma-separated list, in VTAB's order; all if it is empty."""
    if not text:
        return list(VTAB)
    given = [name.strip() for name in text.split(",")]
    for name in given:
        vtab(name)  # an unknown name is an error
    return [name for name in VTAB if name in given]


def check(config, names: list[str], path: str | None) -> None:
    from vit_jax.vtab import check

    rows = check.check(config, names)
    check.show(rows)
    cli.write(path, rows)
    bad = [name for name, row in rows.items() if row["state"] != "ready"]
    if bad:
        raise NegativeResult(
            f"{len(bad)} of {len(names)} tasks are not ready, the first is {bad[0]}: see the table"
        )


def run(config, names: list[str], folder: str | None, path: str | None) -> None:
    from vit_jax.vtab import report, suite

    if not folder:
        raise UserError("--workdir is missing: say where the results go, with --workdir=DIR")
    processes.start()
    runtime.keep_programs()
    runtime.keep_memory()
    # Each run's result is saved when it ends, and there is nothing else to save on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(errors.Preempted.exit_code))
    place = workdir.make(folder)
    with cli.logging_to(place):
        results = suite.run(config, place, names)
        if jax.process_index() == 0:
            report.show(results)
            print(f"Results: {place / 'vtab.json'}  {place / 'vtab.md'}  {place / 'vtab.png'}")
            cli.write(path, results)
        bad = [name for name in names if results["tasks"][name]["status"] != "done"]
        if bad:
            raise NegativeResult(
                f"{len(bad)} of {len(names)} tasks have no result, the first is {bad[0]}: see the "
                "table"
            )


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.vtab", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("command", choices=("check", "prepare", "run"))
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE.py[:ARG]",
        help="the protocol; --config.KEY=VALUE overrides",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="of run: folder for the results; the same command continues",
    )
    parser.add_argument(
        "--tasks", default="", metavar="A,B", help="only these tasks (default: all)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result here")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args, overrides = parser.parse_known_args(argv)

    def work():
        config, names = configs.load(args.config, overrides), tasks_of(args.tasks)
        if not config.vtab:
            raise UserError(
                f"config {args.config} has no VTAB settings: use configs/vtab.py, or set vtab in it"
            )
        cli.check(args.json)
        if args.command == "run":
            return run(config, names, args.workdir, args.json)
        with cli.logging_to(None):
            if args.command == "check":
                return check(config, names, args.json)
            from vit_jax.vtab import check as checks

            checks.prepare(config, names)

    return watchdog.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
