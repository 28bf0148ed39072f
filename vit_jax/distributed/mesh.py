"""The device mesh."""

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
    """Sizes in the order of `AXES`, and the same in words; impossible ones are a UserError."""
    shape = [sizes[axis] for axis in AXES]
    asked = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise UserError(
            f"config.mesh has {asked}: sizes are positive, and at most one may be -1 (what remains)"
        )
    return shape, asked


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """The mesh that a config asks for, without devices; an axis of -1 counts as 1."""
    shape, _ = mesh_sizes(sizes)
    return AbstractMesh(
        tuple(abs(size) for size in shape), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def make_mesh(sizes: Mapping[str, int], devices=None) -> Mesh:
    """Builds the device mesh over `AXES`.

    Args:
      sizes: devices along each axis; one may be -1 and takes what remains.
      devices: defaults to all devices of the job.

    Raises:
      UserError: the product of the sizes is not the number of devices, or a slice would be torn
        apart.
    """
    devices = jax.devices() if devices is None else devices
    shape, asked = mesh_sizes(sizes)
    fixed = math.prod(size for size in shape if size != -1)
    if -1 in shape and len(devices) % fixed == 0:
        shape[shape.index(-1)] = len(devices) // fixed
    if math.prod(shape) != len(devices):
        raise UserError(
            f"config.mesh asks for {asked} = {fixed} "
            f"devices{' or a multiple' if -1 in shape else ''}, but there are {len(devices)}: "
            "change --config.mesh.data or the number of devices"
        )
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(shape: list[int], devices) -> np.ndarray:
    """Devices [replica, data, fsdp, tensor] so that neighbours in the mesh are neighbours in the
    network.

    Several slices lie along `replica`, else along `data`: over the slow network between them goes
    one reduction of the gradients, and all else stays inside of a slice.
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
    inner = [size // len(slices) if axis == across else size for axis, size in enumerate(shape)]
    parts = [
        mesh_utils.create_device_mesh(inner, group, allow_split_physical_axes=True)
        for _, group in sorted(slices.items())
    ]
    return np.concatenate(parts, axis=across)
