"""Light runs as processes: started quickly, killed, and checked against an uninterrupted run."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from conftest import ROOT

LIGHT = ROOT / "tests/faults/light_run.py"
HANG_S = 180  # longer than any time-out in a trial


class Fault(AssertionError):
    """Something was lost, wrong, or hung."""


def expect(condition, what) -> None:
    if not condition:
        raise Fault(what)


def environment(devices: int = 1) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    rest = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return rest | dict(
        JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="3"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Server:
    """A process that forks light runs, one at a time."""

    def __init__(self, how: str, **variables: str):
        """`how`: an option of light_run.py."""
        command = [sys.executable, str(LIGHT), how]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process = subprocess.Popen(command, env=environment() | variables, **pipes)

    def start(self, stderr: pathlib.Path, arguments: list, **variables: str) -> int:
        self.stderr = stderr
        job = dict(env=variables, stderr=str(stderr), arguments=arguments)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.pid = int(self.process.stdout.readline())
        return self.pid

    def finish(self) -> tuple[int, str]:
        """(exit code, stderr) of the run; negative codes are signals."""
        code = int(self.process.stdout.readline())
        return code, self.stderr.read_text(errors="replace")

    def is_running(self) -> bool:
        """Whether the run has not ended; until `finish` reads its exit code it may be a zombie."""
        try:
            stat = pathlib.Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.is_running():
            os.kill(self.pid, number)


@functools.cache
def server(index: int) -> Server:
    return Server("--serve")


@dataclasses.dataclass
class LightJob:
    """A light run in `folder`, by `count` processes, with a checkpoint every `every` steps."""

    folder: pathlib.Path
    count: int = 1
    steps: int = 400
    every: int = 5
    pause: float = 0.005
    more: tuple = ()
    whole_end: bool = False  # of the interpreter, which waits for threads, as users' runs end

    def server(self, index: int) -> Server:
        return server(index)

    def variables(self) -> dict[str, str]:
        """Of the environment of its processes."""
        return dict(WHOLE_END="1") if self.whole_end else {}

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lines_before = len(self.lines(0))
        port = free_port()
        for i in range(self.count):
            names = ("VIT_JAX_COORDINATOR", "VIT_JAX_NUM_PROCESSES", "VIT_JAX_PROCESS_ID")
            values = (f"localhost:{port}", str(self.count), str(i))
            variables = dict(zip(names, values, strict=True))
            arguments = [str(self.folder), self.steps, self.every, self.pause, *self.more]
            stderr = self.folder / f"stderr_{i}.txt"
            if self.count == 1:
                variables = {}
            self.server(i).start(stderr, arguments, **(variables | self.variables()))

    def lines(self, process: int) -> list[dict]:
        """What a process wrote, in complete lines; a kill may truncate the last one."""
        path = self.folder / f"run_{process}.jsonl"
        lines = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines

    def since_start(self) -> list[dict]:
        return self.lines(0)[self.lines_before :]

    def wait_for(self, done, timeout: float = HANG_S) -> bool:
        """Waits until done() is true or all processes have ended; returns done()."""
        end = time.monotonic() + timeout
        while any(self.server(i).is_running() for i in range(self.count)):
            if done():
                return True
            expect(time.monotonic() < end, f"hung for {timeout} s in {self.folder}")
            time.sleep(0.001)
        return done()

    def wait_for_steps(self, count: int) -> bool:
        return self.wait_for(lambda: sum("step" in line for line in self.since_start()) >= count)

    def finish(self, timeout: float = HANG_S) -> list[tuple[int, str]]:
        """(exit code, stderr) by process."""
        self.wait_for(lambda: False, timeout)
        return [self.server(i).finish() for i in range(self.count)]

    def committed(self) -> list[int]:
        folder = self.folder / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())

    def is_saving(self) -> bool:
        return any((self.folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@functools.cache
def truth(folder: str, count: int, steps: int) -> tuple[dict[int, float], list[str]]:
    """(loss by step, final digest by process) of an uninterrupted light run."""
    job = LightJob(
        pathlib.Path(folder) / f"truth_{count}_{steps}", count, steps, every=steps, pause=0.0
    )
    job.start()
    ends = job.finish()
    expect(all(code == 0 for code, _ in ends), ends)
    return check(job, None)


def check(job: LightJob, expected) -> tuple[dict[int, float], list[str]]:
    """What a finished light run computed, as `truth` gives it; a step that was repeated must have
    had the same loss each time, and all must be as expected.
    """
    losses = {}
    for line in job.lines(0):
        if "step" in line:
            loss = losses.setdefault(line["step"], line["loss"])
            expect(
                loss == line["loss"], f"step {line['step']} had loss {loss}, later {line['loss']}"
            )
    ends = [job.lines(i)[-1] for i in range(job.count)]
    expect(all(end.get("last") == job.steps for end in ends), f"not at the end: {ends}")
    result = losses, [end["digest"] for end in ends]
    expect(sorted(losses) == list(range(1, job.steps + 1)), "steps are missing")
    expect(
        expected is None or result == expected,
        "losses or the final state differ from the uninterrupted run",
    )
    return result
