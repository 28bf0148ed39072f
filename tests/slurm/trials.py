"""Jobs of two processes under a real Slurm: preempted, requeued, on a node that dies, out of time.

PYTHONPATH=.:tests:tests/faults:tests/train:tests/slurm python tests/slurm/trials.py [--short]
"""

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

import conftest
from cluster import NODES, PACKAGES, Cluster, missing
from conftest import ROOT, metric_lines
from processes_at_hand import Fault, environment, expect
from test_train import final_params, same_bits

STEPS = 120
END_S = 300
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
LONG = 100_000  # steps, more than fit into a time limit


class Job:
    """A training run, submitted to a cluster as a user would."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path, command=(), options=(), **variables):
        self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        command = command or training(folder)
        self.number = cluster.submit(folder, *command, options=options, **variables)

    @property
    def workdir(self) -> pathlib.Path:
        return self.folder / "run"

    @property
    def state(self) -> dict[str, str]:
        return self.cluster.state(self.number)

    def wait_for_steps(self, count: int) -> None:
        path = self.workdir / "metrics.jsonl"

        def is_far() -> bool:
            expect(self.state["JobState"] not in ENDED, f"ended early: {self.logs()}")
            return path.exists() and len(path.read_bytes().splitlines()) >= count

        self.cluster.wait_for(is_far, END_S, f"{count} steps")

    def wait_for_restart(self, number: int) -> None:
        self.cluster.wait_for(
            lambda: int(self.state["Restarts"]) >= number, END_S, f"restart {number}"
        )

    def finish(self) -> str:
        """The state in which the job ended."""
        self.cluster.wait_for(lambda: self.state["JobState"] in ENDED, END_S, "end of the job")
        return self.state["JobState"]

    def logs(self) -> str:
        paths = [*self.folder.glob("slurm_*.log"), *self.folder.glob("slurm_logs/*.log")]
        return "".join(path.read_text(errors="replace") for path in sorted(paths))


def training(folder: pathlib.Path, steps: int = STEPS) -> list[str]:
    config = folder.parent / "tiny.py"
    config.write_text(conftest.TINY)
    words = [f"--config={config}", f"--workdir={folder / 'run'}", "--config.checkpoint.every=20"]
    words += [f"--config.total_steps={steps}"]
    return [sys.executable, "-m", "vit_jax.train", *words]


def undisturbed(folder: pathlib.Path) -> pathlib.Path:
    """The workdir of the same run by `launch.local`."""
    folder.mkdir()
    command = [sys.executable, "-m", "launch.local", "--num_processes=2", "--devices=1"]
    done = subprocess.run(
        [*command, "--", *training(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, done.stderr)
    return folder / "run"


def check_same(job: Job, truth: pathlib.Path) -> None:
    """The run ended with the bits of the undisturbed one, and has each step once."""
    end = job.finish()
    expect(end == "COMPLETED", f"{end}: {job.logs()}")
    names = ("step", "train/loss", "train/grad_norm")
    for name in names:
        found = [line[name] for line in metric_lines(job.workdir)]
        expected = [line[name] for line in metric_lines(truth)]
        expect(found == expected, f"{name} differs from the undisturbed run")
    expect(same_bits(final_params(job.workdir), final_params(truth)), "parameters differ")


def has_saved(job: Job) -> bool:
    return "stopped by SIGTERM at step" in job.logs()


def expect_saved(job: Job) -> None:
    expect(has_saved(job), f"it did not save: {job.logs()}")


# --- trials: f(cluster, folder, truth) ---


def whole(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    job = Job(cluster, folder)
    check_same(job, truth)
    expect(job.state["Restarts"] == "0", job.state)
    return "the bits of launch.local"


def check_restart(job: Job, truth: pathlib.Path) -> None:
    """The job that was just stopped goes back into the queue, and ends as if it had not been."""
    job.wait_for_restart(1)
    check_same(job, truth)


def terminated(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    job = Job(cluster, folder)
    job.wait_for_steps(20)
    cluster.run("scancel", "--signal=TERM", job.number)
    check_restart(job, truth)
    expect_saved(job)
    return "saved, exit 75, requeued, the same bits"


def preempted(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    """By a job of a partition that goes first, which leaves a grace time."""
    job = Job(cluster, folder)
    job.wait_for_steps(20)
    Job(cluster, folder / "urgent", ["sleep", "1"], ["--partition=urgent"])
    check_restart(job, truth)
    expect_saved(job)
    return "saved in the grace time, requeued, the same bits"


def requeued(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    """`scontrol requeue` leaves `KillWait`, in which it may save or not."""
    job = Job(cluster, folder)
    job.wait_for_steps(30)
    cluster.run("scontrol", "requeue", job.number)
    check_restart(job, truth)
    return f"{'saved' if has_saved(job) else 'killed'}, requeued, the same bits"


def out_of_time(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    """SIGTERM comes before the limit: Slurm counts limits in minutes."""
    job = Job(cluster, folder, training(folder, LONG), ["--time=2", "--signal=TERM@70"])
    job.wait_for_restart(1)
    expect_saved(job)
    cluster.run("scancel", job.number)
    return "saved before the limit, requeued"


def dead_node(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    job = Job(cluster, folder)
    job.wait_for_steps(45)
    start = time.monotonic()
    cluster.kill_node(NODES[1])
    cluster.wait_for(lambda: job.state["JobState"] != "RUNNING", 120, "end after a node died")
    seconds = time.monotonic() - start
    cluster.start_node(NODES[1])
    check_restart(job, truth)
    return f"noticed in {seconds:.0f} s, requeued, continued from a checkpoint, the same bits"


def process_of(job: Job, task: int) -> int:
    """Process id of a task of a job, on this machine."""
    wanted = {f"SLURM_JOB_ID={job.number}", f"SLURM_PROCID={task}"}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            variables = set((folder / "environ").read_text(errors="replace").split("\0"))
            if wanted <= variables and b"vit_jax.train" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:  # it has ended
            continue
    raise Fault(f"task {task} of job {job.number} has no process")


def killed(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    """One process is killed alone, as where memory runs out."""
    job = Job(cluster, folder)
    job.wait_for_steps(45)
    os.kill(process_of(job, 1), signal.SIGKILL)
    check_restart(job, truth)
    return "requeued, continued from a checkpoint, the same bits"


def absent(cluster: Cluster, folder: pathlib.Path, truth: pathlib.Path) -> str:
    """The second process never comes: the first one ends by itself, and the job is not repeated."""
    alone = 'if [ "$SLURM_PROCID" = 1 ]; then sleep 30; else exec "$0" "$@"; fi'
    command = ["bash", "-c", alone, *training(folder)]
    job = Job(cluster, folder, command, VIT_JAX_START_TIMEOUT="8")
    end = job.finish()
    expect(end == "FAILED", end)
    expect("error: " in job.logs() and "within 8 s" in job.logs(), job.logs())
    return "one error line, not requeued"


TRIALS = dict(
    whole=whole,
    terminated=terminated,
    preempted=preempted,
    requeued=requeued,
    dead_node=dead_node,
    killed=killed,
    out_of_time=out_of_time,
    absent=absent,
)
SHORT = ("terminated",)


def install() -> str:
    """Installs Slurm if this may be done; returns why there can be none here, or ""."""
    if missing() and os.geteuid() == 0:
        quiet = dict(env=os.environ | dict(DEBIAN_FRONTEND="noninteractive"), capture_output=True)
        for command in (["update"], ["install", "--no-install-recommends", *PACKAGES]):
            subprocess.run(["apt-get", "-qq", "-y", *command], check=False, **quiet)
    if missing():
        return f"{', '.join(missing())} can't be found or installed"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"the name {socket.gethostname()} does not resolve"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    parser.add_argument("--only", choices=TRIALS, action="append")
    args = parser.parse_args(argv)
    problem = install()
    if problem:
        print(f"no Slurm here: {problem}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemons end, too
    names = args.only or (SHORT if args.short else tuple(TRIALS))
    failed = 0
    print("| job of two processes under Slurm | outcome | duration |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="slurm_") as name:
        folder = pathlib.Path(name)
        truth = undisturbed(folder / "truth")
        with Cluster(folder / "cluster") as cluster:
            for name in names:
                start = time.monotonic()
                try:
                    outcome = TRIALS[name](cluster, folder / name, truth)
                except (Fault, subprocess.SubprocessError) as error:
                    traceback.print_exc()
                    outcome = f"FAULT: {str(error)[:300]}"
                    failed += 1
                print(f"| {name} | {outcome} | {time.monotonic() - start:.0f} s |", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
