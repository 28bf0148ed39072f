"""Runs a command as N processes of one job on this machine.

python -m launch.local --num_processes=4 [--devices=K] [--logs=DIR] -- python -m vit_jax.train ...
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from vit_jax.cli import ArgumentParser
from vit_jax.errors import Preempted

GRACE_S = 15  # for the others to end by themselves after one failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def environment(index: int, count: int, port: int, devices: int) -> dict[str, str]:
    """The variables by which `vit_jax.distributed.processes.start` finds the job; `devices` > 0
    fakes CPU devices.
    """
    extra = dict(
        VIT_JAX_COORDINATOR=f"localhost:{port}",
        VIT_JAX_NUM_PROCESSES=str(count),
        VIT_JAX_PROCESS_ID=str(index),
    )
    if devices:
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        )
        extra |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags.strip())
    return os.environ | extra


def copy_lines(source, target, prefix: str) -> None:
    with source:
        for line in source:
            target.write(prefix + line)
            target.flush()


def start(
    command: list[str], index: int, env: dict[str, str], logs: pathlib.Path | None
) -> subprocess.Popen:
    """Starts one process: its output goes to logs/process_I.txt, or here, each line with its number
    in front.

    In a session of its own, so that Ctrl-C reaches it once: from us.
    """
    if logs:
        with (logs / f"process_{index}.txt").open("w") as file:
            return subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
    pipes = dict(
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    job = subprocess.Popen(command, env=env, **pipes)
    job.readers = [
        threading.Thread(target=copy_lines, args=(source, target, f"[{index}] "))
        for source, target in ((job.stdout, sys.stdout), (job.stderr, sys.stderr))
    ]
    for reader in job.readers:
        reader.start()
    return job


@contextlib.contextmanager
def handing_on_signals(jobs: list[subprocess.Popen]):
    """SIGTERM, Ctrl-C and a closed terminal go to every process; a second one kills them."""
    received = []

    def hand_on(number, frame):
        received.append(number)
        for job in jobs:
            if job.poll() is None:
                job.send_signal(number if len(received) == 1 else signal.SIGKILL)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def wait(jobs: list[subprocess.Popen]) -> tuple[int, int]:
    """Waits until all ended; kills the others `GRACE_S` after one failed.

    Returns:
      (index, exit code) of the first that failed, else of one that was preempted, else of process
      0.
    """
    failed, deadline = None, float("inf")
    while None in [job.poll() for job in jobs]:
        bad = [
            i for i, job in enumerate(jobs) if job.returncode not in (None, 0, Preempted.exit_code)
        ]
        if failed is None and bad:
            failed, deadline = bad[0], time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            for job in jobs:
                job.kill()
        time.sleep(0.05)
    for reader in [reader for job in jobs for reader in getattr(job, "readers", ())]:
        reader.join()
    codes = [job.returncode for job in jobs]
    worst = [i for i, code in enumerate(codes) if code not in (0, Preempted.exit_code)] or [
        codes.index(max(codes))
    ]
    index = worst[0] if failed is None else failed
    return index, codes[index] if codes[index] >= 0 else 128 - codes[index]


def run(command: list[str], count: int, devices: int, logs: pathlib.Path | None) -> int:
    """Runs the processes to their end and returns the exit code of the job."""
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        print(f"launch.local: {count} processes write to {logs}/process_I.txt", file=sys.stderr)
    port, jobs = free_port(), []
    with handing_on_signals(jobs):
        for i in range(count):
            jobs.append(start(command, i, environment(i, count, port, devices), logs))
        index, code = wait(jobs)
    if code == Preempted.exit_code:
        print(
            f"launch.local: stopped and saved (exit code {code}); the same command continues",
            file=sys.stderr,
        )
    elif code:
        print(f"launch.local: process {index} ended first, with exit code {code}", file=sys.stderr)
        if logs:
            print(
                (logs / f"process_{index}.txt").read_text(errors="replace")[-2000:], file=sys.stderr
            )
    return code


def main(argv: list[str]) -> int:
    parser = ArgumentParser("launch.local", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, required=True, metavar="N")
    parser.add_argument(
        "--devices", type=int, default=0, metavar="K", help="CPU devices of each; 0: what JAX finds"
    )
    parser.add_argument(
        "--logs", type=pathlib.Path, metavar="DIR", help="output goes to files here, one for each"
    )
    parser.add_argument("command", nargs="+", help="behind --")
    args = parser.parse_args(argv)
    if args.num_processes < 1:
        parser.error(f"--num_processes={args.num_processes} must be at least 1")
    if args.devices < 0:
        parser.error(f"--devices={args.devices} must be at least 0")
    if shutil.which(args.command[0]) is None:
        parser.error(f"command {args.command[0]} is not found")
    if args.logs and args.logs.exists() and not args.logs.is_dir():
        parser.error(f"--logs={args.logs} is a file")
    return run(args.command, args.num_processes, args.devices, args.logs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
