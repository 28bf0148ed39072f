"""Parts of this host's devices, so that several runs share it."""

import dataclasses
import glob
import itertools
import math
import os
import subprocess
from collections.abc import Mapping

from vit_jax.distributed import hardware
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Part:
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cores: tuple[int, ...] = ()  # () are all


def parts(count: int) -> list[Part]:
    """`count` parts of the same size: of the TPU chips, else the NVIDIA GPUs, and of the cores.

    Raises:
      UserError: there are fewer devices, or a part of a TPU host would be more than a chip.
    """
    if count == 1:
        return [Part()]
    cores = own_cores()
    chips = tpu_chips()
    gpus = [] if chips else nvidia_gpus()
    for found, what in ((chips, "TPU chips"), (gpus, "GPUs"), (cores, "cores")):
        if found and (len(found) < count or (found is chips and len(chips) != count)):
            number = "as many as" if found is chips else "at most"
            raise UserError(
                f"--jobs={count} does not fit the {len(found)} {what} of this host: give "
                f"{number} {len(found)}, or 1"
            )
    of_cores = shares(cores, count)
    of_gpus = shares(gpus, count)
    environments = [dict(CUDA_VISIBLE_DEVICES=",".join(share)) for share in of_gpus if share]
    environments += [of_chip(chip) for chip in chips]
    environments += [{}] * (count - len(environments))
    return [Part(env, tuple(own)) for env, own in zip(environments, of_cores, strict=True)]


def shares(found: list, count: int) -> list[list]:
    """Neighbours, in `count` shares whose sizes differ by one at most."""
    edges = [math.floor(len(found) * i / count) for i in range(count + 1)]
    return [found[edges[i] : edges[i + 1]] for i in range(count)]


def own_cores() -> list[int]:
    """The cores that this process may use; [] if the system can't bind a process to some."""
    if not hardware.is_linux():
        return []
    return sorted(os.sched_getaffinity(0))


def nvidia_gpus() -> list[str]:
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # until the first that is none, as CUDA reads it
        names = visible.split(",")
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    try:
        words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.split()


def tpu_chips() -> list[str]:
    found = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return [str(number) for number in range(len(found))]


def of_chip(number: str) -> dict[str, str]:
    """The environment of a process that has one chip of its host for itself."""
    bounds = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
    return bounds | dict(TPU_VISIBLE_CHIPS=number)
