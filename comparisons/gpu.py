"""Compares our training step on one GPU with big_vision and timm, and our own choices with each
other.

    python -m comparisons.gpu --big_vision=DIR --timm=PYTHON --minutes=10 --out=gpu.md

It needs our package installed with jax[cuda12] or jax[cuda13], a checkout of big_vision with `pip
install einops overrides`, and an interpreter with torch and timm. A peer that is not named is left
out. Every measurement is a process of its own that has the GPU to itself. A batch that does not fit
is halved. The most important rows come first, and rounds are repeated until the time is over. The
table is written after every measurement, as Markdown, with a JSON file of all runs beside it.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import threading
import time

from comparisons.peers import Contender, Ended, Process
from vit_jax.distributed import hardware

CASES = "L/16:256,B/16:512,H/14:128"
STEPS = 10  # per measurement, after as many that are not counted
FIRST_S = 60  # that a measurement is expected to take before it has been timed
LONGEST_S = 240  # after which a measurement is given up
# Of its memory JAX would leave a quarter free, which PyTorch uses.
JAX_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}
NO_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemoryError")

EINSUM = "model.attention=einsum"
CUDNN = "model.attention=cudnn"
RANDAUGMENT = ("data.randaug_layers=2", "data.randaug_magnitude=15")
# What XLA tries for matrix products, and launches without CUDA graphs.
XLA_FLAGS = {
    "Triton for all products": "--xla_gpu_triton_gemm_any=true",
    "exhaustive tiling": "--xla_gpu_exhaustive_tiling_search=true",
    "no CUDA graphs": "--xla_gpu_enable_command_buffer=",
}

OURS, BIG_VISION, COMPILED = "einsum", "big_vision", "timm, compiled"
INSTALL = {
    "big_vision": "git clone https://github.com/google-research/big_vision; pip install einops "
    "overrides; --big_vision=big_vision",
    "timm": "pip install torch timm in an environment of its own; --timm=ENVIRONMENT/bin/python",
}
# At least: share of the card's peak, by model; our images/s over those of a peer.
MFU_TARGETS = {"L/16": 0.45, "H/14": 0.50}
RATIO_TARGETS = {BIG_VISION: 1.5, COMPILED: 1.1}


@dataclasses.dataclass
class Row:
    """A model trained in one way, and what was measured of it."""

    model: str
    batch: int  # images; less if they do not fit
    name: str
    contender: Contender
    runs: list[dict] = dataclasses.field(default_factory=list)
    seconds: float = FIRST_S  # that a measurement takes
    problem: str = ""

    @property
    def images_per_sec(self) -> float:
        return statistics.median(self.batch / run["wall"] for run in self.runs)


def rows(args) -> list[Row]:
    """All rows, the most important ones first."""
    ours = functools.partial(Contender, "vit_jax", "bfloat16", variables=JAX_MEMORY)
    first = {OURS: ours(options=(EINSUM,)), "cudnn": ours(options=(CUDNN,))}
    if args.big_vision:
        first[BIG_VISION] = Contender(
            "big_vision", "bfloat16", args.big_vision, variables=JAX_MEMORY
        )
    if args.timm:
        timm = functools.partial(Contender, "timm", "bfloat16", python=args.timm)
        first[COMPILED] = timm(options=("compile",))
    rest = {"bfloat16 softmax": ours(options=(EINSUM, "model.softmax_dtype=bfloat16"))}
    rest["RandAugment"] = ours(options=(EINSUM, *RANDAUGMENT))
    for name, flag in XLA_FLAGS.items():
        rest[name] = ours(options=(EINSUM,), variables=JAX_MEMORY | {"XLA_FLAGS": flag})
    if args.timm:
        rest["timm"] = timm()
    cases = [case.rsplit(":", 1) for case in args.cases.split(",")]
    return [
        Row(model, int(batch), name, contender)
        for contenders in (first, rest)
        for model, batch in cases
        for name, contender in contenders.items()
    ]


def measure(row: Row, limit_s: float, cache: str) -> None:
    """Adds one measurement to a row, or the problem; halves the batch until it fits."""
    start = time.monotonic()
    process = row.contender.start(row.model, row.batch, cache)
    timer = threading.Timer(limit_s, process.job.kill)
    timer.start()
    try:
        row.runs.append(answers(process))
    except Ended as error:
        row.problem = problem_of(error, expired=time.monotonic() - start >= limit_s)
    finally:
        timer.cancel()
        process.job.kill()
        process.job.wait()  # until then, the GPU's memory is not free
        process.log.close()
    row.seconds = time.monotonic() - start
    if row.problem == "out of memory" and row.batch > 1:
        row.batch //= 2
        row.problem = ""
        row.runs.clear()
        measure(row, limit_s - row.seconds, cache)


def answers(process: Process) -> dict:
    """What a process measures of training: `wall` seconds per step, and the facts of its start."""
    facts = process.ready
    process.run("train", STEPS)
    return facts | process.run("train", STEPS)


def problem_of(error: Ended, expired: bool) -> str:
    """Why a process ended early, in a line for the table."""
    if expired:
        return "not in time"
    text = str(error)
    if any(sign in text for sign in NO_MEMORY):
        return "out of memory"
    lines = text.splitlines()
    named = [line for line in lines if "Error: " in line]
    return (named or lines)[-1].replace("|", "/")[:200]


def mfu(row: Row, flops: float, peak: float | None) -> float | None:
    """Share of the card's peak; a training step has the FLOPs of three forward passes."""
    if not peak or not flops:
        return None
    return 3 * flops * row.images_per_sec / peak


def table(measured: list[Row]) -> str:
    """The rows of one model, as Markdown."""
    done = [row for row in measured if row.runs]
    flops = max((row.runs[0]["flops"] or 0 for row in done), default=0)
    kind = next((row.runs[0]["device"] for row in done), "")
    peak = hardware.peak_flops(kind)
    head = f"| {measured[0].model} | images | images/s | MFU | memory, MiB | runs |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in measured:
        if not row.runs:
            lines.append(f"| {row.name} | {row.batch} | {row.problem or 'not reached'} | | | |")
            continue
        share = mfu(row, flops, peak)
        cells = [row.name, str(row.batch), f"{row.images_per_sec:.4g}"]
        cells += [f"{share:.1%}" if share else ""]
        cells += [f"{row.runs[0]['device_mib']:,.0f}", str(len(row.runs))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *targets(done, flops, peak)])


def targets(done: list[Row], flops: float, peak: float | None) -> list[str]:
    """Our fastest row with images as in training, against what it should reach."""
    ours = [row for row in done if row.contender.name == "vit_jax" and row.name != "RandAugment"]
    if not ours:
        return []
    best = max(ours, key=lambda row: row.images_per_sec)
    lines = [f"- Our fastest: {best.name}."]
    speeds = {row.name: row.images_per_sec for row in done}
    for name, target in RATIO_TARGETS.items():
        if name in speeds:
            ratio = best.images_per_sec / speeds[name]
            lines.append(f"- Against {name}: {ratio:.2f}; target {target}.")
    share = mfu(best, flops, peak)
    if share and best.model in MFU_TARGETS:
        lines.append(f"- MFU: {share:.1%}; target {MFU_TARGETS[best.model]:.0%}.")
    return lines


def write(found: list[Row], args) -> None:
    """The report so far: Markdown, and JSON beside it."""
    kinds = {run["device"] or "CPU" for row in found for run in row.runs}
    texts = [f"Training on {', '.join(sorted(kinds)) or 'nothing yet'}, {STEPS} steps a run."]
    for model in dict.fromkeys(row.model for row in found):
        texts.append(table([row for row in found if row.model == model]))
    for peer, how in INSTALL.items():
        if not getattr(args, peer):
            texts.append(f"{peer} is left out; to add it: {how}")
    out = pathlib.Path(args.out)
    out.write_text("\n\n".join(texts) + "\n")
    runs = [dataclasses.asdict(row) for row in found]
    out.with_suffix(".json").write_text(json.dumps(runs, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    text = "MODEL:IMAGES,... (default: %(default)s)"
    parser.add_argument("--cases", default=CASES, help=text)
    parser.add_argument("--big_vision", metavar="DIR", help="checkout")
    parser.add_argument("--timm", metavar="PYTHON", help="interpreter with torch and timm")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all (default: 10)")
    parser.add_argument("--out", default="gpu.md", metavar="FILE")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    found = rows(args)
    write(found, args)
    with tempfile.TemporaryDirectory() as cache:
        waiting = list(found)
        while waiting:
            row = waiting.pop(0)
            left = end - time.monotonic()
            if row.seconds > left:
                continue
            measure(row, min(left, LONGEST_S), cache)
            write(found, args)
            print(f"{row.model} {row.name}: {row.problem or row.images_per_sec}", flush=True)
            if not row.problem:
                waiting.append(row)
    print(pathlib.Path(args.out).read_text())


if __name__ == "__main__":
    main()
