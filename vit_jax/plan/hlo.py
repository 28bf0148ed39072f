"""Parses the scheduled program that the TPU compiler prints: instructions, how often each runs,
FLOPs, bytes, cycles.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = dict(pred=1, s4=0.5, s8=1, s16=2, s32=4, s64=8, u4=0.5, u8=1, u16=2, u32=4, u64=8)
BYTES |= dict(f8e4m3fn=1, f8e5m2=1, bf16=2, f16=2, f32=4, f64=8)
PRODUCTS = ("convolution", "dot")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
CALLS = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Operations that move no data: they rename or reinterpret existing values.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
FREE |= {"partition-id", "replica-id"}
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
        """The compiler's estimate; 0 if it has none (collectives, copies, Pallas kernels)."""
        found = CYCLES.search(self.rest)
        return int(found[1]) if found else 0

    @property
    def called(self) -> list[str]:
        """Computations that run as part of this instruction."""
        names = CALLS.findall(self.rest)
        branches = BRANCHES.search(self.rest)
        if branches:
            names += re.findall(r"%?([\w.\-]+)", branches[1])
        return names


def dimensions(text: str) -> list[int]:
    """[8, 16] of "8,16"."""
    return [int(size) for size in text.split(",") if size]


def sizes(shape: str) -> list[int]:
    """Dimensions of the first array of a printed shape."""
    found = ARRAY.search(shape)
    return dimensions(found[2]) if found else []


def nbytes(shape: str, in_hbm: bool = False) -> int:
    """Bytes of all arrays of a printed shape; with `in_hbm`, without those in the chip's on-chip
    memory, `S(1)`.
    """
    total = 0
    for dtype, dims, layout in ARRAY.findall(shape):
        is_on_chip = "S(" in layout
        if dtype in BYTES and not (in_hbm and is_on_chip):
            total += BYTES[dtype] * math.prod(dimensions(dims))
    return round(total)


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
                if is_entry:
                    self.entry = name
            elif line == "}":
                current = None
            elif current is not None:
                self.add(line, current)

    @staticmethod
    def add(line: str, computation: dict[str, Instruction]) -> None:
        """Adds the instruction of a line, if it has one, to a computation."""
        found = INSTRUCTION.match(line)
        if found:
            root, name, shape, opcode, rest = found.groups()
            computation[name] = Instruction(name, shape, opcode, rest, bool(root))

    def walk(self, name: str = "", times: int = 1) -> Iterator[tuple[str, Instruction, int]]:
        """(computation, instruction, how often it runs) of everything that the core runs in
        sequence.
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
        """How often the body of a loop runs: its known trip count, else the constant in its
        condition.
        """
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
        if count:
            return int(count[1])
        condition = self.computations[re.search(r"condition=%?([\w.\-]+)", loop.rest)[1]]
        limits = [
            int(i.rest.split(")")[0])
            for i in self.inner(condition)
            if i.opcode == "constant" and "s32" in i.shape
        ]
        return max(limits, default=1)

    def inner(self, computation: dict[str, Instruction]) -> Iterator[Instruction]:
        """All instructions of a computation and of those that it calls."""
        for instruction in computation.values():
            yield instruction
            for called in instruction.called:
                yield from self.inner(self.computations.get(called, {}))

    @functools.cache  # noqa: B019 - a program lives as long as its analysis
    def flops_of(self, name: str) -> float:
        """FLOPs of the matrix products and convolutions of a computation and of those that it
        calls.
        """
        computation = self.computations.get(name, {})
        products = [i for i in computation.values() if i.opcode in PRODUCTS]
        calls = [called for i in computation.values() for called in i.called]
        own = sum(product_flops(i, computation) for i in products)
        return own + sum(map(self.flops_of, calls))

    def flops(self, computation: str, instruction: Instruction) -> float:
        if instruction.opcode in PRODUCTS:
            return product_flops(instruction, self.computations[computation])
        return sum(map(self.flops_of, instruction.called))

    def hbm_bytes(self, computation: str, instruction: Instruction) -> int:
        """Bytes that an instruction reads from and writes to HBM; if it slices an array, only the
        slice counts.
        """
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        values = self.computations[computation]
        written = nbytes(instruction.shape, in_hbm=True)
        read = [nbytes(shape, in_hbm=True) for shape in operand_shapes(instruction, values)]
        if instruction.opcode == "dynamic-update-slice":
            return 2 * read[1]
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return min(nbytes(instruction.shape), read[0]) + written
        if instruction.opcode == "fusion" and instruction.called:
            slices = self.slices_read(instruction.called[0])
            read = [min(whole, slices.get(i, whole)) for i, whole in enumerate(read)]
            written = max(written - self.bytes_unchanged(instruction.called[0]), 0)
        return written + sum(read)

    @functools.cache  # noqa: B019
    def slices_read(self, name: str) -> dict[int, int]:
        """Number of a parameter -> the bytes of it that a fused computation reads, for the
        parameters that it only slices.
        """
        computation = self.computations.get(name, {})
        slices = {}
        for parameter in computation.values():
            if parameter.opcode == "parameter":
                size = self.bytes_read(computation, parameter.name)
                if size is not None:
                    slices[int(parameter.rest.split(")")[0])] = size
        return slices

    def bytes_read(self, computation: dict[str, Instruction], value: str) -> int | None:
        """Bytes that a computation reads of a value, or None if it may read all of it."""
        total = 0
        for user in computation.values():
            if value in user.operands:
                size = self.bytes_read_by(user, computation, value)
                if size is None:
                    return None
                total += size
        return total

    def bytes_read_by(
        self, user: Instruction, computation: dict[str, Instruction], value: str
    ) -> int | None:
        """The same for one instruction that has the value as an operand."""
        if user.opcode in ("dynamic-slice", "slice"):
            return nbytes(user.shape)
        if user.opcode == "dynamic-update-slice" and user.operands[0] == value:
            return 0
        if user.opcode == "bitcast":
            return self.bytes_read(computation, user.name)
        if user.opcode == "fusion" and user.called:
            slices = self.slices_read(user.called[0])
            sizes = [slices.get(i) for i, operand in enumerate(user.operands) if operand == value]
            if None not in sizes:
                return sum(sizes)
        return None

    def bytes_unchanged(self, name: str) -> int:
        """Bytes of its results that a fused computation leaves unchanged, because it updates only
        slices of them.
        """
        values = self.computations.get(name, {})
        total = 0
        for update in values.values():
            if update.opcode == "dynamic-update-slice" and update.operands[1] in values:
                whole = nbytes(update.shape, in_hbm=True)
                part = nbytes(values[update.operands[1]].shape)
                total += max(whole - part, 0)
        return total


def operand_shapes(instruction: Instruction, values: dict[str, Instruction]) -> list[str]:
    return [values[name].shape if name in values else "" for name in instruction.operands]


def product_flops(instruction: Instruction, values: dict[str, Instruction]) -> float:
    """2 per multiply-add, without those with padding or with the holes of a dilated window."""
    output = math.prod(sizes(instruction.shape))
    shapes = [sizes(shape) for shape in operand_shapes(instruction, values)[:2]]
    if instruction.opcode == "dot":
        contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        return 2 * output * math.prod(shapes[0][i] for i in dimensions(contracting[1]))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if not labels or len(shapes) < 2 or len(shapes[1]) != len(labels[2]):
        return 0
    kernel = zip(labels[2], shapes[1], strict=True)
    flops = 2 * output * math.prod(size for label, size in kernel if label != "o")
    for share in spatial_shares(instruction, labels, shapes):
        flops *= share
    return flops


def spatial_shares(instruction: Instruction, labels: re.Match, shapes) -> Iterator[float]:
    """For every spatial dimension the share of window positions that meet a real element."""
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    spatial = sorted(label for label in labels[2] if label.isdigit())

    def field(name: str, default: str) -> list[str]:
        found = window and re.search(rf"\b{name}=([\w\-]+)", window[1])
        if not found:
            return [default] * len(spatial)
        return found[1].split("x")

    defaults = dict(stride="1", pad="0_0", lhs_dilate="1", rhs_dilate="1")
    fields = [field(name, default) for name, default in defaults.items()]
    output = sizes(instruction.shape)
    for label, stride, pad, lhs_dilate, rhs_dilate in zip(spatial, *fields, strict=True):
        out = output[labels[3].index(label)]
        kernel = shapes[1][labels[2].index(label)]
        size = shapes[0][labels[1].index(label)]
        low = int(re.match(r"-?\d+", pad)[0])
        dilations = int(lhs_dilate), int(rhs_dilate)
        real = real_positions(out, kernel, size, int(stride), low, *dilations)
        yield real / (out * kernel)


@functools.cache
def real_positions(
    out: int, kernel: int, size: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Number of (output, kernel) positions of one dimension that meet a real input element."""
    # Position start + i * stride must be a multiple of lhs_dilate: so is every `period`-th i.
    last = (size - 1) * lhs_dilate
    common = math.gcd(stride, lhs_dilate)
    period = lhs_dilate // common  # between outputs that meet one
    inverse = pow(stride // common, -1, period)
    total = 0
    for start in range(-low, kernel * rhs_dilate - low, rhs_dilate):
        first = max(-(start // stride), 0)
        end = min((last - start) // stride + 1, out)
        first += (-(start // common) * inverse - first) % period
        if start % common == 0 and first < end:
            total += (end - 1 - first) // period + 1
    return total
