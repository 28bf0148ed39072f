"""`vit_jax.benchmark startup`: seconds from a command to its first step, to its help, and to an
error in a config.
"""

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
from vit_jax.train.timer import timed

TRAIN = [sys.executable, "-m", "vit_jax.train"]


def seconds_until(job: subprocess.Popen, path: pathlib.Path, begun: float) -> tuple[float, dict]:
    """From `begun` until the run has written the metrics of its first step, which are returned,
    too.

    Raises:
      UserError: it ended before.
    """
    while not (path.exists() and path.read_text().endswith("\n")):
        if job.poll() is not None:
            raise UserError(
                "the run ended before its first step: "
                f"{job.communicate()[1].strip().splitlines()[-1]}"
            )
        time.sleep(0.01)
    return time.perf_counter() - begun, json.loads(path.read_text().splitlines()[0])


def first_step(
    arguments: list[str], folder: pathlib.Path, cache: pathlib.Path
) -> tuple[float, float]:
    """(seconds from the start of the process to the end of its first step, of these for
    compilation).
    """
    environment = {key: value for key, value in os.environ.items() if key not in JAX_VARIABLES}
    environment["VIT_JAX_CACHE"] = str(cache)
    more = [
        f"--workdir={folder}",
        "--config.log_every=1",
        "--config.total_steps=2",
        "--config.total_epochs=0",
    ]
    begun = time.perf_counter()
    job = subprocess.Popen(
        [*TRAIN, *arguments, *more], env=environment, stderr=subprocess.PIPE, text=True
    )
    seconds, metrics = seconds_until(job, folder / "metrics.jsonl", begun)
    job.communicate()
    return seconds, metrics["perf/compile_s"]


def run(config, args) -> list[dict]:
    """Starts every command `args.runs` times in processes of their own."""
    train = [f"--config={args.location}", *args.overrides]
    commands = {
        "--help": [*TRAIN, "--help"],
        "an error in the config": [*TRAIN, *train, "--config.no_such_key=1"],
    }
    found: dict[str, list[float]] = {}
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder, "cache")
            for name in ("empty", "filled"):
                seconds, compiling = first_step(train, pathlib.Path(folder, name), cache)
                found.setdefault(f"start to first step, {name} compilation cache", []).append(
                    seconds
                )
                found.setdefault(f"of it compilation of the step, {name} cache", []).append(
                    compiling
                )
        for name, command in commands.items():
            _, seconds = timed(
                lambda command=command: subprocess.run(command, capture_output=True, check=False)
            )
            found.setdefault(name, []).append(seconds)
    return [row(name, "s", runs) for name, runs in found.items()]
