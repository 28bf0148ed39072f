"""Runs a study: every combination of its axes, each a run of vit_jax.train in a folder of its own.

python -m vit_jax.study --config=configs/studies/NAME.py --workdir=DIR [--jobs=N] [--part=I/N]
    [--json=FILE]
python -m vit_jax.study --config=configs/studies/NAME.py --dry_run [--topology=v5e:8x8 --jobs=N]

The same command continues, skips what is done, and tries again what failed. --jobs runs several at
once on parts of the devices, --part=2/8 the second eighth of the runs, on as many hosts.
"""

import logging
import pathlib
import re
import sys

from rich.table import Table

from vit_jax import cli
from vit_jax.cli.terminal import Console
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.study import cost, definition, devices, execution, outcome, results
from vit_jax.study.definition import Study, StudyRun

log = logging.getLogger("vit_jax.study")


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--config", required=True, metavar="FILE.py[:ARG]", help="the study: a recipe and its axes"
    )
    parser.add_argument("--workdir", metavar="DIR", help="of all runs and results")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs, or compiles, at once (default: %(default)s)",
    )
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="only the I-th of N parts of the runs"
    )
    parser.add_argument("--dry_run", action="store_true", help="print what it will cost, and stop")
    parser.add_argument(
        "--topology", default="", metavar="CHIP:AxB", help="with --dry_run: days on this pod"
    )


def chosen(runs: list[StudyRun], part: str) -> list[StudyRun]:
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part={part} is not a part: give I/N with I from 1 to N, such as 2/8")
    return runs[int(match[1]) - 1 :: int(match[2])]


def span(ends: tuple[float, float] | None) -> str:
    return "does not fit" if ends is None else f"{ends[0]:,.3g} to {ends[1]:,.3g}"


def show_cost(study: Study, runs: list[StudyRun], topology: str, jobs: int) -> dict:
    costs = [cost.of_run(run) for run in runs]
    if topology:
        costs = cost.planned(costs, topology, jobs)
    columns = ["run", "parameters", "GFLOP per image", "steps", "images", "epochs", "exaFLOPs"]
    table = Table(*columns, *["chip days"] * bool(topology), title=study.title, box=None)
    for one in costs:
        amounts = [f"{one.parameters:,}", f"{one.gflops:,.3g}", f"{one.steps:,}"]
        amounts += [f"{one.images:,}", f"{one.epochs:,.1f}", f"{one.exaflops:.3g}"]
        table.add_row(one.run.name, *amounts, *[span(one.chip_days)] * bool(topology))
    console = Console(width=140, highlight=False)
    console.print(table)
    total = sum(one.exaflops for one in costs)
    text = f"{len(costs)} runs, {total:.3g} exaFLOPs in all"
    days = [one.chip_days for one in costs if one.chip_days]
    if days:
        low, high = zip(*days, strict=True)
        text += f", {span((sum(low), sum(high)))} chip days on {topology}"
    console.print(text)
    if topology and len(days) < len(costs):
        text = f"{len(costs) - len(days)} runs do not fit on {topology} and are not in the sum"
        console.print(f"{text}: choose a larger pod")
    rows = [
        dict(name=one.run.name, exaflops=one.exaflops, steps=one.steps, chip_days=one.chip_days)
        for one in costs
    ]
    return dict(runs=rows, exaflops=total)


def outcomes_of(folder: pathlib.Path, study: Study) -> list[outcome.Outcome]:
    metric = study.figure.metric if study.figure else ""
    return [outcome.read(folder, run, metric) for run in study.runs]


def check_end(found: list[outcome.Outcome], folder: pathlib.Path) -> None:
    """Raises NegativeResult if a run failed, or has ended before its last step."""
    failed = [one for one in found if one.status == outcome.FAILURE]
    if failed:
        raise NegativeResult(
            f"{len(failed)} of {len(found)} runs failed, the first is {failed[0].run.name} "
            f"({failed[0].problem}): see {folder / execution.LOGS}; the same command tries again"
        )
    left = [one for one in found if one.status in (outcome.WAITING, outcome.STOPPED)]
    if left:
        raise NegativeResult(
            f"{len(left)} of {len(found)} runs are not done, the first is {left[0].run.name} "
            f"({left[0].problem or left[0].status}): the same command continues"
        )


def work(args) -> None:
    study = definition.read(args.config)
    runs = chosen(study.runs, args.part)
    for run in study.runs:
        definition.check_metric(study.figure, run)  # errors of all come before the first begins
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs} is too few: give 1 or more")
    if args.topology and not args.dry_run:
        raise UserError(f"--topology={args.topology} is of --dry_run, which plans: add --dry_run")
    if args.dry_run:
        with cli.logging_to(None):
            return cli.write_json(args.json, show_cost(study, runs, args.topology, args.jobs))
    if not args.workdir or "://" in args.workdir:
        raise UserError(
            f"--workdir={args.workdir or ''} is not a local folder: say where the study writes; "
            "its runs may be sent to a store afterwards"
        )
    parts = devices.parts(args.jobs)
    folder = pathlib.Path(args.workdir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with cli.logging_to(None):
        found = outcomes_of(folder, study)
        done = {one.run.name for one in found if one.status == outcome.DONE}
        left = [run for run in runs if run.name not in done]
        log.info("%d of %d runs are left", len(left), len(runs))

        def after_each() -> None:
            try:
                results.write(study, outcomes_of(folder, study), folder)
            except (UserError, OSError) as error:  # at the end it is one
                log.warning("the results are not written now: %s", one_line(error))

        execution.Execution(folder, parts).run(left, after_each)
    found = outcomes_of(folder, study)
    cli.write_json(args.json, results.write(study, found, folder))
    print(f"Results: {folder / results.PAGE}")
    names = {run.name for run in runs}
    check_end([one for one in found if one.run.name in names], folder)


COMMAND = cli.Command("study", __doc__, work, add_arguments, json="write the results here")
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
