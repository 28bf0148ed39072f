"""What a compiled step sends between chips: kind, mesh axis, bytes, and a model of the time."""

import dataclasses
import itertools
import math
import re

import numpy as np
from jax.sharding import Mesh

from vit_jax import chips
from vit_jax.plan import hlo

# Share of the bytes that pass through a chip, times (n - 1) / n for n chips, on a ring (a bidirectional one).
TRAFFIC = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 0.5, "collective-permute": 1.0}


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
    """Partitions [groups, members] of an instruction's `replica_groups` or pairs, in any of XLA's three notations."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([\d, ]*)\))?\s*\{([^}]*)\}", rest):
        axes = dict((name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1]))
        ids = [int(i) for i in found[2].split(",")] if found[2] else range(math.prod(axes.values()))
        grid, names = np.array(ids).reshape(list(axes.values())), list(axes)
        inside = [names.index(name) for name in re.findall(r"'(\w+)'", found[3])]
        outside = [i for i in range(len(names)) if i not in inside]
        return grid.transpose(*outside, *inside).reshape(-1, math.prod(grid.shape[i] for i in inside))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, source = ([int(i) for i in found[k].split(",")] for k in (1, 2))
        grid = np.arange(math.prod(source)).reshape(source)
        if found[3]:
            grid = grid.transpose([int(i) for i in found[3].split(",")])
        return grid.reshape(-1, shape[-1])
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", rest):
        return np.array([[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found[1])])
    return None


def axes_of(groups: np.ndarray | None, mesh: Mesh) -> str:
    """Names of the mesh axes that the members of a group differ in."""
    positions = np.stack(np.unravel_index(np.arange(mesh.devices.size), mesh.devices.shape), axis=-1)
    if groups is None:
        return "+".join(axis for axis, size in mesh.shape.items() if size > 1)
    differ = (positions[groups] != positions[groups[:, :1]]).any(axis=(0, 1))
    return "+".join(name for name, moves in zip(mesh.axis_names, differ, strict=True) if moves)


def coordinates(device) -> tuple[int, ...]:
    return (*device.coords, getattr(device, "slice_index", 0) or 0)


def seconds(kind: str, size: int, groups: np.ndarray | None, mesh: Mesh, chip: chips.Tpu) -> float:
    """Time of one collective of `size` bytes by bandwidth alone: rings over all extents that its groups span.

    Links carry both directions at once; an extent without wraparound links gives half. Between slices each chip has its
    share of its host's network, and only what the chips of a slice have reduced among each other goes there.
    """
    devices = mesh.devices.flat
    members = groups[0] if groups is not None else range(mesh.devices.size)
    spots = np.array([coordinates(devices[i]) for i in members])
    extents = [len(set(column)) for column in spots.T]
    slices, count = extents[-1], len(spots)
    if count < 2:
        return 0.0
    within = count // slices
    wire = TRAFFIC[kind] * size
    bandwidth = 0.0
    for extent in extents[:-1]:
        if extent > 1:
            bandwidth += chip.link_bandwidth * (2 if extent % chip.wraps == 0 else 1)
    inside = wire * (within - 1) / within / bandwidth if within > 1 else 0.0
    across = wire / within * (slices - 1) / slices / chip.network_bandwidth if slices > 1 else 0.0
    return inside + across


def kind_of(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in hlo.COLLECTIVES else None


def buffer_bytes(kind: str, instruction: hlo.Instruction, groups: np.ndarray | None) -> int:
    """Bytes of the whole array: the gathered one, the one before it is scattered."""
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        parts = [hlo.nbytes(match[0]) for match in hlo.ARRAY.finditer(instruction.shape)]
        return max(parts, default=0)
    size = hlo.nbytes(instruction.shape)
    return size * (groups.shape[1] if groups is not None else 1) if kind == "reduce-scatter" else size


def messages(program: hlo.Program):
    """(kind, instruction, times, overlapped) of every message of a step.

    An overlapped one appears in the fusions in which it starts, goes on and ends, by one channel: it counts once.
    """
    seen = set()
    for computation, instruction, times in program.walk():
        if kind := kind_of(instruction):
            yield kind, instruction, times, instruction.opcode.endswith("-start")
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


def collectives(program: hlo.Program, mesh: Mesh, chip: chips.Tpu) -> list[Collective]:
    """What a step sends, by kind, axis and whether it overlaps with computation."""
    found = []
    for kind, instruction, times, overlapped in messages(program):
        groups = groups_of(instruction.rest)
        # The inner instruction of a fused reduce-scatter is an all-reduce of the whole array.
        fused = kind == "reduce-scatter" and kind_of(instruction) == "all-reduce"
        size = buffer_bytes("all-reduce" if fused else kind, instruction, groups)
        cost = times * seconds(kind, size, groups, mesh, chip)
        found.append(Collective(kind, axes_of(groups, mesh), times, times * size, overlapped, cost))
    found.sort(key=lambda c: (c.kind, c.axis, c.overlapped))
    merged = []
    for (kind, axis, overlapped), same in itertools.groupby(found, lambda c: (c.kind, c.axis, c.overlapped)):
        same = list(same)
        total = [sum(getattr(c, field) for c in same) for field in ("count", "bytes", "seconds")]
        merged.append(Collective(kind, axis, total[0], total[1], overlapped, total[2]))
    return merged
