"""What a compiled step sends between chips: kind, mesh axis, bytes, and a model of the time."""

import dataclasses
import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

from vit_jax.distributed import hardware
from vit_jax.plan import hlo

# Share of the bytes that pass through a chip, times (n - 1) / n for n chips, on a ring (a
# bidirectional one). A permute sends all of them, between pairs.
TRAFFIC = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 0.5,
    "collective-permute": 2.0,
}
# Between slices the compiler has each chip send to its host, after a collective inside of the
# slice.
ACROSS = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of message along one part of the mesh, summed over a step."""

    kind: str
    axis: str  # mesh axes, joined by +
    count: int
    bytes: int  # of the whole arrays, per chip and step
    overlapped: bool  # runs beside computation
    seconds: float  # by the model, if nothing else used the links


def groups_of(rest: str) -> np.ndarray | None:
    """Partitions [groups, members] of an instruction's `replica_groups` or pairs, in any of XLA's
    three notations.
    """
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}", rest
    ):
        return mesh_groups(*found.groups())
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return iota(found[2], found[3]).reshape(-1, numbers(found[1])[-1])
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", rest):
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])])
    return None


def numbers(text: str) -> list[int]:
    return [int(i) for i in re.findall(r"\d+", text)]


def iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in a shape "4,2", transposed to an order "1,0"."""
    grid = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return grid.transpose(numbers(order)) if order else grid


def mesh_groups(mesh: str, ids: str | None, inside: str) -> np.ndarray:
    """Partitions [groups, members] that differ in the axes `inside` of a mesh.

    Args:
      mesh: "'a'=2,'b'=4".
      ids: partitions in the order of the mesh, as "0,2,1,3" or "[4,2]T(1,0)"; None: 0, 1, 2, ...
      inside: "'a'", or "'b':(2)2" for the part of size 2 of b that has 2 before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh)}
    total, names = math.prod(sizes.values()), list(sizes)
    tiled = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids or f"[{total}]")
    order = iota(tiled[1], tiled[2]).reshape(-1) if tiled else np.array(numbers(ids))
    places = np.stack(np.unravel_index(np.arange(total), list(sizes.values())), axis=-1)
    outside = places.copy()
    for name, before, size in re.findall(r"'?([A-Za-z_]\w*)'?(?::\((\d+)\)(\d+))?", inside):
        axis, size = names.index(name), int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        outside[:, axis] -= places[:, axis] // stride % size * stride
    _, group = np.unique(outside, axis=0, return_inverse=True)
    return order[np.argsort(group, kind="stable")].reshape(group.max() + 1, -1)


def across_slices(mesh: Mesh) -> np.ndarray:
    """Positions [chips of a slice, slices] that have the same place in their slices."""
    index = np.array([coordinates(device)[-1] for device in mesh.devices.flat])
    return np.argsort(index, kind="stable").reshape(len(set(index)), -1).T


def axes_of(groups: np.ndarray | None, mesh: Mesh) -> str:
    """Names of the mesh axes that the members of a group differ in."""
    positions = np.stack(
        np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape), axis=-1
    )
    if groups is None:
        return "+".join(axis for axis, size in mesh.shape.items() if size > 1)
    differ = (positions[groups] != positions[groups[:, :1]]).any(axis=(0, 1))
    return "+".join(name for name, moves in zip(mesh.axis_names, differ, strict=True) if moves)


def coordinates(device) -> tuple[int, ...]:
    return (*device.coords, getattr(device, "slice_index", 0) or 0)


def seconds(
    kind: str, size: int, groups: np.ndarray | None, mesh: Mesh, chip: hardware.Tpu
) -> float:
    """Time of one collective of `size` bytes by bandwidth alone: rings over all extents that its
    groups span.

    Links carry both directions at once; an extent without wraparound links gives half. Between
    slices each chip has its share of its host's network, and only what the chips of a slice have
    reduced among each other goes there.
    """
    everywhere = np.array([coordinates(device) for device in mesh.devices.flat])
    # Of the pairs of a permute some may stay where they are.
    spots = (
        everywhere if groups is None else everywhere[max(groups, key=lambda group: len(set(group)))]
    )
    whole = [len(set(column)) for column in everywhere.T]
    extents = [len(set(column)) for column in spots.T]
    slices, count = extents[-1], len(spots)
    if max(extents) < 2:
        return 0.0
    within = count // slices
    wire = TRAFFIC[kind] * size
    bandwidth = 0.0
    for extent, of in zip(extents[:-1], whole[:-1], strict=True):
        if extent > 1:
            bandwidth += chip.link_bandwidth * (
                2 if extent == of and extent % chip.wraps == 0 else 1
            )
    inside = wire * (within - 1) / within / bandwidth if within > 1 else 0.0
    across = wire / within * (slices - 1) / slices / chip.network_bandwidth if slices > 1 else 0.0
    return inside + across


def kind_of(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in hlo.COLLECTIVES else None


def buffer_bytes(kind: str, instruction: hlo.Instruction, groups: np.ndarray | None) -> int:
    """Bytes of the whole array: the gathered one, the one before it is scattered."""
    if instruction.opcode == "send":
        return hlo.nbytes(hlo.ARRAY.search(instruction.shape)[0])
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        parts = [hlo.nbytes(match[0]) for match in hlo.ARRAY.finditer(instruction.shape)]
        return max(parts, default=0)
    size = hlo.nbytes(instruction.shape)
    return (
        size * (groups.shape[1] if groups is not None else 1) if kind == "reduce-scatter" else size
    )


def messages(program: hlo.Program):
    """(kind, instruction, times, overlapped) of every message of a step.

    An overlapped one appears in the fusions in which it starts, goes on and ends, by one channel:
      it counts once.
    """
    seen = set()
    for computation, instruction, times in program.walk():
        if kind := kind_of(instruction):
            yield kind, instruction, times, instruction.opcode.endswith("-start")
            continue
        if instruction.opcode == "send" and (across := ACROSS.search(instruction.rest)):
            kind = across[1].lower().replace("_", "-")
            yield kind if kind in TRAFFIC else "collective-permute", instruction, times, True
            continue
        for called in instruction.called if instruction.opcode in ("fusion", "async-start") else ():
            for inner in program.inner(program.computations.get(called, {})):
                kind = kind_of(inner)
                channel = re.search(r"channel_id=(\d+)", inner.rest)
                key = (computation, channel[1] if channel else inner.name)
                if not kind or key in seen:
                    continue
                seen.add(key)
                scatters = "all-reduce-scatter" in called
                yield "reduce-scatter" if scatters else kind, inner, times, not scatters


def collectives(program: hlo.Program, mesh: Mesh, chip: hardware.Tpu) -> list[Collective]:
    """What a step sends, by kind, axis and whether it overlaps with computation."""
    found = []
    for kind, instruction, times, overlapped in messages(program):
        groups = (
            across_slices(mesh) if instruction.opcode == "send" else groups_of(instruction.rest)
        )
        # The inner instruction of a fused reduce-scatter is an all-reduce of the whole array.
        fused = kind == "reduce-scatter" and kind_of(instruction) == "all-reduce"
        size = buffer_bytes("all-reduce" if fused else kind, instruction, groups)
        cost = times * seconds(kind, size, groups, mesh, chip)
        found.append(Collective(kind, axes_of(groups, mesh), times, times * size, overlapped, cost))
    found.sort(key=lambda c: (c.kind, c.axis, c.overlapped))
    merged = []
    for (kind, axis, overlapped), same in itertools.groupby(
        found, lambda c: (c.kind, c.axis, c.overlapped)
    ):
        same = list(same)
        total = [sum(getattr(c, field) for c in same) for field in ("count", "bytes", "seconds")]
        merged.append(Collective(kind, axis, total[0], total[1], overlapped, total[2]))
    return merged
