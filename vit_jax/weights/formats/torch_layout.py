"""The same parameters in PyTorch's layouts: a table of names, read in both directions.

A row pairs one array of the file with one of ours, or with several that the file keeps fused
(query, key, value).
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, posemb
from vit_jax.weights.formats.weights import BLOCK


@dataclasses.dataclass(frozen=True)
class Row:
    """`kind` is the layout: plain; linear [out, in]; conv [out, in, h, w]; heads and out, of
    attention; rows.
    """

    theirs: str
    ours: tuple[str, ...]
    kind: str = "plain"


def layer(theirs: str, ours: str, kind: str) -> list[Row]:
    """Weight and bias of a layer."""
    bias = {"heads": "heads_bias"}.get(kind, "plain")
    return [
        Row(f"{theirs}.weight", (f"{ours}/kernel",), kind),
        Row(f"{theirs}.bias", (f"{ours}/bias",), bias),
    ]


def fused(theirs: str, ours: Iterable[str]) -> list[Row]:
    """Weight and bias of projections to heads that the file keeps in one array."""
    ours = tuple(ours)
    return [
        Row(f"{theirs}weight", tuple(f"{name}/kernel" for name in ours), "heads"),
        Row(f"{theirs}bias", tuple(f"{name}/bias" for name in ours), "heads_bias"),
    ]


def norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.weight", (f"{ours}/scale",)), Row(f"{theirs}.bias", (f"{ours}/bias",))]


def blocks(rows: list[Row], theirs: str, depth: int) -> list[Row]:
    """The rows of block 0 for every block; `theirs` is its prefix there, with {} for the number."""

    def numbered(row: Row, i: int) -> Row:
        ours = tuple(name.replace("encoderblock_0", f"encoderblock_{i}", 1) for name in row.ours)
        return dataclasses.replace(row, theirs=theirs.format(i) + row.theirs, ours=ours)

    return [numbered(row, i) for i in range(depth) for row in rows]


def block_rows(norm1, qkv: list[Row], out, norm2, fc1, fc2) -> list[Row]:
    """One block, from the names that a format gives its parts."""
    return [
        *norm(norm1, f"{BLOCK}/LayerNorm_0"),
        *qkv,
        *layer(out, f"{BLOCK}/MultiHeadDotProductAttention_1/out", "out"),
        *norm(norm2, f"{BLOCK}/LayerNorm_2"),
        *layer(fc1, f"{BLOCK}/MlpBlock_3/Dense_0", "linear"),
        *layer(fc2, f"{BLOCK}/MlpBlock_3/Dense_1", "linear"),
    ]


def to_ours(value: np.ndarray, row: Row, heads: int) -> list[np.ndarray]:
    """One array of the file as ours; a shape that does not fit the row raises ValueError."""
    parts = np.split(value, len(row.ours)) if len(row.ours) > 1 else [value]
    change = {
        "plain": lambda x: x,
        "linear": lambda x: x.transpose(1, 0),
        "conv": lambda x: x.transpose(2, 3, 1, 0),
        "heads": lambda x: x.transpose(1, 0).reshape(x.shape[1], heads, -1),
        "heads_bias": lambda x: x.reshape(heads, -1),
        "out": lambda x: x.transpose(1, 0).reshape(heads, -1, x.shape[0]),
        "rows": lambda x: x.reshape(1, *x.shape),
    }[row.kind]
    return [np.ascontiguousarray(change(part)) for part in parts]


def to_theirs(values: list[np.ndarray], row: Row) -> np.ndarray:
    """The inverse of `to_ours`."""
    change = {
        "plain": lambda x: x,
        "linear": lambda x: x.transpose(1, 0),
        "conv": lambda x: x.transpose(3, 2, 0, 1),
        "heads": lambda x: x.reshape(x.shape[0], -1).transpose(1, 0),
        "heads_bias": lambda x: x.reshape(-1),
        "out": lambda x: x.reshape(-1, x.shape[-1]).transpose(1, 0),
        "rows": lambda x: x.reshape(*x.shape[1:]),
    }[row.kind]
    parts = [change(value) for value in values]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def with_zero_biases(held: dict, rows: list[Row]) -> dict:
    """`held` with zeros for the biases of the blocks' queries, keys and values, of models that are
    built without.
    """
    biases = [
        row.theirs
        for row in rows
        if row.kind == "heads_bias" and row.ours[0].startswith("Transformer/")
    ]
    weights = {bias: held.get(f"{bias.removesuffix('bias')}weight") for bias in biases}
    zeros = {
        bias: np.zeros(len(weight), np.float32)
        for bias, weight in weights.items()
        if weight is not None
    }
    return zeros | held


def read(held: dict, rows: list[Row], heads: int, path, in_file=None) -> tuple[dict, dict]:
    """(our parameters, name in the file by our name); names that no row has are passed on as they
    are.

    Args:
      held: arrays by the names of the table.
      in_file: name in the file by name of the table, where they differ.

    Raises:
      UserError: an array does not have the shape of its row.
    """
    held, params, file_names, in_file = dict(held), {}, {}, in_file or {}
    for row in rows:
        name = in_file.get(row.theirs, row.theirs)
        file_names |= dict.fromkeys(row.ours, name)
        if row.theirs not in held:
            continue
        value = held.pop(row.theirs)
        try:
            params |= zip(row.ours, to_ours(value, row, heads), strict=True)
        except (ValueError, IndexError):
            raise UserError(
                f"{path} has {name} of shape {value.shape}, which is no {row.kind} weight of "
                f"{heads} heads: fetch the file again, or give the right num_heads="
            ) from None
    return params | {in_file.get(name, name): value for name, value in held.items()}, file_names


def write(params: dict, rows: list[Row]) -> dict:
    """Arrays by the names of the file, for every row whose parameters are there."""
    present = [row for row in rows if row.ours[0] in params]
    return {row.theirs: to_theirs([params[name] for name in row.ours], row) for row in present}


def count_blocks(held: dict, pattern: str) -> int:
    return 1 + max(
        (int(match[1]) for name in held if (match := re.match(pattern, name))), default=-1
    )


def choice(value, table: dict, what: str, path):
    if value not in table:
        known = ", ".join(map(repr, table))
        raise UserError(
            f"{path}: config.json has {what}={value!r}, which is not known here: it knows {known}"
        )
    return table[value]


def check_patch_size(config: dict, fields: dict, kernel: str, path) -> None:
    """Raises UserError where the patch embedding is not for the patches that config.json gives."""
    given = config.get("patch_size")
    if given and create.pair(given) != fields["patch_size"]:
        raise UserError(
            f"{path}: config.json has patch_size={given}, but {kernel} is for "
            f"{fields['patch_size']}: fetch both again"
        )


def fixed_positions(model) -> np.ndarray:
    """Positions that a model computes, as the rows of a learned embedding: [1, length, embed]."""
    rows = np.zeros((1, model.num_prefix + model.grid[0] * model.grid[1], model.width), np.float32)
    if model.posemb == "sincos2d":
        rows[:, model.num_prefix :] = posemb.sincos2d(model.grid, model.width, np.float32)
    return rows
