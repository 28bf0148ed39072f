"""Parameters in PyTorch's layouts: tables of names that are used to read and to write.

A row pairs one array of the file with one of ours, or with several that are fused in the file
(query, key, value).
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, posemb
from vit_jax.weights.formats.infer import numbers
from vit_jax.weights.formats.weights import BLOCK, MLP


@dataclasses.dataclass(frozen=True)
class Row:
    theirs: str
    ours: tuple[str, ...]
    kind: str = "plain"  # the layout in the file, a key of TO_OURS


def layer(theirs: str, ours: str, kind: str) -> list[Row]:
    """Weight and bias of a layer."""
    return fused(f"{theirs}.", (ours,), kind)


def fused(theirs: str, ours: Iterable[str], kind: str = "heads") -> list[Row]:
    """Weight and bias of layers, such as the projections to heads, that are one array in the
    file.
    """
    ours = tuple(ours)
    bias = {"heads": "heads_bias"}.get(kind, "plain")
    return [
        Row(f"{theirs}weight", tuple(f"{name}/kernel" for name in ours), kind),
        Row(f"{theirs}bias", tuple(f"{name}/bias" for name in ours), bias),
    ]


def norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}/scale",)), Row(f"{theirs}.bias", (f"{ours}/bias",))]


def blocks(rows: list[Row], theirs: str, depth: int) -> list[Row]:
    """The rows of all blocks, from those of block 0; `theirs` is a block's prefix in the file, with
    {} for its number.
    """

    def numbered(row: Row, i: int) -> Row:
        ours = tuple(name.replace("encoderblock_0", f"encoderblock_{i}", 1) for name in row.ours)
        return dataclasses.replace(row, theirs=theirs.format(i) + row.theirs, ours=ours)

    return [numbered(row, i) for i in range(depth) for row in rows]


def block_rows(norm1, qkv: list[Row], out, norm2, fc1, fc2, swiglu: bool = False) -> list[Row]:
    """The rows of one block, from the names of its parts in a format; with `swiglu`, `fc1` is the
    gate and the first layer, fused.
    """
    first = (f"{MLP}/gate", f"{MLP}/Dense_0") if swiglu else (f"{MLP}/Dense_0",)
    return [
        *norm(norm1, f"{BLOCK}/LayerNorm_0"),
        *qkv,
        *layer(out, f"{BLOCK}/MultiHeadDotProductAttention_1/out", "out"),
        *norm(norm2, f"{BLOCK}/LayerNorm_2"),
        *fused(f"{fc1}.", first, "linear"),
        *layer(fc2, f"{MLP}/Dense_1", "linear"),
    ]


# Layout -> f(array of the file, number of heads): our array.
TO_OURS = {
    "plain": lambda x, heads: x,
    "linear": lambda x, heads: x.transpose(1, 0),  # [out, in]
    "conv": lambda x, heads: x.transpose(2, 3, 1, 0),  # [out, in, h, w]
    "heads": lambda x, heads: x.transpose(1, 0).reshape(x.shape[1], heads, -1),  # [N * K, D]
    "heads_bias": lambda x, heads: x.reshape(heads, -1),  # [N * K]
    "out": lambda x, heads: x.transpose(1, 0).reshape(heads, -1, x.shape[0]),  # [D, N * K]
    "rows": lambda x, heads: x.reshape(1, *x.shape),
}
# The inverse.
TO_THEIRS = {
    "plain": lambda x: x,
    "linear": lambda x: x.transpose(1, 0),
    "conv": lambda x: x.transpose(3, 2, 0, 1),
    "heads": lambda x: x.reshape(x.shape[0], -1).transpose(1, 0),
    "heads_bias": lambda x: x.reshape(-1),
    "out": lambda x: x.reshape(-1, x.shape[-1]).transpose(1, 0),
    "rows": lambda x: x.reshape(*x.shape[1:]),
}


def to_ours(value: np.ndarray, row: Row, heads: int) -> list[np.ndarray]:
    """One array of the file as ours; a shape that does not fit the row raises ValueError."""
    parts = np.split(value, len(row.ours)) if len(row.ours) > 1 else [value]
    return [np.ascontiguousarray(TO_OURS[row.kind](part, heads)) for part in parts]


def to_theirs(values: list[np.ndarray], row: Row) -> np.ndarray:
    """The inverse of `to_ours`."""
    parts = [TO_THEIRS[row.kind](value) for value in values]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def with_zero_biases(arrays: dict, rows: list[Row]) -> dict:
    """`arrays` with zeros for the biases of queries, keys and values in the blocks, for models that
    were built without them.
    """
    zeros = {}
    for row in rows:
        weight = arrays.get(f"{row.theirs.removesuffix('bias')}weight")
        in_block = row.kind == "heads_bias" and "/encoderblock_" in row.ours[0]
        if in_block and weight is not None:
            zeros[row.theirs] = np.zeros(len(weight), np.float32)
    return zeros | arrays


def read(arrays: dict, rows: list[Row], heads: int, path, in_file=None) -> tuple[dict, dict]:
    """(our parameters, name in the file by our name); arrays without a row are passed on unchanged.

    Args:
      arrays: by the names of the table.
      rows: the name table.
      heads: number of heads.
      path: for messages.
      in_file: name in the file by name of the table, if they differ.
    """
    arrays = dict(arrays)
    in_file = in_file or {}
    params = {}
    file_names = {}
    for row in rows:
        name = in_file.get(row.theirs, row.theirs)
        file_names |= dict.fromkeys(row.ours, name)
        if row.theirs not in arrays:
            continue
        value = arrays.pop(row.theirs)
        try:
            params |= zip(row.ours, to_ours(value, row, heads), strict=True)
        except (ValueError, IndexError):
            raise UserError(
                f"{path} has {name} of shape {value.shape}, which does not fit a {row.kind} weight "
                f"of {heads} heads: fetch the file again, or give the right num_heads="
            ) from None
    unknown = {in_file.get(name, name): value for name, value in arrays.items()}
    return params | unknown, file_names


def write(params: dict, rows: list[Row]) -> dict:
    """Arrays by the names of the file, for every row whose parameters are present."""
    present = [row for row in rows if row.ours[0] in params]
    return {row.theirs: to_theirs([params[name] for name in row.ours], row) for row in present}


def count_blocks(arrays: dict, pattern: str) -> int:
    return 1 + max(numbers(pattern, arrays), default=-1)


def choice(value, table: dict, key: str, path):
    """table[value], or a UserError about the key in config.json."""
    if value not in table:
        known = ", ".join(map(repr, table))
        raise UserError(
            f"{path}: config.json has {key}={value!r}, which is not supported: possible are {known}"
        )
    return table[value]


def check_patch_size(config: dict, fields: dict, kernel: str, path) -> None:
    """Raises UserError if the patch embedding contradicts the patch_size in config.json."""
    patch_size = config.get("patch_size")
    if patch_size and create.pair(patch_size) != fields["patch_size"]:
        raise UserError(
            f"{path}: config.json has patch_size={patch_size}, but {kernel} is for "
            f"{fields['patch_size']}: fetch both again"
        )


def one_side(size: tuple[int, int]) -> int | list[int]:
    """(h, w) as configs have it: one number for a square."""
    return size[0] if size[0] == size[1] else list(size)


def fixed_positions(model) -> np.ndarray:
    """A fixed position embedding as the rows of a learned one: [1, length, embed]."""
    rows = np.zeros((1, model.num_prefix + model.grid[0] * model.grid[1], model.width), np.float32)
    if model.posemb == "sincos2d":
        rows[:, model.num_prefix :] = posemb.sincos2d(model.grid, model.width, np.float32)
    return rows
