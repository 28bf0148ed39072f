"""The devices of a topology, as the TPU compiler describes them without any hardware."""

import importlib.util
import math
import os
import re

from vit_jax.cli import quiet
from vit_jax.distributed import hardware
from vit_jax.errors import UserError

PATTERN = re.compile(r"(?P<chip>\w+):(?P<sizes>[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2})")
ENVIRONMENT = quiet.NO_TPU | dict(
    JAX_PLATFORMS="cpu",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # several plans at once; they share no chip
)


def prepare_environment() -> None:
    """Sets what libtpu reads; call it before JAX is imported."""
    os.environ.update(ENVIRONMENT)


def has_compiler() -> bool:
    """Whether JAX finds libtpu. Its error without it has another text in each version."""
    return bool(os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu"))


def parse(name: str) -> tuple[hardware.Tpu, list[int]]:
    """The chip and the extents of "v5e:16x16"."""
    found = PATTERN.fullmatch(name)
    if not found or found["chip"] not in hardware.TPUS:
        raise UserError(
            f"--topology={name} is not understood: write CHIP:AxB with CHIP one of "
            f"{', '.join(hardware.TPUS)}"
        )
    chip = hardware.TPUS[found["chip"]]
    extents = [int(size) for size in found["sizes"].split("x")]
    if len(extents) != chip.torus:
        example = "x".join(["4"] * chip.torus)
        raise UserError(
            f"--topology={name} has {len(extents)} extents: {found['chip']} has {chip.torus}, such "
            f"as {example}"
        )
    if chip.torus == 2 and max(extents) > 16:
        raise UserError(
            f"--topology={name} is larger than a pod of 16x16: use --num_slices for several pods"
        )
    return chip, extents


def devices(name: str, num_slices: int = 1) -> list:
    """The devices of a pod, one per chip, as `jax.Device`s that programs can be compiled for."""
    _, extents = parse(name)
    options: dict = {}
    if num_slices > 1:
        options["num_slices"] = num_slices
    if name.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # one device per chip, as on real v4 machines
    if math.prod(extents) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    from jax.experimental import topologies

    if not has_compiler():
        raise UserError("the TPU compiler is not installed: pip install libtpu")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        raise UserError(
            f"--topology={name} is rejected by the TPU compiler ({text}): use an existing shape"
        ) from None
    if len(found) != math.prod(extents) * num_slices:
        raise UserError(
            f"--topology={name} gives {len(found)} devices: choose a shape of whole hosts"
        )
    return list(found)
