"""Which TPUs Cloud TPU has: accelerator types, and the zones that have them."""

import dataclasses
import math

from vit_jax.errors import UserError

PLANE = (1, 4, 8, 16, 32, 64, 128, 256)
SMALL_CUBES = (8, 16, 32, 64)  # cores of v4 and v5p; larger ones: multiples of a cube of 64 chips
CUBE = 128  # cores


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of TPU as `--accelerator` names it.

    The number in such a name counts cores up to v5p (v4-8 are 4 chips), and chips of v5e and v6e.
    `max_cubes`: cores of the largest slice, if more than `sizes` exist. Sources: the pages v2, v3,
    v4, v5p, v5e and v6e below https://cloud.google.com/tpu/docs/, and regions-zones there, for
    zones; some of them are open to single customers only.
    """

    chip: str  # as in a topology
    sizes: tuple[int, ...]
    zones: str  # separated by spaces
    cores_per_chip: int = 1  # of those that the number counts
    devices_per_chip: int = 1  # of JAX
    max_cubes: int = 0
    single_host: int = 4  # chips of the largest slice that has one host


KINDS = {
    "v2": Kind(
        "v2",
        (8, 32, 128, 256, 512),
        "asia-east1-c europe-west4-a us-central1-a us-central1-b us-central1-c us-central1-f",
        cores_per_chip=2,
        devices_per_chip=2,
    ),
    "v3": Kind(
        "v3",
        (8, 32, 64, 128, 256, 512, 1024, 2048),
        "europe-west4-a us-central1-a us-central1-b us-central1-f us-east1-d",
        cores_per_chip=2,
        devices_per_chip=2,
    ),
    "v4": Kind("v4", SMALL_CUBES, "us-central2-b", cores_per_chip=2, max_cubes=8192),
    "v5litepod": Kind(
        "v5e",
        PLANE,
        "asia-southeast1-b europe-west4-b us-central1-a us-east5-a us-east5-b us-east5-c "
        "us-south1-a us-west1-c us-west4-a",
        single_host=8,
    ),
    "v5p": Kind(
        "v5p",
        SMALL_CUBES,
        "europe-west4-b us-central1-a us-east5-a us-east5-b us-east5-c us-south1-a",
        cores_per_chip=2,
        max_cubes=12288,
    ),
    "v6e": Kind(
        "v6e",
        PLANE,
        "asia-northeast1-b europe-west4-a southamerica-west1-a us-central1-b us-east1-d us-east4-a "
        "us-east4-b us-east5-a us-east5-b us-east5-c us-south1-ai1b us-west1-c",
        single_host=8,
    ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """What the processes of a command find; `flag` is the argument that asks for it."""

    flag: str
    chip: str
    chips: int
    devices: int  # of JAX
    has_one_host: bool
    shape: str = ""  # such as 16x16, where the user chooses it


def parse(accelerator: str | None, zone: str, unlisted: bool) -> Slice:
    """The slice of a type such as v5litepod-256; UserError if Google lists no such type, or not in
    this zone, unless `unlisted`.
    """
    name, _, size = (accelerator or "").partition("-")
    if name not in KINDS or not size.isdecimal():
        known = ", ".join(f"{name}-N" for name in KINDS)
        raise UserError(f"--accelerator={accelerator}: give one of {known}; newer TPUs: launch.gke")
    kind = KINDS[name]
    number = int(size)
    if not unlisted and not exists(kind, number):
        raise UserError(
            f"--accelerator={accelerator} does not exist: N of {name}-N counts {unit(kind)} and is "
            f"{sizes(kind)}: choose one of them, or add --unlisted if Google has it now"
        )
    if not unlisted and zone not in kind.zones.split():
        raise UserError(
            f"--zone={zone} has no {name}: choose one of {', '.join(kind.zones.split())}, or add "
            "--unlisted if Google has it there now"
        )
    chips = max(number // kind.cores_per_chip, 1)
    return Slice(
        f"--accelerator={accelerator}",
        kind.chip,
        chips,
        chips * kind.devices_per_chip,
        chips <= kind.single_host,
    )


def exists(kind: Kind, number: int) -> bool:
    return number in kind.sizes or (0 < number <= kind.max_cubes and number % CUBE == 0)


def unit(kind: Kind) -> str:
    return "cores, two per chip," if kind.cores_per_chip == 2 else "chips"


def sizes(kind: Kind) -> str:
    text = ", ".join(map(str, kind.sizes))
    if kind.max_cubes:
        text += f" or a multiple of {CUBE} up to {kind.max_cubes}"
    return text


def accelerator(topology: str) -> str | None:
    """The type that has the chips of a topology such as v5e:8x8, if there is one."""
    chip, _, shape = topology.partition(":")
    for name, kind in KINDS.items():
        number = math.prod(map(int, shape.split("x"))) * kind.cores_per_chip
        if kind.chip == chip and exists(kind, number):
            return f"{name}-{number}"
    return None
