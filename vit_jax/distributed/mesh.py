"""The device mesh: which device is where along the axes replica, data, fsdp and tensor."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from vit_jax.distributed import hardware
from vit_jax.errors import UserError

AXES = ("replica", "data", "fsdp", "tensor")


def mesh_sizes(sizes: Mapping[str, int]) -> tuple[list[int], str]:
    """The sizes of a config in the order of `AXES`, and the same as text for messages."""
    shape = [sizes[axis] for axis in AXES]
    text = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise UserError(
            f"config.mesh has {text}: sizes are positive, and at most one may be -1 (what remains)"
        )
    return shape, text


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """The mesh of a config without devices; an axis of -1 counts as 1."""
    shape, _ = mesh_sizes(sizes)
    return AbstractMesh(
        tuple(abs(size) for size in shape), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def make_mesh(sizes: Mapping[str, int], devices=None) -> Mesh:
    """Builds the device mesh over `AXES`.

    Args:
      sizes: number of devices along each axis; one may be -1 and takes what remains.
      devices: all devices of the job by default.
    """
    if devices is None:
        devices = jax.devices()
    shape, text = mesh_sizes(sizes)
    product = math.prod(size for size in shape if size != -1)
    needed = f"{product} devices"
    if -1 in shape:
        needed += " or a multiple"
        if len(devices) % product == 0:
            shape[shape.index(-1)] = len(devices) // product
    if math.prod(shape) != len(devices):
        raise UserError(
            f"config.mesh asks for {text} = {needed}, but there are {len(devices)}: change "
            "--config.mesh.data or the number of devices"
        )
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(shape: list[int], devices) -> np.ndarray:
    """Devices [replica, data, fsdp, tensor], neighbours in the mesh being neighbours in the
    network.

    Several TPU slices are placed along `replica` if it divides, else along `data`: then only one
    reduction of the gradients crosses the slow network between slices.
    """
    slices: dict[int, list] = {}
    for device in devices:
        slices.setdefault(hardware.slice_index(device), []).append(device)
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across = next((axis for axis in (0, 1) if shape[axis] % len(slices) == 0), None)
    if across is None:
        raise UserError(
            f"config.mesh has replica={shape[0]} and data={shape[1]}, but the devices form "
            f"{len(slices)} slices: make --config.mesh.replica a multiple of {len(slices)}"
        )
    inner = list(shape)
    inner[across] //= len(slices)
    parts = [
        mesh_utils.create_device_mesh(inner, group, allow_split_physical_axes=True)
        for _, group in sorted(slices.items())
    ]
    return np.concatenate(parts, axis=across)
