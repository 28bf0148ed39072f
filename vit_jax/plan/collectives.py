"""The messages that a compiled step sends between chips: kind, mesh axis, bytes, and a model of
their time.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from vit_jax.distributed import hardware
from vit_jax.plan import hlo

# Bytes that pass through a chip, relative to those of the whole array and times (n - 1) / n for n
# chips on a bidirectional ring. A permute sends all of them, between pairs.
TRAFFIC = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 0.5,
    "collective-permute": 2.0,
}
# After a collective within a slice, the compiler has each chip send to its host for the exchange
# between slices.
ACROSS_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# XLA's three notations for the groups of a collective.
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}"
)
IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of message along one part of the mesh, summed over a step."""

    kind: str
    axis: str  # mesh axes, joined by +
    count: int
    bytes: int  # of the whole arrays, per chip and step
    overlapped: bool  # with computation
    seconds: float  # by the model, if nothing else uses the links


def groups_of(rest: str) -> np.ndarray | None:
    """Partitions [groups, members] of an instruction's `replica_groups` or pairs; None if it has
    none, which means all partitions.
    """
    mesh = MESH_GROUPS.search(rest)
    if mesh:
        return mesh_groups(*mesh.groups())
    grid = IOTA_GROUPS.search(rest)
    if grid:
        return iota(grid[2], grid[3]).reshape(-1, numbers(grid[1])[-1])
    groups = LISTED_GROUPS.search(rest)
    if groups:
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", groups[1])])
    return None


def numbers(text: str) -> list[int]:
    return [int(i) for i in re.findall(r"\d+", text)]


def iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in a shape "4,2", transposed to an order "1,0"."""
    grid = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    if order:
        grid = grid.transpose(numbers(order))
    return grid


def mesh_groups(mesh: str, ids: str | None, inside: str) -> np.ndarray:
    """Partitions [groups, members] that differ only in the axes `inside` of a mesh.

    Args:
      mesh: "'a'=2,'b'=4".
      ids: partitions in the order of the mesh, such as "0,2,1,3" or "[4,2]T(1,0)"; None: 0, 1, ...
      inside: "'a'", or "'b':(2)2" for the part of size 2 of b that has 2 before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh)}
    names = list(sizes)
    total = math.prod(sizes.values())
    tiled = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or f"[{total}]")
    order = iota(tiled[1], tiled[2]).reshape(-1) if tiled else np.array(numbers(ids))
    positions = grid_positions(*sizes.values())
    outside = positions.copy()
    for name, before, part in re.findall(r"'?([A-Za-z_]\w*)'?(?::\((\d+)\)(\d+))?", inside):
        axis = names.index(name)
        size = int(part or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        outside[:, axis] -= positions[:, axis] // stride % size * stride
    _, group = np.unique(outside, axis=0, return_inverse=True)
    return order[np.argsort(group, kind="stable")].reshape(group.max() + 1, -1)


def grid_positions(*sizes: int) -> np.ndarray:
    """Coordinates [elements, axes] of the elements of a grid, in row-major order."""
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1)


def across_slices(mesh: Mesh) -> np.ndarray:
    """Partitions [chips of a slice, slices] that have the same position in their slices."""
    index = np.array([hardware.slice_index(device) for device in mesh.devices.flat])
    return np.argsort(index, kind="stable").reshape(len(set(index)), -1).T


def axes_of(groups: np.ndarray | None, mesh: Mesh) -> str:
    """Names of the mesh axes in which the members of a group differ."""
    if groups is None:
        return "+".join(axis for axis, size in mesh.shape.items() if size > 1)
    positions = grid_positions(*mesh.devices.shape)
    differ = (positions[groups] != positions[groups[:, :1]]).any(axis=(0, 1))
    return "+".join(name for name, moves in zip(mesh.axis_names, differ, strict=True) if moves)


def coordinates(device) -> tuple[int, ...]:
    """(x, y, z, slice)."""
    return (*device.coords, hardware.slice_index(device))


def seconds(
    kind: str, size: int, groups: np.ndarray | None, mesh: Mesh, chip: hardware.Tpu
) -> float:
    """Time of one collective of `size` bytes by bandwidth alone: rings over all extents that its
    groups span.

    Between slices each chip has its share of its host's network, and sends only what the chips of a
    slice have reduced among themselves.
    """
    pod = np.array([coordinates(device) for device in mesh.devices.flat])
    members = pod
    if groups is not None:  # the largest, because some pairs of a permute stay on one chip
        members = pod[max(groups, key=lambda group: len(set(group)))]
    extents = [len(set(column)) for column in members.T]
    if max(extents) < 2:
        return 0.0
    slices = extents[-1]
    within = len(members) // slices
    wire = TRAFFIC[kind] * size
    time = 0.0
    if within > 1:
        pod_extents = [len(set(column)) for column in pod.T]
        bandwidth = link_bandwidth(extents[:-1], pod_extents[:-1], chip)
        time += wire * (within - 1) / within / bandwidth
    if slices > 1:
        time += wire / within * (slices - 1) / slices / chip.network_bandwidth
    return time


def link_bandwidth(extents: list[int], pod_extents: list[int], chip: hardware.Tpu) -> float:
    """Bytes/s of a chip over the links along all extents of a group. An extent with wraparound
    links is a ring and has twice the bandwidth of a line.
    """
    bandwidth = 0.0
    for extent, whole in zip(extents, pod_extents, strict=True):
        if extent > 1:
            is_ring = extent == whole and extent % chip.wraps == 0
            bandwidth += chip.link_bandwidth * (1 + is_ring)
    return bandwidth


def kind_of(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in hlo.COLLECTIVES else None


def buffer_bytes(kind: str, instruction: hlo.Instruction, groups: np.ndarray | None) -> int:
    """Bytes of the whole array: after it is gathered, or before it is scattered."""
    if instruction.opcode == "send":
        return hlo.nbytes(hlo.ARRAY.search(instruction.shape)[0])
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        parts = [hlo.nbytes(match[0]) for match in hlo.ARRAY.finditer(instruction.shape)]
        return max(parts, default=0)
    size = hlo.nbytes(instruction.shape)
    if kind == "reduce-scatter" and groups is not None:
        size *= groups.shape[1]
    return size


def messages(program: hlo.Program) -> Iterator[tuple[str, hlo.Instruction, int, bool]]:
    """(kind, instruction, times, overlapped) of every message of a step."""
    seen: set[tuple[str, str]] = set()
    for computation, instruction, times in program.walk():
        kind = kind_of(instruction)
        if kind:
            yield kind, instruction, times, instruction.opcode.endswith("-start")
        elif instruction.opcode == "send":
            kind = kind_across_slices(instruction)
            if kind:
                yield kind, instruction, times, True
        elif instruction.opcode in ("fusion", "async-start"):
            for kind, inner, overlapped in fused_messages(program, instruction, computation, seen):
                yield kind, inner, times, overlapped


def kind_across_slices(send: hlo.Instruction) -> str | None:
    """The kind of an exchange between slices, or None for any other message to the host."""
    found = ACROSS_SLICES.search(send.rest)
    if not found:
        return None
    kind = found[1].lower().replace("_", "-")
    return kind if kind in TRAFFIC else "collective-permute"


def fused_messages(
    program: hlo.Program, fusion: hlo.Instruction, computation: str, seen: set[tuple[str, str]]
) -> Iterator[tuple[str, hlo.Instruction, bool]]:
    """(kind, instruction, overlapped) of the messages in a fusion.

    An overlapped one has a fusion for its start, its progress and its end, all with the same
    channel: it counts once, by `seen`.
    """
    for called in fusion.called:
        scatters = "all-reduce-scatter" in called
        for inner in program.inner(program.computations.get(called, {})):
            kind = kind_of(inner)
            channel = re.search(r"channel_id=(\d+)", inner.rest)
            key = (computation, channel[1] if channel else inner.name)
            if kind and key not in seen:
                seen.add(key)
                yield "reduce-scatter" if scatters else kind, inner, not scatters


def collectives(program: hlo.Program, mesh: Mesh, chip: hardware.Tpu) -> list[Collective]:
    """What a step sends, by kind, axis and whether it overlaps with computation."""
    found = []
    for kind, instruction, times, overlapped in messages(program):
        if instruction.opcode == "send":
            groups = across_slices(mesh)
        else:
            groups = groups_of(instruction.rest)
        # The instruction of a fused reduce-scatter is an all-reduce of the whole array.
        size = buffer_bytes(kind_of(instruction) or kind, instruction, groups)
        cost = times * seconds(kind, size, groups, mesh, chip)
        found.append(Collective(kind, axes_of(groups, mesh), times, times * size, overlapped, cost))

    def key(one: Collective) -> tuple:
        return one.kind, one.axis, one.overlapped

    return [merged(list(same)) for _, same in itertools.groupby(sorted(found, key=key), key)]


def merged(same: list[Collective]) -> Collective:
    """The sum of collectives of one kind and axis."""
    return dataclasses.replace(
        same[0],
        count=sum(one.count for one in same),
        bytes=sum(one.bytes for one in same),
        seconds=sum(one.seconds for one in same),
    )
