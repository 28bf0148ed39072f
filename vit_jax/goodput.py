"""Where the wall time of runs went, over all their starts, and which share of it was useful steps.

python -m vit_jax.goodput WORKDIR... [--json=FILE]

It reads goodput.json in each workdir, also while the run goes on.
"""

import sys

from etils import epath
from rich.table import Table

from vit_jax import cli
from vit_jax.cli import objects, regular
from vit_jax.cli.terminal import Console
from vit_jax.errors import UserError, one_line
from vit_jax.train import goodput


def read_text(path: epath.Path) -> str:
    """The text of a file, also on a store, without TensorFlow.

    Raises:
      FileNotFoundError: there is none.
    """
    if not objects.is_object(str(path)):
        return regular.read_text(path)
    content = objects.content(str(path))
    if content is None:
        raise FileNotFoundError(str(path))
    return content.decode()


def read(workdir: str) -> dict:
    """`goodput.totals` of the run in a workdir.

    Raises:
      UserError: it has no goodput.json, or one that can't be used.
    """
    path = epath.Path(workdir).expanduser() / goodput.FILE
    try:
        return goodput.totals(goodput.parse(read_text(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist: give the workdir of a run of vit_jax.train that has begun; of "
            "vit_jax.finetune, its folders lr_* and final"
        ) from None
    except regular.NotRegular:
        raise
    except Exception as error:  # every store has errors of its own
        raise UserError(
            f"{path} can't be read ({one_line(error)[:160]}): correct the path, or restore the "
            "file; the next start of its run sets a damaged one aside"
        ) from error


def added(runs: list[dict]) -> dict:
    """The totals of several runs together; `wall_s` is the sum, also if they ran side by side."""
    parts = {name: sum(run["parts"][name] for run in runs) for name in goodput.PARTS}
    starts = sum(run["starts"] for run in runs)
    return goodput.summed(parts, starts, sum(run["steps_repeated"] for run in runs))


def show_parts(run: dict, title: str) -> None:
    table = Table("part", "seconds", "share", title=title)
    for name, seconds in run["parts"].items():
        share = seconds / run["wall_s"] if run["wall_s"] else 0.0
        table.add_row(goodput.PARTS[name], f"{seconds:,.1f}", f"{share:.1%}")
    table.add_section()
    table.add_row("all", f"{run['wall_s']:,.1f}", f"goodput {run['goodput']:.1%}")
    Console().print(table)
    print(f"starts: {run['starts']:,}; steps done again: {run['steps_repeated']:,}")


def show_runs(runs: dict[str, dict]) -> None:
    table = Table(title="runs")
    table.add_column("workdir", overflow="fold")
    for name in ("seconds", "goodput", "starts", "steps done again"):
        table.add_column(name)
    for workdir, run in runs.items():
        numbers = (f"{run['wall_s']:,.1f}", f"{run['goodput']:.1%}")
        table.add_row(workdir, *numbers, f"{run['starts']:,}", f"{run['steps_repeated']:,}")
    Console().print(table)


def add_arguments(parser, part: str) -> None:
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of a run, local or gs://")


def work(args) -> None:
    runs = {workdir: read(workdir) for workdir in args.workdirs}
    if len(runs) == 1:
        ((workdir, run),) = runs.items()
        show_parts(run, workdir)
        cli.write_json(args.json, run)
        return
    total = added(list(runs.values()))
    show_runs(runs)
    show_parts(total, "all runs")
    listed = [dict(workdir=workdir) | run for workdir, run in runs.items()]
    cli.write_json(args.json, dict(runs=listed, total=total))


COMMAND = cli.Command(
    "goodput",
    __doc__,
    work,
    add_arguments,
    json="write wall_s, parts, starts, steps_repeated and goodput here",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
