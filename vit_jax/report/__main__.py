"""Writes the page of one or several runs: one HTML file that needs no network.

python -m vit_jax.report WORKDIR... [--out=FILE.html]

WORKDIR is a folder of vit_jax.train, vit_jax.finetune or vit_jax.vtab run, local or gs://, also
while the run goes on, or a reference run (.json).
"""

import sys

from vit_jax import cli, report
from vit_jax.errors import printable


def add_arguments(parser, part: str) -> None:
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of a run, local or gs://")
    parser.add_argument(
        "--out",
        metavar="FILE.html",
        help="default: report.html in the workdir; of several runs, or of a reference run, in the "
        "current folder",
    )


def work(args) -> None:
    cli.check_file(args.out, "--out")
    print(printable(f"Page: {report.write(args.workdirs, args.out)}"))


COMMAND = cli.Command("report", __doc__, work, add_arguments)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
