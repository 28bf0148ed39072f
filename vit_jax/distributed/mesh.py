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
    slices = {hardware.slice_index(device) for device in devices}
    shape = whole_shape(sizes, len(devices), len(slices))
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def whole_shape(sizes: Mapping[str, int], num_devices: int, num_slices: int = 1) -> list[int]:
    """The sizes of `AXES` for so many devices of TPU slices, without -1; UserError if they do not
    fit.
    """
    shape, text = mesh_sizes(sizes)
    product = math.prod(size for size in shape if size != -1)
    needed = f"{product} devices"
    if -1 in shape:
        needed += " or a multiple"
        if num_devices % product == 0:
            shape[shape.index(-1)] = num_devices // product
    if math.prod(shape) != num_devices:
        raise UserError(
            f"config.mesh asks for {text} = {needed}, but there are {num_devices}: change "
            "--config.mesh.data or the number of devices"
        )
    across_slices(shape, num_slices)
    return shape


def across_slices(shape: list[int], num_slices: int) -> int:
    """The number of the axis along which slices are placed."""
    for axis in (0, 1):
        if shape[axis] % num_slices == 0:
            return axis
    raise UserError(
        f"config.mesh has replica={shape[0]} and data={shape[1]}, but the devices form "
        f"{num_slices} slices: make --config.mesh.replica a multiple of {num_slices}"
    )


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
    across = across_slices(shape, len(slices))
    inner = list(shape)
    inner[across] //= len(slices)
    parts = [
        mesh_utils.create_device_mesh(inner, group, allow_split_physical_axes=True)
        for _, group in sorted(slices.items())
    ]
    return np.concatenate(parts, axis=across)
