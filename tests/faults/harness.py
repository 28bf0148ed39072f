"""Tests that nothing is lost: seeded kills, signals, full disks, damaged files and mistakes. See
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
import trials_of_hostile_files as hostile
import trials_of_input as mistakes
import trials_of_names as names
import trials_of_networks as networks
import trials_of_runs as runs
import trials_of_signals as signals
import trials_of_stores as stores
import trials_of_workdirs as workdirs


@dataclasses.dataclass(frozen=True)
class Trial:
    """One row of the table: `trial(rng, folder, count, **options)` is called for each part, with a
    seed of its own.
    """

    what: str
    trial: Callable
    short: int  # how many in the one part of the short form; 0: none, it takes long
    parts: int  # of the long form
    count: int  # in each of them
    options: dict = dataclasses.field(default_factory=dict)


STORE_FAULTS = {
    "429_burst": "bursts of 429",
    "503_burst": "bursts of 503",
    "503": "503 to one in 20 requests",
    "reset": "connections reset",
    "stall": "connections that stall",
    "truncated": "truncated answers",
    "checksum": "a flipped bit in answers",
    "missing": "404 for objects that exist",
    "refused": "401 and 403 for a while",
    "slow": "slow answers",
}
TRIALS = {
    "kills": Trial("kill -9 of a light run", runs.kills, 4, 10, 9, dict(inside=False)),
    "kills_in_saves": Trial(
        "kill -9 of a light run during a save", runs.kills, 6, 10, 10, dict(inside=True)
    ),
    "whole_kills": Trial("kill -9 of the train command", runs.whole_kills, 3, 2, 15),
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
        "kill -9 of one of 4 processes under the launcher",
        runs.launched_peers,
        1,
        1,
        4,
        dict(processes=4),
    ),
    "full_disks": Trial("full disk", runs.full_disks, 1, 2, 5, dict(processes=1)),
    "full_disk_of_2": Trial(
        "full disk of one of 2 processes", runs.full_disks, 1, 1, 4, dict(processes=2)
    ),
    "lost_stores": Trial("missing checkpoint folder", runs.lost_stores, 2, 2, 4),
    **{
        f"store_{kind}": Trial(
            f"run on a store, kill -9, and {what}", stores.faulty_stores, 1, 2, 4, dict(kind=kind)
        )
        for kind, what in STORE_FAULTS.items()
    },
    "images": Trial("damaged or unusual image", files.damaged_images, 150, 2, 750),
    "damaged_lines": Trial("damaged lines of metrics.jsonl", workdirs.damaged_lines, 100, 2, 300),
    "lost_configs": Trial("config.json lost or damaged", workdirs.lost_configs, 20, 2, 60),
    "denied_checkpoints": Trial(
        "checkpoint that may not be read", workdirs.denied_checkpoints, 4, 2, 20
    ),
    "two_runs": Trial("processes that take one workdir", workdirs.two_runs, 10, 2, 60),
    "written_files": Trial(
        "full disk while a table is written", workdirs.written_files, 60, 2, 200
    ),
    "changed_shards": Trial("tar shard that changes", workdirs.changed_shards, 10, 2, 40),
    "lost_data": Trial("images that can't be read any more", workdirs.lost_data, 8, 2, 30),
    "whole_lost_data": Trial(
        "data moved away from the train command", workdirs.whole_lost_data, 0, 1, 6
    ),
    "signals": Trial("Ctrl-C, SIGTERM or SIGHUP to the train command", signals.signals, 0, 2, 15),
    "signals_in_imports": Trial(
        "the same while libraries are imported", signals.signals_in_imports, 4, 2, 30
    ),
    "printed_names": Trial("hostile name in an output", names.printed_names, 110, 2, 550),
    "csv_columns": Trial("first line of a CSV file", names.csv_columns, 50, 2, 500),
    "like_classes": Trial("classes that look the same", names.like_classes, 60, 2, 300),
    "workdirs": Trial("unusual or wrong workdir", names.workdirs, 21, 2, 110),
    "hostile_data": Trial(
        "FIFO, device, bomb or absurd size in a data set", hostile.hostile_data, 10, 2, 300
    ),
    "hostile_weights": Trial(
        "FIFO or device in place of weights, or weights that can't be read",
        hostile.hostile_weights,
        40,
        2,
        200,
    ),
    "hostile_runs": Trial(
        "FIFO, device or absurd size in a workdir", hostile.hostile_runs, 15, 2, 100
    ),
    "mistakes": Trial("mistake in a config or command", mistakes.bad_input, 60, 4, 75),
    "weights_servers": Trial(
        "broken or hostile server of weights", networks.weights_servers, 36, 2, 180
    ),
    "good_servers": Trial("unusual but right server of weights", networks.good_servers, 20, 2, 100),
    "strangers": Trial("stranger at the rendezvous", networks.strangers, 16, 2, 80),
    "impostors": Trial("another program in place of process 0", networks.impostors, 4, 2, 40),
    "coordinators": Trial(
        "where the coordinator of 2 processes listens", networks.coordinators, 1, 1, 4
    ),
}


def chosen(short: bool) -> list[str]:
    return [name for name, trial in TRIALS.items() if trial.short or not short]


def run_part(name: str, seed: int, part: int, count: int) -> tuple[collections.Counter, str | None]:
    """(counts of one part, its fault or None)."""
    rng = random.Random(f"{name}/{seed}/{part}")
    trial = TRIALS[name]
    with tempfile.TemporaryDirectory(prefix=f"faults_{name}_") as folder:
        (pathlib.Path(folder) / "part").mkdir()
        try:
            return trial.trial(rng, pathlib.Path(folder) / "part", count, **trial.options), None
        except Exception as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr)
            return dict(tried=count), f"{type(error).__name__}: {error}"


def row(name: str, seed: int, short: bool, only_part: int | None) -> dict:
    """Runs the parts of a trial and returns the cells of its row."""
    trial = TRIALS[name]
    total = collections.Counter()
    faults = []
    longest = 0.0
    start = time.monotonic()
    parts = [only_part]
    if only_part is None:
        parts = range(1 if short else trial.parts)
    for part in parts:
        counts, fault = run_part(name, seed, part, trial.short if short else trial.count)
        longest = max(longest, counts.pop("longest_s", 0.0))
        total.update(counts)
        if fault:
            faults.append(fault)
            form = " --short" if short else ""
            print(
                f"FAULT {fault[:2000]}\nreplay: {sys.argv[0]}{form} --only={name} --seed={seed} "
                f"--part={part}"
            )
    return dict(
        name=name,
        what=trial.what,
        tried=total.pop("tried"),
        faults=faults,
        of_these=dict(total),
        longest=longest,
        seconds=time.monotonic() - start,
    )


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        "| what | trials | lost, wrong or hung | of these | longest time to end | duration |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        of_these = [f"{value:,} {key.replace('_', ' ')}" for key, value in one["of_these"].items()]
        cells = [
            one["what"],
            f"{one['tried']:,}",
            str(len(one["faults"])),
            ", ".join(of_these),
            f"{one['longest']:.0f} s" if one["longest"] else "",
            f"{one['seconds']:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(path: pathlib.Path, text: str) -> None:
    """Replaces the table between the two marks of a page."""
    first = "<!-- table -->\n"
    last = "<!-- end of table -->"
    new = f"{first}{text}\n{last}"
    path.write_text(re.sub(f"{first}.*{last}", lambda _: new, path.read_text(), flags=re.S))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few trials of each kind")
    parser.add_argument("--only", action="append", choices=TRIALS, help="only these trials")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--part", type=int, help="only this part, as the line of a fault says")
    parser.add_argument(
        "--out", type=pathlib.Path, help="write the table between the marks of this page"
    )
    args = parser.parse_args(argv)
    rows = []
    for name in args.only or chosen(args.short):
        rows.append(row(name, args.seed, args.short, args.part))
        print(f"{name}: {rows[-1]}", flush=True)
    print(table(rows))
    if args.out:
        write_page(args.out, table(rows))
    return 1 if any(one["faults"] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
