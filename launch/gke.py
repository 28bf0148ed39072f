"""Prints the Kubernetes manifest (a JobSet) that runs a command on TPU slices of GKE.

python -m launch.gke --name=NAME --image=IMAGE --topology=v5e:16x16 [--num_slices=N] \\
  -- COMMAND ... | kubectl apply -f -
"""

import argparse
import dataclasses
import math
import re
import sys

import yaml

from launch import command as commands
from launch.tpu_types import Slice
from vit_jax import cli
from vit_jax.distributed.job import TPU_PORT
from vit_jax.errors import UserError

PLANE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # larger ones: A <= B <= C, all multiples of 4


@dataclasses.dataclass(frozen=True)
class Chip:
    """GKE's names for a TPU and the shapes of its slices, from
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
    """

    accelerator: str
    machine: str  # type, without the number of chips
    shapes: tuple[str, ...]
    max_chips: int  # in a slice


CHIPS = {
    "v4": Chip("tpu-v4-podslice", "ct4p-hightpu", SMALL_CUBES, 4096),
    "v5e": Chip("tpu-v5-lite-podslice", "ct5lp-hightpu", PLANE, 256),
    "v5p": Chip("tpu-v5p-slice", "ct5p-hightpu", SMALL_CUBES, 6144),
    "v6e": Chip("tpu-v6e-slice", "ct6e-standard", PLANE, 256),
}
CHIPS_PER_HOST = 4  # except in 1x1

POOL = "cloud.google.com/gke-nodepool"
# Between chips of a slice, between slices, and between JAX's processes.
PORTS = (8471, 8080, int(TPU_PORT))
GRACE_SECONDS = 600  # to save after SIGTERM; spot nodes always have less
START_SECONDS = 1800  # between the first pod and the last, for slow nodes and images
MAX_RESTARTS = 100  # each preemption counts
# Exit codes after which a restart would fail again: a negative result, wrong input, and a command
# that can't be started.
STOPS = [1, 2, 126, 127, 128]


class Quoted(str):
    """A string to be quoted in YAML, since readers disagree about which plain words are numbers."""


class Dumper(yaml.SafeDumper):
    pass


def quote(dumper: Dumper, text: Quoted) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


Dumper.add_representer(Quoted, quote)


def slice_shape(topology: str) -> tuple[Chip, str, int, int]:
    """Chip, shape, number of hosts and chips per host of a topology such as v5e:16x16; UserError if
    GKE has no such slice.
    """
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS:
        raise UserError(
            f"--topology={topology}: the TPU is not one of {', '.join(CHIPS)}: give one such as "
            "v5e:16x16"
        )
    chip = CHIPS[kind]
    if shape not in chip.shapes and not is_large_cube(chip, shape):
        known = ", ".join(chip.shapes)
        if chip.shapes is SMALL_CUBES:
            known += f" and AxBxC of multiples of 4, A <= B <= C, up to {chip.max_chips} chips"
        raise UserError(
            f"--topology={topology}: no slice of {kind} has the shape {shape!r}: choose {known}"
        )
    chips = math.prod(map(int, shape.split("x")))
    return chip, shape, max(chips // CHIPS_PER_HOST, 1), min(chips, CHIPS_PER_HOST)


def is_large_cube(chip: Chip, shape: str) -> bool:
    """Whether a shape is AxBxC, A <= B <= C, all multiples of 4, and the chip has such slices."""
    if chip.shapes is not SMALL_CUBES or not re.fullmatch(r"\d+x\d+x\d+", shape):
        return False
    sides = [int(side) for side in shape.split("x")]
    if sides != sorted(sides) or sides[0] == 0 or any(side % 4 for side in sides):
        return False
    return math.prod(sides) <= chip.max_chips


def pod_spec(args: argparse.Namespace, command: list[str]) -> dict:
    """The pod of one host, which runs `command` word for word, without a shell."""
    chip, shape, _, chips = slice_shape(args.topology)
    tpus = {"google.com/tpu": chips}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # Slices communicate faster without the pods' network; DNS then needs the next line.
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": chip.accelerator,
            "cloud.google.com/gke-tpu-topology": shape,
        },
        "containers": [
            {
                "name": "main",
                "image": Quoted(args.image),
                # Kubernetes turns $$ into $, and $(NAME) into the value of a variable.
                "command": [Quoted(word.replace("$", "$$")) for word in command],
                "env": [{"name": "VIT_JAX_START_TIMEOUT", "value": str(START_SECONDS)}],
                "ports": [{"containerPort": port} for port in PORTS],
                "resources": {"requests": tpus, "limits": dict(tpus)},
            }
        ],
    }
    if args.spot:
        spec["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
        spec["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}
        ]
    return spec


def job_spec(args: argparse.Namespace, command: list[str]) -> dict:
    """The Job of one slice: a pod on each host, none of which is restarted alone."""
    hosts = slice_shape(args.topology)[2]
    return {
        "completionMode": "Indexed",
        "parallelism": hosts,
        "completions": hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                # First, because a pod that is taken away may end with any code.
                {
                    "action": "Count",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "main", "operator": "In", "values": STOPS},
                },
            ]
        },
        "template": {"spec": pod_spec(args, command)},
    }


def manifest(args: argparse.Namespace, command: list[str]) -> dict:
    """The JobSet: `STOPS` end it; anything else (75 after a preemption, a lost node) restarts all
    slices.
    """
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": Quoted(args.name),
            # A slice is a node pool; without this its pods may be spread over several node pools
            # of the same shape.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": POOL},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                "rules": [
                    {
                        "name": "wrongInput",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                ],
            },
            "replicatedJobs": [
                {
                    "name": "slice",
                    "replicas": args.num_slices,
                    "template": {"spec": job_spec(args, command)},
                }
            ],
        },
    }


def check(args: argparse.Namespace, command: list[str]) -> None:
    hosts = slice_shape(args.topology)[2]
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        raise UserError(
            f"--name={args.name} is not a valid name: choose up to 40 characters from a-z, 0-9 and "
            "-, the first a letter, the last not -"
        )
    if args.num_slices < 1:
        raise UserError(f"--num_slices={args.num_slices} is less than 1: give 1 or more")
    if args.num_slices > 1 and hosts == 1:
        raise UserError(
            f"--topology={args.topology} has one host: GKE joins only slices of several hosts: "
            "give a larger one"
        )
    if not command:
        raise UserError("no command: give it after --, such as -- python -m vit_jax.train ...")
    commands.check_workdir(command, "lost with the pod, and another folder on each host")
    commands.check_recipe(command, target(args.topology), args.num_slices)


def target(topology: str) -> Slice:
    """What a command finds on a slice of GKE."""
    _, shape, hosts, chips_per_host = slice_shape(topology)
    chips = hosts * chips_per_host
    kind = topology.partition(":")[0]
    return Slice(f"--topology={topology}", kind, chips, chips, hosts == 1, shape)


def render(args: argparse.Namespace, command: list[str]) -> None:
    check(args, command)
    chip, shape, hosts, chips = slice_shape(args.topology)
    # Pods on the nodes' network act as the nodes' service account, within these scopes.
    pool = f"--scopes=cloud-platform --machine-type={chip.machine}-{chips}t --num-nodes={hosts}"
    if hosts > 1:
        pool += f" --tpu-topology={shape}"
    if args.spot:
        pool += " --spot"
    print(f"# Node pools that it needs, {args.num_slices} in all:")
    print(
        "# gcloud container node-pools create POOL --cluster=CLUSTER --location=REGION "
        f"--node-locations=ZONE {pool}"
    )
    options = dict(Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)
    print(yaml.dump(manifest(args, command), **options), end="")


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = cli.ArgumentParser(
        "launch.gke",
        usage="%(prog)s --name=NAME --image=IMAGE --topology=v5e:16x16 [options] -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--image", required=True, help="made with launch/Dockerfile")
    parser.add_argument(
        "--topology", required=True, help=f"TPU ({', '.join(CHIPS)}) and shape of each slice"
    )
    parser.add_argument("--num_slices", type=int, default=1)
    parser.add_argument("--spot", action="store_true", help="on spot nodes")
    args = parser.parse_args(argv[:cut])
    return cli.run(lambda: render(args, argv[cut + 1 :]), debug=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
