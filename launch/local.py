"""Runs a command as N processes of one job on this machine.

python -m launch.local --num_processes=4 [--devices=K] -- python -m vit_jax.train ...
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def environment(index: int, count: int, port: int, devices: int) -> dict[str, str]:
    """The variables by which `vit_jax.sharding.start_processes` finds the job; `devices` > 0 fakes CPU devices."""
    extra = dict(
        VIT_JAX_COORDINATOR=f"localhost:{port}", VIT_JAX_NUM_PROCESSES=str(count), VIT_JAX_PROCESS_ID=str(index)
    )
    if devices:
        extra |= dict(JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
    return os.environ | extra


def run(command: list[str], count: int, devices: int) -> int:
    """Starts the processes, hands SIGTERM on to them, and ends all when one fails; returns the first bad exit code."""
    port = free_port()
    jobs = [subprocess.Popen(command, env=environment(i, count, port, devices)) for i in range(count)]

    def stop(number, frame):
        for job in jobs:
            job.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    while any(job.poll() is None for job in jobs) and not any(job.returncode for job in jobs):
        time.sleep(0.1)
    failed = [(i, job.returncode) for i, job in enumerate(jobs) if job.returncode]
    deadline = time.monotonic() + 30
    for job in jobs:
        try:
            job.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            job.kill()
    if failed:
        index, code = failed[0]
        print(f"launch.local: process {index} ended with exit code {code}", file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("launch.local", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--devices", type=int, default=0, help="CPU devices of each process; 0: what JAX finds")
    parser.add_argument("command", nargs="+", help="behind --")
    args = parser.parse_args(argv)
    if args.num_processes < 1:
        parser.error(f"--num_processes={args.num_processes} must be at least 1")
    if shutil.which(args.command[0]) is None:
        parser.error(f"command {args.command[0]} is not found")
    return run(args.command, args.num_processes, args.devices)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
