"""Compares our training step and inference with big_vision, vision_transformer and timm.

    python -m comparisons.peers --big_vision=DIR --vision_transformer=DIR --timm=PYTHON --json=FILE

DIR is a checkout, PYTHON an interpreter with torch and timm; a peer that is not named is left out.
Each implementation runs in a process of its own. For each model all are started, warmed up, and
then take turns of `--steps` steps. The time of the first step counts from the start of the process;
our compilation cache is filled before. The report has ratios of medians. `comparisons.gpu` is for
GPUs, where one process takes all of the memory.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

CHILD = pathlib.Path(__file__).with_name("peer_steps.py")
CPU_CASES = "Ti/16:16,S/16:8,B/16:4,32px/4:128"
WARMUP = 2
FIGURES = (
    "train images/s",
    "train core-ms/image",
    "infer images/s",
    "peak MiB",
    "first step, s",
)
OURS = ("vit_jax bfloat16", "vit_jax float32")


@dataclasses.dataclass
class Contender:
    """One implementation in one dtype."""

    name: str
    dtype: str
    path: str = "-"
    options: tuple[str, ...] = ()
    python: str = sys.executable
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the environment

    @property
    def title(self) -> str:
        words = [self.name, self.dtype]
        if "compile" in self.options:
            words.append("compile")
        return " ".join(words)

    def start(self, model: str, batch: int, cache: str) -> "Process":
        words = [self.name, model, str(batch), self.dtype, self.path, *self.options]
        environment = os.environ | dict(BEGUN=str(time.time()), VIT_JAX_CACHE=cache)
        environment |= self.variables
        if self.name == "vit_jax":
            paths = [str(CHILD.parent.parent), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return Process([self.python, str(CHILD), *words], environment)


class Ended(Exception):
    """A contender's process ended, for example because the GPU has too little memory."""


class Process:
    """A running contender."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        self.job = subprocess.Popen(command, env=environment, text=True, **pipes)

    @functools.cached_property
    def ready(self) -> dict:
        """The facts of its first step, after which it runs commands."""
        return self.answer()

    def answer(self) -> dict:
        line = self.job.stdout.readline()
        if not line:
            self.log.seek(0)
            raise Ended(f"{' '.join(self.job.args)} ended: {self.log.read().strip()[-2000:]}")
        return json.loads(line)

    def run(self, what: str, count: int) -> dict:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its answer says
            print(f"{what} {count}", file=self.job.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.job.communicate("end\n")
        self.log.close()


def contenders(args) -> list[Contender]:
    options = tuple(args.set)
    found = [Contender("vit_jax", dtype, options=options) for dtype in ("bfloat16", "float32")]
    both = ("float32", "bfloat16")
    if args.big_vision:
        found += [Contender("big_vision", dtype, args.big_vision) for dtype in both]
    if args.vision_transformer:
        found.append(Contender("vision_transformer", "float32", args.vision_transformer))
    if args.timm:
        found += [Contender("timm", dtype, python=args.timm) for dtype in both]
        if args.compile:
            found.append(Contender("timm", "bfloat16", options=("compile",), python=args.timm))
    if args.only:
        found = [contender for contender in found if contender.title in args.only.split(",")]
    return found


def turn(process: Process, args, facts: dict, batch: int, warm: bool) -> None:
    """Runs one round of a contender and adds its figures to `facts`."""
    for what, count in dict(train=args.steps, infer=2 * args.steps).items():
        if warm:
            process.run(what, WARMUP)
        found = process.run(what, count)
        facts.setdefault(f"{what} images/s", []).append(batch / found["wall"])
        facts.setdefault(f"{what} core-ms/image", []).append(1e3 * found["cpu"] / batch)
        if what == "train":
            facts["peak MiB"] = [found["peak_mib"]]


def measure(case: str, args) -> dict[str, dict[str, list[float]]]:
    """{title: {figure: runs}} of one model, without contenders that fail."""
    model, batch = case.rsplit(":", 1)
    found = {}
    processes = {}

    def start(contender: Contender) -> Process:
        process = contender.start(model, int(batch), cache)
        found[contender.title].setdefault("first step, s", []).append(process.ready["first_step"])
        return process

    def each(work) -> None:
        for contender in contenders(args):
            try:
                if contender.title in found:
                    work(contender)
            except Ended as error:
                print(f"{case} {contender.title} is left out: {error}", file=sys.stderr, flush=True)
                del found[contender.title]

    def prepare(contender: Contender) -> None:
        if contender.name == "vit_jax":  # fills the compilation cache
            start(contender).end()
            facts = found[contender.title]
            facts["first step, s, empty cache"] = facts.pop("first step, s")
        processes[contender.title] = start(contender)

    def play(contender: Contender) -> None:
        facts = found[contender.title]
        warm = "peak MiB" not in facts
        turn(processes[contender.title], args, facts, int(batch), warm)
        print(f"{case} {contender.title}: {facts['train images/s'][-1]:.2f} images/s", flush=True)

    with tempfile.TemporaryDirectory() as cache:
        found.update({contender.title: {} for contender in contenders(args)})
        each(prepare)
        for _ in range(args.rounds):
            each(play)
        for process in processes.values():
            process.end()
    return found


def ratio(found: dict, figure: str, ours: str, theirs: str) -> float:
    """The ratio of the medians."""
    return statistics.median(found[ours][figure]) / statistics.median(found[theirs][figure])


def markdown(case: str, found: dict) -> str:
    figures = [figure for figure in FIGURES if any(figure in facts for facts in found.values())]
    head = [case.replace(":", ", images "), *figures, "our best against it, training", "inference"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]

    def speed(title: str) -> float:
        return statistics.median(found[title]["train images/s"])

    best = max((title for title in OURS if title in found), key=speed)
    for title, facts in found.items():
        cells = []
        for figure in figures:
            runs = facts.get(figure)
            cells.append(f"{statistics.median(runs):.4g}" if runs else "")
        for what in ("train", "infer"):
            cells.append(f"{ratio(found, f'{what} images/s', best, title):.2f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cases", default=CPU_CASES, help="MODEL:IMAGES,... (default: %(default)s)"
    )
    parser.add_argument("--big_vision", metavar="DIR")
    parser.add_argument("--vision_transformer", metavar="DIR")
    parser.add_argument("--timm", metavar="PYTHON")
    parser.add_argument("--compile", action="store_true", help="add timm with torch.compile")
    parser.add_argument(
        "--only", default="", help="contenders, such as 'vit_jax bfloat16,timm float32'"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of our config; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    args = parser.parse_args()
    rows = []
    tables = []
    for case in args.cases.split(","):
        found = measure(case, args)
        for title, facts in found.items():
            for figure, runs in facts.items():
                if runs:
                    name = f"{case}: {title}: {figure}"
                    median = statistics.median(runs)
                    rows.append(dict(name=name, unit=figure, median=median, runs=runs))
        tables.append(markdown(case, found))
        print(tables[-1], flush=True)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
        if args.markdown:
            pathlib.Path(args.markdown).write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
