"""The commands by which `launch.tpu_vm` makes a pod and talks to it, as words; nothing here runs
anything.
"""

import dataclasses
import pathlib
import re
import shlex

from vit_jax.errors import UserError

ACTIONS = {
    "create": "ask for the TPUs and wait until they are there",
    "setup": "copy this checkout to every worker and install it",
    "run": "start the command on every worker, where it goes on without you",
    "logs": "follow the log of the leading worker",
    "status": "what the platform and every worker say",
    "stop": "make the command save and end",
    "delete": "give the TPUs back",
    "up": "all of it, again after every preemption until the command is done; then delete",
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

# The files as they are, committed or not, without those that git ignores; the user's own index
# stays untouched.
PACK = (
    'export GIT_INDEX_FILE="$2.index" && cd "$1" && git add --all && '
    'git archive --format=tar.gz --output="$2" "$(git write-tree)" && rm "$GIT_INDEX_FILE"'
)
UNPACK = f"mkdir -p vit_jax && tar -xzf vit_jax.tar.gz -C vit_jax && bash {SCRIPT} setup"


@dataclasses.dataclass(frozen=True)
class Pod:
    """A queued resource of `num_slices` TPU VM nodes; its methods give the words of one command.

    Raises:
      UserError: a field is not what the platform accepts.
    """

    name: str
    zone: str
    project: str
    accelerator: str | None = None
    num_slices: int = 1
    spot: bool = False
    runtime: str | None = None
    create_args: tuple[str, ...] = ()

    def __post_init__(self):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", self.name):
            raise UserError(
                f"--name={self.name}: choose up to 50 of a-z, 0-9 and -, the first a letter, the "
                "last no -"
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", self.zone):
            raise UserError(
                f"--zone={self.zone} is no zone: give one such as us-west4-a, of those that have "
                "your TPUs"
            )
        if self.num_slices < 1:
            raise UserError(f"--num_slices={self.num_slices}: give a number from 1")

    @property
    def nodes(self) -> list[str]:
        """The names of the slices, which the platform numbers where there are several."""
        return (
            [self.name]
            if self.num_slices == 1
            else [f"{self.name}-{i}" for i in range(self.num_slices)]
        )

    @property
    def archive(self) -> str:
        return f"{ARCHIVES}/{self.name}.tar.gz"

    def tpus(self, *words: str) -> list[str]:
        return [
            "gcloud",
            "compute",
            "tpus",
            *words,
            f"--zone={self.zone}",
            f"--project={self.project}",
        ]

    def create(self) -> list[str]:
        kind, _, size = (self.accelerator or "").partition("-")
        if kind not in RUNTIMES or not size.isdecimal():
            known = ", ".join(f"{kind}-N" for kind in RUNTIMES)
            raise UserError(
                f"--accelerator={self.accelerator}: give one of {known}; newer TPUs: launch.gke"
            )
        flags = [
            f"--accelerator-type={self.accelerator}",
            f"--runtime-version={self.runtime or RUNTIMES[kind]}",
        ]
        one, many = (
            [f"--node-id={self.name}"],
            [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"],
        )
        flags += (
            (one if self.num_slices == 1 else many)
            + ["--spot"] * self.spot
            + list(self.create_args)
        )
        return self.tpus("queued-resources", "create", self.name, *flags)

    def describe(self) -> list[str]:
        return self.tpus("queued-resources", "describe", self.name, "--format=value(state.state)")

    def delete(self) -> list[str]:
        return self.tpus("queued-resources", "delete", self.name, "--force", "--quiet")

    def pack(self) -> list[str]:
        return ["bash", "-c", PACK, "pack", str(ROOT), self.archive]

    def copy(self, node: str) -> list[str]:
        return self.tpus("tpu-vm", "scp", self.archive, f"{node}:vit_jax.tar.gz", "--worker=all")

    def ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
        # Not `queued-resources ssh --node=all`: it returns 0 even where it could not reach a node.
        return self.tpus("tpu-vm", "ssh", node, f"--worker={worker}", f"--command={script}")

    def setup(self) -> list[list[str]]:
        return [self.ssh(node, UNPACK) for node in self.nodes]

    def workers(self, *words: str) -> list[list[str]]:
        """`worker.sh WORDS` on every worker: a command for each slice."""
        return [self.ssh(node, shlex.join(["bash", SCRIPT, *words])) for node in self.nodes]

    def logs(self, everyone: bool) -> list[list[str]]:
        leader = [self.ssh(self.nodes[0], f"bash {SCRIPT} logs", worker="0")]
        return self.workers("logs") if everyone else leader


def plan(pod: Pod, action: str, command: list[str], everyone: bool, keep: bool) -> list[str]:
    """The lines of shell that stand for an action of `launch.tpu_vm`, in order; each can be pasted."""
    ready = f'until [ "$({shlex.join(pod.describe())})" = ACTIVE ]; do sleep 60; done'
    copies = [pod.pack(), *map(pod.copy, pod.nodes), *pod.setup()]
    delete = shlex.join(pod.delete())
    if action == "create":
        return [shlex.join(pod.create()), ready]
    if action == "up":
        lines = [
            shlex.join(pod.create()),
            ready,
            *map(shlex.join, [*copies, *pod.workers("run", *command)]),
        ]
        for status in pod.workers("status"):
            lines.append(
                f"while {shlex.join(status)} | cut -f3 | grep -qx running; do sleep 60; done"
            )
        lines += [
            "# Preempted (SUSPENDED, FAILED, or exit code 75): the next line, then all of it again."
        ]
        return [*lines, f"# {delete}" if keep else delete]
    commands = {
        "setup": copies,
        "run": pod.workers("run", *command),
        "logs": pod.logs(everyone),
        "status": [pod.describe(), *pod.workers("status")],
        "stop": pod.workers("stop"),
        "delete": [pod.delete()],
    }
    return list(map(shlex.join, commands[action]))
