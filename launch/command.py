"""Checks that a command fits the slice on which it will run, before the slice costs money."""

import math
import pathlib

from launch import tpu_types
from launch.tpu_types import Slice
from vit_jax import config as configs
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent  # the command runs here, on every worker


def value(command: list[str], flag: str) -> str | None:
    """The last value of --flag=VALUE or --flag VALUE in a command; None if there is none."""
    found = None
    for i, word in enumerate(command):
        if word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
        elif word == flag and i + 1 < len(command):
            found = command[i + 1]
    return found


def overrides(command: list[str]) -> list[str]:
    """The arguments --config.KEY=VALUE, also if they are two words."""
    found = []
    for i, word in enumerate(command):
        if not word.startswith(("--config.", "--noconfig.")):
            continue
        found.append(word)
        following = command[i + 1 : i + 2]
        if "=" not in word and following and not following[0].startswith("-"):
            found += following
    return found


def check_workdir(command: list[str], reason: str) -> None:
    """Raises UserError if the workdir is a local folder; `reason` is what would happen to it."""
    folder = value(command, "--workdir")
    if folder is not None and not folder.startswith("gs://"):
        raise UserError(f"--workdir={folder} would be {reason}: give a folder on gs://")


def config_file(command: list[str]) -> str | None:
    """The config file of a command, relative to the checkout; None if there is none to be read."""
    location = value(command, "--config")
    if location is None or pathlib.Path(location).is_absolute():
        return None
    return location.partition(":")[0]


def check_recipe(command: list[str], target: Slice, num_slices: int) -> None:
    """Raises UserError if the config of a command is wrong, is meant for another slice, or has a
    mesh that does not fit the devices.
    """
    file = config_file(command)
    if file is None:
        return
    if not (ROOT / file).is_file():
        raise UserError(
            f"--config={file} is not in the checkout {ROOT}, which is all that the workers have: "
            "put it there, and give its path from there"
        )
    location = value(command, "--config")
    config = configs.load(f"{ROOT}/{location}", overrides(command))
    if config.topology:
        check_topology(config.topology, location, target)
    from vit_jax.distributed import mesh  # imports JAX, which takes a second

    mesh.whole_shape(config.mesh, target.devices * num_slices, num_slices)


def check_topology(topology: str, location: str, target: Slice) -> None:
    chip, _, shape = topology.partition(":")
    chips = math.prod(map(int, shape.split("x")))
    if (chip, chips) == (target.chip, target.chips) and target.shape in ("", shape):
        return
    better = f"--topology={topology}"
    if not target.shape:
        better = f"--accelerator={tpu_types.accelerator(topology)}"
    raise UserError(
        f"{location} is meant for {topology}, {chips} chips of {chip}, but {target.flag} has "
        f"{target.chips} of {target.chip}: give {better}, or add --config.topology= to the command "
        "if you mean it"
    )
