"""VTAB-1k (arXiv 1910.04867): checks, prepares and runs 19 tasks with 1,000 training images each.

python -m vit_jax.vtab check   --config=configs/vtab.py
python -m vit_jax.vtab prepare --config=configs/vtab.py
python -m vit_jax.vtab run     --config=configs/vtab.py --config.init_from=WEIGHTS --workdir=DIR

--tasks=a,b restricts each of them to some of the tasks.
"""

import sys

import jax

from vit_jax import cli
from vit_jax.data.sources.vtab_tasks import VTAB, vtab
from vit_jax.distributed import preemption, runtime, watchdog
from vit_jax.errors import NegativeResult, UserError, printable
from vit_jax.train import workdir


def tasks_of(text: str) -> list[str]:
    """The tasks in a comma-separated list, in VTAB's order; all if it is empty."""
    if not text:
        return list(VTAB)
    given = [name.strip() for name in text.split(",")]
    for name in given:
        vtab(name)  # an unknown name is an error
    return [name for name in VTAB if name in given]


def check(args) -> None:
    from vit_jax.vtab import check as checks

    with cli.logging_to(None):
        rows = checks.check(args.config, args.names)
    checks.show(rows)
    cli.write_json(args.json, rows)
    bad = [name for name, row in rows.items() if row["state"] != "ready"]
    if bad:
        raise NegativeResult(
            f"{len(bad)} of {len(rows)} tasks are not ready, the first is {bad[0]}: see the table"
        )


def prepare(args) -> None:
    from vit_jax.vtab import check as checks

    with cli.logging_to(None):
        checks.prepare(args.config, args.names)


def run(args) -> None:
    from vit_jax.vtab import report, suite

    if not args.workdir:
        raise UserError("--workdir is missing: say where the results go, such as --workdir=DIR")
    runtime.start()
    folder = workdir.make(args.workdir)
    with (
        preemption.signals.listening(lambda: COMMAND.recovery, saves=False),
        cli.logging_to(None),
        workdir.held(folder, args.take_over),
        cli.logging_to(folder, args.config.flush_every_s),
    ):
        results = suite.run(args.config, folder, args.names)
        if jax.process_index() == 0:
            report.show(results)
            files = (str(folder / f"vtab.{kind}") for kind in ("json", "md", "png"))
            print(printable(f"Results: {'  '.join(files)}"))
            cli.write_json(args.json, results)
        bad = [name for name in args.names if results["tasks"][name]["status"] != "done"]
        if bad:
            raise NegativeResult(
                f"{len(bad)} of {len(args.names)} tasks have no result, the first is {bad[0]}: see "
                "the table"
            )


def add_arguments(parser, part: str) -> None:
    if part == "run":
        parser.add_argument(
            "--workdir",
            metavar="DIR",
            help="where results are written; the same command continues",
        )
        workdir.add_arguments(parser)
    parser.add_argument(
        "--tasks", default="", metavar="A,B", help="only these tasks (default: all)"
    )


def work(args) -> None:
    args.names = tasks_of(args.tasks)
    if not args.config.vtab:
        raise UserError(
            f"config {args.location} has no VTAB settings: use configs/vtab.py, or set vtab in it"
        )
    dict(check=check, prepare=prepare, run=run)[args.part](args)


COMMAND = cli.Command(
    "vtab",
    __doc__,
    work,
    add_arguments,
    parts=dict(
        check="whether the data of the tasks are there, and are VTAB's",
        prepare="download and prepare what can be",
        run="fine-tune on every task",
    ),
    config="the protocol; --config.KEY=VALUE overrides",
    takes_weights=True,
    json="write the result here, too",
    recovery="finished tasks are saved, and the same command continues",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
