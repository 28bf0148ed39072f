"""Tries to lose a run: kills, signals, full disks, damaged files and mistakes, all seeded. See
docs/reliability.md.

PYTHONPATH=.:tests:tests/train python tests/faults/harness.py \
    [--short] [--only=NAME] [--seed=N] [--part=N] [--out=FILE.md]
"""

import argparse
import collections
import dataclasses
import pathlib
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import conftest  # noqa: F401 - CPU devices
import trials_of_files as files
import trials_of_input as mistakes
import trials_of_runs as runs


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row of the table: `trial(chance, folder, count, **more)` is called for each part, with
    its own seed.
    """

    what: str
    trial: Callable
    short: int  # how many in the one part of the short form
    parts: int  # of the long form
    count: int  # in each of them
    more: dict = dataclasses.field(default_factory=dict)


TRIALS = {
    "kills": Trial("kill -9 of a light run", runs.kills, 4, 10, 9, dict(inside=False)),
    "kills_in_saves": Trial(
        "kill -9 of a light run inside a save", runs.kills, 6, 10, 10, dict(inside=True)
    ),
    "whole_kills": Trial("kill -9 of the train command", runs.whole_kills, 2, 2, 15),
    "checkpoints": Trial("damaged checkpoint", files.damaged_checkpoints, 14, 2, 77),
    "preemptions_of_2": Trial(
        "SIGTERM to one of 2 processes", runs.preemptions, 1, 2, 6, dict(processes=2)
    ),
    "preemptions_of_4": Trial(
        "SIGTERM to one of 4 processes", runs.preemptions, 1, 2, 5, dict(processes=4)
    ),
    "killed_of_2": Trial(
        "kill -9 of one of 2 processes", runs.killed_peers, 1, 1, 5, dict(processes=2)
    ),
    "killed_of_4": Trial(
        "kill -9 of one of 4 processes", runs.killed_peers, 1, 1, 4, dict(processes=4)
    ),
    "killed_under_launcher": Trial(
        "kill -9 below the launcher", runs.launched_peers, 1, 1, 4, dict(processes=4)
    ),
    "full_disks": Trial("full disk", runs.full_disks, 1, 2, 5, dict(processes=1)),
    "full_disk_of_2": Trial(
        "full disk of one of 2 processes", runs.full_disks, 1, 1, 4, dict(processes=2)
    ),
    "lost_stores": Trial("lost folder of checkpoints", runs.lost_stores, 2, 2, 4),
    "images": Trial("damaged or unusual image", files.damaged_images, 150, 2, 750),
    "mistakes": Trial("mistake in a config or command", mistakes.bad_input, 60, 4, 75),
}


def run_part(name: str, seed: int, part: int, count: int) -> tuple[collections.Counter, str | None]:
    """What one part tells, and the fault that it found."""
    chance = random.Random(f"{name}/{seed}/{part}")
    trial = TRIALS[name]
    with tempfile.TemporaryDirectory(prefix=f"faults_{name}_") as folder:
        (pathlib.Path(folder) / "part").mkdir()
        try:
            return trial.trial(chance, pathlib.Path(folder) / "part", count, **trial.more), None
        except Exception as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr)
            return dict(tried=count), f"{type(error).__name__}: {error}"


def row(name: str, seed: int, short: bool, only_part: int | None) -> dict:
    """Runs the parts of a trial."""
    trial, total, faults, longest, begun = (
        TRIALS[name],
        collections.Counter(),
        [],
        0.0,
        time.monotonic(),
    )
    for part in range(1 if short else trial.parts) if only_part is None else [only_part]:
        told, fault = run_part(name, seed, part, trial.short if short else trial.count)
        longest = max(longest, told.pop("longest_s", 0.0))
        total.update(told)
        if fault:
            faults.append(fault)
            form = " --short" if short else ""
            print(
                f"FAULT {fault[:2000]}\nreplay: {sys.argv[0]}{form} --only={name} --seed={seed} "
                f"--part={part}"
            )
    more = {key: value for key, value in total.items() if key != "tried"}
    return dict(name=name, what=trial.what, tried=total["tried"], faults=faults, more=more, longest=longest,
                seconds=time.monotonic() - begun)  # fmt: skip


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| what | tried | lost, wrong or hung | of these | longest end | took |",
        "|---|---|---|---|---|---|",
    ]
    for found in rows:
        of_these = ", ".join(
            f"{value:,} {key.replace('_', ' ')}" for key, value in found["more"].items()
        )
        longest = f"{found['longest']:.0f} s" if found["longest"] else ""
        cells = [
            found["what"],
            f"{found['tried']:,}",
            len(found["faults"]),
            of_these,
            longest,
            f"{found['seconds']:.0f} s",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write_page(path: pathlib.Path, text: str) -> None:
    """Puts the table between its marks in a page."""
    page = path.read_text()
    marks = "<!-- table -->\n", "<!-- end of table -->"
    path.write_text(
        re.sub(
            f"{marks[0]}.*{marks[1]}", lambda _: f"{marks[0]}{text}\n{marks[1]}", page, flags=re.S
        )
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--only", action="append", choices=TRIALS, help="these trials")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--part", type=int, help="this part alone, as a fault's line says")
    parser.add_argument("--out", type=pathlib.Path, help="a page that has marks for the table")
    args = parser.parse_args(argv)
    rows = []
    for name in args.only or TRIALS:
        rows.append(row(name, args.seed, args.short, args.part))
        print(f"{name}: {rows[-1]}", flush=True)
    print(table(rows))
    if args.out:
        write_page(args.out, table(rows))
    return 1 if any(found["faults"] for found in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
