"""`vit_jax.benchmark startup`: seconds from the start of a command to its first step, to its help,
and to an error in a config.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from vit_jax.benchmark.rows import row
from vit_jax.distributed.runtime import JAX_VARIABLES
from vit_jax.errors import UserError

TRAIN = [sys.executable, "-m", "vit_jax.train"]


def wait_for_metrics(job: subprocess.Popen, path: pathlib.Path) -> dict:
    """Waits until the run has written the metrics of its first step, and returns them."""
    while not (path.exists() and path.read_text().endswith("\n")):
        if job.poll() is not None:
            _, stderr = job.communicate()
            last = stderr.strip().splitlines()[-1]
            raise UserError(f"the run ended before its first step: {last}")
        time.sleep(0.01)
    return json.loads(path.read_text().splitlines()[0])


def first_step(
    arguments: list[str], folder: pathlib.Path, cache: pathlib.Path
) -> tuple[float, float]:
    """Seconds from the start of the process to the end of its first step, and of compilation."""
    environment = {key: value for key, value in os.environ.items() if key not in JAX_VARIABLES}
    environment["VIT_JAX_CACHE"] = str(cache)
    settings = ("log_every=1", "total_steps=2", "total_epochs=0")
    overrides = [f"--config.{setting}" for setting in settings]
    command = [*TRAIN, *arguments, f"--workdir={folder}", *overrides]
    start = time.perf_counter()
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = wait_for_metrics(job, folder / "metrics.jsonl")
    seconds = time.perf_counter() - start
    job.communicate()
    return seconds, metrics["perf/compile_s"]


def run(config, args) -> list[dict]:
    """Starts every command `args.runs` times, each in a process of its own."""
    train = [f"--config={args.location}", *args.overrides]
    commands = {
        "--help": [*TRAIN, "--help"],
        "an error in the config": [*TRAIN, *train, "--config.no_such_key=1"],
    }
    found = collections.defaultdict(list)
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder, "cache")
            for name in ("empty", "filled"):
                seconds, compiling = first_step(train, pathlib.Path(folder, name), cache)
                found[f"start to first step, {name} compilation cache"].append(seconds)
                found[f"compilation of the step in it, {name} cache"].append(compiling)
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, capture_output=True, check=False)
            found[name].append(time.perf_counter() - start)
    return [row(name, "s", runs) for name, runs in found.items()]
