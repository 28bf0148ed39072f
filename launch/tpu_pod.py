"""The gcloud commands by which `launch.tpu_vm` creates and controls a pod; nothing runs here."""

import dataclasses
import pathlib
import re
import shlex

from launch import archive, tpu_types
from vit_jax.errors import UserError

ACTIONS = {
    "create": "request the TPUs and wait until they are active",
    "setup": "copy this checkout to every worker and install it",
    "run": "start the command on every worker, in the background",
    "logs": "follow the log of the leading worker",
    "status": "show the state of the TPUs and of every worker",
    "stop": "make the command save and end",
    "delete": "release the TPUs",
    "up": "all of this, again after every preemption until the command is done; then delete",
}
RUNTIMES = {  # https://cloud.google.com/tpu/docs/runtimes
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHIVES = "/tmp"
SCRIPT = "vit_jax/launch/worker.sh"

UNPACK = f"mkdir -p vit_jax && tar -xzf vit_jax.tar.gz -C vit_jax && bash {SCRIPT} setup"


@dataclasses.dataclass(frozen=True)
class Pod:
    """A queued resource of `num_slices` TPU VM nodes; its methods return the words of commands."""

    name: str
    zone: str
    project: str
    accelerator: str | None = None
    num_slices: int = 1
    spot: bool = False
    runtime: str | None = None
    create_args: tuple[str, ...] = ()
    unlisted: bool = False
    untracked: bool = False

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", self.name):
            raise UserError(
                f"--name={self.name} is not a valid name: choose up to 50 characters from a-z, 0-9 "
                "and -, the first a letter, the last not -"
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]", self.zone):
            raise UserError(
                f"--zone={self.zone} is not a zone: give one that has your TPUs, such as us-west4-a"
            )
        if self.num_slices < 1:
            raise UserError(f"--num_slices={self.num_slices} is less than 1: give 1 or more")

    @property
    def target(self) -> tpu_types.Slice:
        """UserError if there is no such slice in this zone."""
        return tpu_types.parse(self.accelerator, self.zone, self.unlisted)

    @property
    def nodes(self) -> list[str]:
        """The names of the slices, which the platform numbers if there are several."""
        if self.num_slices == 1:
            return [self.name]
        return [f"{self.name}-{i}" for i in range(self.num_slices)]

    @property
    def archive(self) -> str:
        return f"{ARCHIVES}/{self.name}.tar.gz"

    def tpus(self, *words: str) -> list[str]:
        place = [f"--zone={self.zone}", f"--project={self.project}"]
        return ["gcloud", "compute", "tpus", *words, *place]

    def create(self) -> list[str]:
        target = self.target
        kind = self.accelerator.partition("-")[0]
        flags = [
            target.flag.replace("--accelerator", "--accelerator-type"),
            f"--runtime-version={self.runtime or RUNTIMES[kind]}",
        ]
        if self.num_slices == 1:
            flags += [f"--node-id={self.name}"]
        else:
            flags += [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
        if self.spot:
            flags += ["--spot"]
        flags += self.create_args
        return self.tpus("queued-resources", "create", self.name, *flags)

    def describe(self, field: str = "state.state") -> list[str]:
        return self.tpus("queued-resources", "describe", self.name, f"--format=value({field})")

    def delete(self) -> list[str]:
        return self.tpus("queued-resources", "delete", self.name, "--force", "--quiet")

    def pack(self) -> list[str]:
        return archive.command(ROOT, self.archive, self.untracked)

    def copy(self, node: str) -> list[str]:
        return self.tpus("tpu-vm", "scp", self.archive, f"{node}:vit_jax.tar.gz", "--worker=all")

    def ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
        # Not `queued-resources ssh --node=all`: it returns 0 even if it could not reach a node.
        return self.tpus("tpu-vm", "ssh", node, f"--worker={worker}", f"--command={script}")

    def setup(self) -> list[list[str]]:
        return [self.ssh(node, UNPACK) for node in self.nodes]

    def workers(self, *words: str) -> list[list[str]]:
        """Commands that run `worker.sh WORDS` on every worker, one for each slice."""
        return [self.ssh(node, shlex.join(["bash", SCRIPT, *words])) for node in self.nodes]

    def logs(self, all_workers: bool) -> list[list[str]]:
        if all_workers:
            return self.workers("logs")
        return [self.ssh(self.nodes[0], f"bash {SCRIPT} logs", worker="0")]


def plan(pod: Pod, action: str, command: list[str], all_workers: bool, keep: bool) -> list[str]:
    """The shell commands of an action of `launch.tpu_vm`, in order, ready to be pasted."""
    ready = f'until [ "$({shlex.join(pod.describe())})" = ACTIVE ]; do sleep 60; done'
    copies = [pod.pack(), *map(pod.copy, pod.nodes), *pod.setup()]
    delete = shlex.join(pod.delete())
    if action == "create":
        return [shlex.join(pod.create()), ready]
    if action == "up":
        lines = [shlex.join(pod.create()), ready]
        lines += map(shlex.join, [*copies, *pod.workers("run", *command)])
        for status in map(shlex.join, pod.workers("status")):
            lines.append(f"while {status} | cut -f3 | grep -qx running; do sleep 60; done")
        lines.append(
            "# Preempted (SUSPENDED, FAILED, or exit code 75): the next line, then all of it again."
        )
        lines.append(f"# {delete}" if keep else delete)
        return lines
    commands = {
        "setup": copies,
        "run": pod.workers("run", *command),
        "logs": pod.logs(all_workers),
        "status": [pod.describe(), *pod.workers("status")],
        "stop": pod.workers("stop"),
        "delete": [pod.delete()],
    }
    return list(map(shlex.join, commands[action]))
