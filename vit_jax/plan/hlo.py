"""Reads the scheduled program that the TPU compiler prints: instructions, how often each runs,
FLOPs, bytes, cycles.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
}
BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# What costs nothing: names for values that exist, and the ends of copies that run in the
# background.
FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
}
FREE |= {"send", "recv"}  # to and from the host, in the background


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str  # as printed, with layout and memory space; a tuple in parentheses
    opcode: str
    rest: str  # operands and attributes
    is_root: bool

    @functools.cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 where it has none (collectives, copies, kernels of Pallas)."""
        found = CYCLES.search(self.rest)
        return int(found[1]) if found else 0

    @property
    def called(self) -> list[str]:
        """Computations that run as a part of this one."""
        found = BRANCHES.search(self.rest)
        return CALLS.findall(self.rest) + (re.findall(r"%?([\w.\-]+)", found[1]) if found else [])


def sizes(shape: str) -> list[int]:
    """Dimensions of the first array of a printed shape."""
    found = ARRAY.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def nbytes(shape: str, in_hbm: bool = False) -> int:
    """Bytes of all arrays of a printed shape; with `in_hbm` without those in the chip's own memory,
    `S(1)`.
    """
    arrays = [
        m for m in ARRAY.finditer(shape) if m[1] in BYTES and not (in_hbm and m[3] and "S(" in m[3])
    ]
    return round(
        sum(BYTES[m[1]] * math.prod(int(size) for size in m[2].split(",") if size) for m in arrays)
    )


class Program:
    """The computations of one compiled module."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            if current is None and line.endswith("{") and not line.startswith((" ", "HloModule")):
                is_entry, name = re.match(r"(ENTRY )?%?([\w.\-]+)", line).groups()
                current = self.computations[name] = {}
                self.entry = name if is_entry else self.entry
            elif line == "}":
                current = None
            elif current is not None and (found := INSTRUCTION.match(line)):
                root, name, shape, opcode, rest = found.groups()
                current[name] = Instruction(name, shape, opcode, rest, bool(root))

    def walk(self, name: str = "", times: int = 1) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, how often it runs) of all that the core starts one after the
        other.
        """
        name = name or self.entry
        for instruction in self.computations.get(name, {}).values():
            if instruction.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", instruction.rest)[1]
                yield from self.walk(body, times * self.trips(instruction))
            elif instruction.opcode in ("call", "conditional"):
                for called in instruction.called:
                    yield from self.walk(called, times)
            else:
                yield name, instruction, times

    def trips(self, loop: Instruction) -> int:
        """How often the body of a loop of known length runs: its count, else the constant of its
        condition.
        """
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found[1])
        condition = self.computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]
        limits = [
            int(i.rest.split(")")[0])
            for i in self.inner(condition)
            if i.opcode == "constant" and "s32" in i.shape
        ]
        return max(limits, default=1)

    def inner(self, computation: dict[str, Instruction]) -> Iterator[Instruction]:
        """All instructions of a computation and of what it calls."""
        for instruction in computation.values():
            yield instruction
            for called in instruction.called:
                yield from self.inner(self.computations.get(called, {}))

    @functools.cache  # noqa: B019 - a program lives as long as its analysis
    def flops_of(self, name: str) -> float:
        """FLOPs of the matrix products and convolutions in a computation and in what it calls."""
        computation = self.computations.get(name, {})
        own = sum(
            product_flops(i, computation)
            for i in computation.values()
            if i.opcode in ("convolution", "dot")
        )
        return own + sum(self.flops_of(called) for i in computation.values() for called in i.called)

    def flops(self, computation: str, instruction: Instruction) -> float:
        if instruction.opcode in ("convolution", "dot"):
            return product_flops(instruction, self.computations[computation])
        return sum(map(self.flops_of, instruction.called))

    def hbm_bytes(self, computation: str, instruction: Instruction) -> int:
        """Bytes that an instruction reads from and writes to HBM; of what it slices only the
        slices.
        """
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        values = self.computations[computation]
        operands = [values[name].shape if name in values else "" for name in instruction.operands]
        if instruction.opcode == "dynamic-update-slice":
            return 2 * nbytes(operands[1], in_hbm=True)
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            read = min(nbytes(instruction.shape), nbytes(operands[0], in_hbm=True))
            return read + nbytes(instruction.shape, in_hbm=True)
        written, read = (
            nbytes(instruction.shape, in_hbm=True),
            [nbytes(shape, in_hbm=True) for shape in operands],
        )
        if instruction.opcode == "fusion" and instruction.called:
            touched = self.touched(instruction.called[0])
            read = [min(whole, touched.get(i, whole)) for i, whole in enumerate(read)]
            written = max(written - self.untouched(instruction.called[0]), 0)
        return written + sum(read)

    @functools.cache  # noqa: B019
    def touched(self, name: str) -> dict[int, int]:
        """Number of a parameter -> the bytes of it that a fused computation reads, where it only
        slices it.
        """
        computation, found = self.computations.get(name, {}), {}
        for parameter in computation.values():
            if parameter.opcode == "parameter":
                bytes_read = self.read(computation, parameter.name)
                if bytes_read is not None:
                    found[int(parameter.rest.split(")")[0])] = bytes_read
        return found

    def read(self, computation: dict[str, Instruction], value: str) -> int | None:
        """Bytes read of a value, or None where all of it may be."""
        total = 0
        for user in computation.values():
            if value not in user.operands:
                continue
            if user.opcode in ("dynamic-slice", "slice"):
                part = nbytes(user.shape)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value:
                part = 0
            elif user.opcode == "bitcast":
                part = self.read(computation, user.name)
            elif user.opcode == "fusion" and user.called:
                inside = self.touched(user.called[0])
                parts = [
                    inside.get(i) for i, operand in enumerate(user.operands) if operand == value
                ]
                part = None if None in parts else sum(parts)
            else:
                part = None
            if part is None:
                return None
            total += part
        return total

    def untouched(self, name: str) -> int:
        """Bytes of its results that a fused computation leaves as they are, because it writes
        slices of them.
        """
        values = self.computations.get(name, {})
        writes = [
            i
            for i in values.values()
            if i.opcode == "dynamic-update-slice" and i.operands[1] in values
        ]
        whole = [nbytes(i.shape, in_hbm=True) for i in writes]
        parts = [nbytes(values[i.operands[1]].shape) for i in writes]
        return sum(max(size - part, 0) for size, part in zip(whole, parts, strict=True))


def product_flops(instruction: Instruction, values: dict[str, Instruction]) -> float:
    """2 per multiply-add that is no product with padding or with a hole of a dilated window."""
    output = math.prod(sizes(instruction.shape))
    shapes = [
        sizes(values[name].shape) if name in values else [] for name in instruction.operands[:2]
    ]
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        return 2 * output * math.prod(shapes[0][int(i)] for i in contracted[1].split(",") if i)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if not labels or len(shapes) < 2 or len(shapes[1]) != len(labels[2]):
        return 0
    flops = (
        2
        * output
        * math.prod(size for label, size in zip(labels[2], shapes[1], strict=True) if label != "o")
    )
    for share in spatial_shares(instruction, labels, shapes):
        flops *= share
    return flops


def spatial_shares(instruction: Instruction, labels, shapes) -> Iterator[float]:
    """For every spatial dimension the share of window positions that meet a real element."""
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    spatial = sorted(label for label in labels[2] if label.isdigit())

    def field(name: str, default: str) -> list[str]:
        found = re.search(rf"\b{name}=([\w\-]+)", window[1] if window else "")
        return found[1].split("x") if found else [default] * len(spatial)

    settings = [
        field(*pair)
        for pair in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    ]
    output = sizes(instruction.shape)
    for label, stride, pad, lhs_dilate, rhs_dilate in zip(spatial, *settings, strict=True):
        out, kernel = output[labels[3].index(label)], shapes[1][labels[2].index(label)]
        size = shapes[0][labels[1].index(label)]
        low = int(re.match(r"-?\d+", pad)[0])
        yield real_positions(
            out, kernel, size, int(stride), low, int(lhs_dilate), int(rhs_dilate)
        ) / (out * kernel)


@functools.cache
def real_positions(
    out: int, kernel: int, size: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    positions = (i * stride + j * rhs_dilate - low for i in range(out) for j in range(kernel))
    return sum(0 <= p <= (size - 1) * lhs_dilate and p % lhs_dilate == 0 for p in positions)
