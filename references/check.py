"""Checks published accuracies: runs the command of every row of a table, and compares what it
measures with what the authors of the weights say.

python -m references.check [--table=FILE.csv] [--only=REGEX] [--tolerance=0.1] [--json=FILE]
    [--config.KEY=VALUE ...]

`imagenet.csv` needs ImageNet in TFDS (docs/data.md) and the network; `stand_ins.csv` needs neither,
for its small weights classify the digits of scikit-learn. Commands run at the root of the checkout,
with the overrides. What FILE of --json has already is not measured again.
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
METRIC = "eval/test/top1"
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
        if not rows:
            raise ValueError("it has no rows")
        for row in rows:
            if tuple(row) != COLUMNS or shlex.split(row["command"] or "")[:3] != COMMAND:
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
      NegativeResult: its command fails, or measures something else.
    """
    arguments = shlex.split(row["command"])[1:] + overrides
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, *arguments, f"--json={result}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NegativeResult((done.stderr.splitlines() or ["no message"])[-1])
        found = json.loads(result.read_text())
        if METRIC not in found:
            raise NegativeResult(f"it measures {', '.join(found)}, but not {METRIC}")
        return 100 * found[METRIC]


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


def read_results(path: str | None) -> dict[tuple[str, str], dict]:
    """Those of earlier runs in the file of --json, by (weights, data); {} if there are none."""
    if not path or not pathlib.Path(path).exists():
        return {}
    try:
        results = json.loads(pathlib.Path(path).read_text())
        return {
            (one["weights"], one["data"]): one | dict(measured=float(one["measured"]))
            for one in results
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--json={path} is not a file of earlier results ({error}): remove it, or give another"
        ) from None


def chosen(table, only: str) -> list[dict]:
    """The rows of a table whose weights match a regular expression.

    Raises:
      UserError: none does, or it is not a valid one.
    """
    try:
        rows = [row for row in read_table(table) if re.search(only, row["weights"])]
    except re.error as error:
        raise UserError(
            f"--only={only} is not a valid regular expression ({error}): correct it"
        ) from None
    if not rows:
        raise UserError(f"no weights of {table} match --only={only}: correct it")
    return rows


def check(args, overrides: list[str]) -> None:
    """Runs the commands that are left, and prints a line for each row.

    Raises:
      NegativeResult: an accuracy differs, or a command fails.
    """
    unknown = [word for word in overrides if not word.startswith("--config.")]
    if unknown:
        raise UserError(f"{unknown[0]} is not known: overrides are --config.KEY=VALUE: see --help")
    cli.check_file(args.json)
    rows = chosen(args.table, args.only)
    results = read_results(args.json)
    failed = 0
    different = 0
    for row in rows:
        key = (row["weights"], row["data"])
        try:
            top1 = results[key]["measured"] if key in results else measure(row, overrides)
        except NegativeResult as error:
            failed += 1
            print(printable(f"FAILED   {row['data']}  {row['weights']}: {error}"), flush=True)
            continue
        results[key] = judged(row, top1, args.tolerance)
        different += not results[key]["agrees"]
        print(printable(line(results[key])), flush=True)
        cli.write_json(args.json, list(results.values()))
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
