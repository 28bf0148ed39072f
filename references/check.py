"""Checks published accuracies: runs the command of every row of a table, and compares what it
measures with what the authors of the weights say.

python -m references.check [--table=FILE.csv] [--only=REGEX] [--tolerance=0.1] [--json=FILE]
    [--config.KEY=VALUE ...]

`imagenet.csv` needs ImageNet in TFDS (docs/data.md) and the network; `stand_ins.csv` needs neither,
for its small weights classify the digits of scikit-learn. Commands run at the root of the checkout,
with the overrides. Rows that FILE of --json has already are not run again.
"""

import csv
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from vit_jax import cli
from vit_jax.errors import NegativeResult, UserError, printable

ROOT = pathlib.Path(__file__).parent.parent
IMAGENET = ROOT / "references/imagenet.csv"
COLUMNS = ("weights", "data", "image_size", "top1", "source", "command")
COMMAND = ["python", "-m", "vit_jax.evaluate"]
TOLERANCE = 0.1  # percentage points, because other hardware and libraries round otherwise


def read_table(path) -> list[dict]:
    """The rows of a table, with `top1` in percent as a number, and `rounding`, half a unit of its
    last digit.

    Raises:
      UserError: it can't be read, or a row is not complete.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if tuple(row) != COLUMNS or shlex.split(row["command"])[:3] != COMMAND:
                raise ValueError(f"a row is {list(row.values())}")
            decimals = len(row["top1"].partition(".")[2])
            row |= dict(top1=float(row["top1"]), rounding=0.5 * 10**-decimals)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--table={path} is not a table of {', '.join(COLUMNS)}, whose commands begin with "
            f"{' '.join(COMMAND)} ({error}): correct it"
        ) from None
    return rows


def measure(row: dict, overrides: list[str]) -> float:
    """The top-1 accuracy of a row in percent.

    Raises:
      NegativeResult: its command fails.
    """
    arguments = shlex.split(row["command"])[1:] + overrides
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, *arguments, f"--json={result}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NegativeResult((done.stderr.splitlines() or ["no message"])[-1])
        return 100 * json.loads(result.read_text())["eval/test/top1"]


def judged(row: dict, top1: float, tolerance: float) -> dict:
    """What `--json` says of a row."""
    difference = top1 - row["top1"]
    return dict(
        weights=row["weights"],
        data=row["data"],
        published=row["top1"],
        measured=round(top1, 3),
        difference=round(difference, 3),
        agrees=abs(difference) <= tolerance + row["rounding"],
    )


def line(result: dict) -> str:
    verdict = "agrees" if result["agrees"] else "DIFFERS"
    return (
        f"{verdict:<8} published {result['published']:.2f}  measured {result['measured']:.2f}  "
        f"{result['difference']:+.2f}  {result['data']}  {result['weights']}"
    )


def read_results(path: str | None) -> list[dict]:
    """Those of earlier runs in the file of --json; [] if there are none."""
    if not path or not pathlib.Path(path).exists():
        return []
    try:
        return json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--json={path} is not a file of earlier results ({error}): remove it, or give another"
        ) from None


def check(args, overrides: list[str]) -> None:
    """Runs the commands that are left, and prints a line for each.

    Raises:
      NegativeResult: an accuracy differs, or a command fails.
    """
    cli.check_file(args.json)
    rows = [row for row in read_table(args.table) if re.search(args.only, row["weights"])]
    if not rows:
        raise UserError(f"no weights of {args.table} match --only={args.only}: correct it")
    results = read_results(args.json)
    done = {(result["weights"], result["data"]) for result in results}
    failed = 0
    for row in rows:
        if (row["weights"], row["data"]) in done:
            continue
        try:
            results.append(judged(row, measure(row, overrides), args.tolerance))
        except NegativeResult as error:
            failed += 1
            print(printable(f"FAILED   {row['data']}  {row['weights']}: {error}"), flush=True)
            continue
        print(printable(line(results[-1])), flush=True)
        cli.write_json(args.json, results)
    different = sum(not result["agrees"] for result in results)
    if failed or different:
        raise NegativeResult(
            f"of {len(rows)} accuracies {different} differ by more than {args.tolerance} "
            f"percentage points, and {failed} could not be measured: see the lines above"
        )


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser("references.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--table", default=IMAGENET, help="default: references/imagenet.csv")
    parser.add_argument("--only", default="", help="a regular expression for the weights")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="percentage points beyond rounding"
    )
    parser.add_argument("--json", metavar="FILE", help="write results here, and continue them")
    args, overrides = parser.parse_known_args(argv)
    return cli.run(lambda: check(args, overrides), False, "run the same command again")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
