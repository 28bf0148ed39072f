"""Says where runs begin to differ: what is different in config, data, code and versions, the first
step at which their metrics differ, and what happened there.

python -m vit_jax.compare A B... [--tolerance=X] [--json=FILE] [--save=references/NAME.json]

A, B are workdirs of vit_jax.train, local or gs://, also while the runs go on, or files that --save
has written. Each B is compared with A.
"""

import math
import os
import sys

from vit_jax import cli
from vit_jax.errors import NegativeResult, UserError
from vit_jax.report import contents, reference, run
from vit_jax.report.files import Folder
from vit_jax.report.run import Run


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="workdir, local or gs://, or a reference run (.json)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="relative difference that counts as the same (default: 0, the same bits)",
    )
    parser.add_argument(
        "--save",
        metavar="FILE.json",
        help="keep the first run as a reference; the others have other seeds, and give intervals",
    )


def read(path: str, label: str) -> Run:
    """
    Raises:
      UserError: there is no run.
    """
    if reference.is_reference(path):
        return reference.read(path, label)
    folder = Folder(path, [])
    names = folder.names()
    if not run.is_workdir(names):
        raise UserError(contents.nothing_in(folder, names))
    found = run.read(folder, label)
    if folder.problems:
        raise UserError(f"{folder.problems[0]}: correct the path, or restore the file")
    return found


def work(args) -> None:
    from vit_jax.compare import pair, show

    if not 0 <= args.tolerance < math.inf:
        raise UserError(
            f"--tolerance={args.tolerance} must be 0 or more: give a number such as 1e-5"
        )
    cli.check_file(args.save, "--save")
    paths = [os.path.expanduser(path).rstrip("/") or path for path in args.runs]
    if len(set(paths)) < len(paths):
        raise UserError(f"the same run is given twice ({', '.join(paths)}): give different runs")
    names = contents.labels(paths)
    runs = [read(path, name) for path, name in zip(paths, names, strict=True)]
    if args.save and args.json:
        raise UserError("--json has what a comparison finds, and --save compares nothing: give one")
    if args.save:
        reference.write(runs, args.save)
        return print(f"Reference: {args.save}")
    if len(runs) < 2:
        raise UserError(f"there is one run, {paths[0]}: give two or more to compare")
    pairs = [pair.compare(runs[0], other, args.tolerance) for other in runs[1:]]
    show.show(runs, pairs, paths)
    decisive = next((one for one in pairs if not one.same), pairs[0])
    found = [one.to_json() for one in pairs]
    cli.write_json(args.json, decisive.to_json() | dict(pairs=found))
    if not decisive.same:
        raise NegativeResult(show.verdict(decisive))


COMMAND = cli.Command("compare", __doc__, work, add_arguments, json="write what was found here")
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
