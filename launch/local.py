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

from vit_jax import errors
from vit_jax.cli import ArgumentParser
from vit_jax.errors import Preempted, printable

GRACE_S = 15  # for the other processes to end by themselves after one failed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(index: int, count: int, port: int, devices: int) -> dict[str, str]:
    """Variables by which `vit_jax.distributed.processes.start` finds the job; `devices` above 0
    also fakes so many CPU devices.
    """
    extra = dict(
        VIT_JAX_COORDINATOR=f"127.0.0.1:{port}",  # not localhost, which may be two addresses
        VIT_JAX_NUM_PROCESSES=str(count),
        VIT_JAX_PROCESS_ID=str(index),
    )
    if devices:
        flags = os.environ.get("XLA_FLAGS", "")
        flags += f" --xla_force_host_platform_device_count={devices}"
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
    """Starts one process. Its output goes to logs/process_I.txt, or here with its number before
    each line.

    It has a session of its own, so that Ctrl-C reaches it only once: from us.
    """
    options = dict(env=env, start_new_session=True)
    if logs:
        with (logs / f"process_{index}.txt").open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
    options |= dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    job = subprocess.Popen(command, **options)
    job.readers = [
        threading.Thread(target=copy_lines, args=(source, target, f"[{index}] "))
        for source, target in ((job.stdout, sys.stdout), (job.stderr, sys.stderr))
    ]
    for reader in job.readers:
        reader.start()
    return job


@contextlib.contextmanager
def receiving_signals():
    """A list that SIGTERM, Ctrl-C and SIGHUP are added to when they come."""
    received = []
    with errors.handling(errors.SIGNALS, lambda number, frame: received.append(number)):
        yield received


def forward(number: int, jobs: list[subprocess.Popen]) -> None:
    for job in jobs:
        if job.poll() is None:
            job.send_signal(number)


def wait(jobs: list[subprocess.Popen], received: list[int]) -> tuple[int, int]:
    """Waits until all have ended; kills the others `GRACE_S` after one failed.

    Signals in `received`, also those from before all were started, are forwarded: the first one as
    it is, a second one kills.

    Returns:
      (index, exit code) of the first process that failed, else of one that was preempted, else of
      process 0.
    """
    failed = None
    deadline = float("inf")
    forwarded = 0
    while None in [job.poll() for job in jobs]:
        if forwarded < len(received):
            forward(signal.SIGKILL if forwarded else received[0], jobs)
            forwarded += 1
        if failed is None:
            failed = first_failed(jobs)
            if failed is not None:
                deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            for job in jobs:
                job.kill()
        time.sleep(0.05)
    for job in jobs:
        for reader in getattr(job, "readers", ()):
            reader.join()
    if failed is None:
        failed = first_failed(jobs)
    codes = [job.returncode for job in jobs]
    index = codes.index(max(codes)) if failed is None else failed
    if codes[index] < 0:  # killed by a signal
        return index, 128 - codes[index]
    return index, codes[index]


def first_failed(jobs: list[subprocess.Popen]) -> int | None:
    """The index of the first process that ended with neither 0 nor 75 (preempted)."""
    ended_well = (None, 0, Preempted.exit_code)
    return next((i for i, job in enumerate(jobs) if job.returncode not in ended_well), None)


def run(command: list[str], count: int, devices: int, logs: pathlib.Path | None) -> int:
    """Runs all processes and returns the exit code of the job."""
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        print(f"launch.local: {count} processes write to {logs}/process_I.txt", file=sys.stderr)
    port = free_port()
    jobs = []
    with receiving_signals() as received:
        for i in range(count):
            jobs.append(start(command, i, environment(i, count, port, devices), logs))
        index, code = wait(jobs, received)
    if code == Preempted.exit_code:
        print(
            f"launch.local: stopped and saved (exit code {code}); the same command continues",
            file=sys.stderr,
        )
    elif code:
        print(f"launch.local: process {index} ended first, with exit code {code}", file=sys.stderr)
        if logs:
            text = (logs / f"process_{index}.txt").read_text(errors="replace")
            print(printable(text[-2000:]), file=sys.stderr)
    return code


def main(argv: list[str]) -> int:
    parser = ArgumentParser("launch.local", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, required=True, metavar="N")
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        metavar="K",
        help="fake CPU devices of each process; 0: the devices that JAX finds",
    )
    parser.add_argument(
        "--logs",
        type=pathlib.Path,
        metavar="DIR",
        help="write the output of each process to a file here",
    )
    parser.add_argument("command", nargs="+", help="after --")
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
