"""The model that parameters are for, from their names and shapes."""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.weights.formats.weights import BLOCK, POSEMB, in_file, left_over, nearest
from vit_jax.weights.scan_layout import flatten


def shape_of(params, name: str, rank: int, path, file_names: dict[str, str]) -> tuple[int, ...]:
    """The shape of a parameter that every ViT has.

    Raises:
      UserError: it is missing, or of another rank.
    """
    if name not in params:
        others = left_over(params, file_names) or params
        raise UserError(
            f"{path} has no {in_file(name, file_names)} among its {len(params)} parameters"
            f"{nearest(file_names.get(name, name), others)}: these are not the weights of a ViT"
        )
    if params[name].ndim != rank or not params[name].size:
        raise UserError(
            f"{path} has {in_file(name, file_names)} of shape {params[name].shape}: these are not "
            "the weights of a ViT"
        )
    return params[name].shape


def infer_fields(params: dict[str, np.ndarray], path, file_names: dict[str, str]) -> dict:
    """Constructor arguments that the names and shapes of a ViT's published parameters show, all but
    the grid.

    Args:
      params: by published name.
      path: for messages, as are the names in the file by published name.

    Raises:
      UserError: these are not the parameters of a ViT.
    """

    def outputs(layer):
        """Width of a layer, 0 where nothing of it is there; what is missing of it is named later."""
        return max(
            (value.shape[-1] for name, value in params.items() if name.startswith(f"{layer}/")),
            default=0,
        )

    kernel = shape_of(params, "embedding/kernel", 4, path, file_names)
    blocks = {
        int(match[1])
        for name in params
        if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))
    }
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(
            f"{path} has the encoder blocks {sorted(blocks)}: some are missing, fetch the file "
            "again"
        )
    places = {
        "stem": POSEMB,
        "every": POSEMB.replace("posembed_input", "encoderblock_0/posembed_input"),
    }
    place = next((place for place, name in places.items() if name in params), None)
    fields = dict(
        architecture="vit",
        width=kernel[-1],
        depth=len(blocks),
        mlp_dim=shape_of(params, f"{BLOCK}/MlpBlock_3/Dense_0/kernel", 2, path, file_names)[-1],
        num_heads=shape_of(
            params, f"{BLOCK}/MultiHeadDotProductAttention_1/query/kernel", 3, path, file_names
        )[1],
        patch_size=tuple(kernel[:2]),
        pool="tok"
        if "cls" in params
        else "map"
        if any(name.startswith("MAPHead_0/") for name in params)
        else "gap",
        posemb="learn" if place else "sincos2d",
        pre_logits=outputs("pre_logits"),
        num_classes=outputs("head"),
    )
    if place:
        fields["posemb_at"] = place
    if any(re.match(r"conv_root/|gn_root/|block\d+/", name) for name in params):
        width = shape_of(params, "conv_root/kernel", 4, path, file_names)[-1]
        fields |= dict(stem_units=stem_units(params, path), stem_width=width)
    return fields


def stem_units(params, path) -> tuple[int, ...]:
    """Bottlenecks by stage of a hybrid's ResNet.

    Raises:
      UserError: a stage or a bottleneck is missing.
    """
    found: dict[int, set[int]] = {}
    for name in params:
        if match := re.match(r"block(\d+)/unit(\d+)/", name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    for what, numbers in (
        ("stages block", set(found)),
        *((f"units of block{i}", found[i]) for i in sorted(found)),
    ):
        if numbers != set(range(1, len(numbers) + 1)):
            raise UserError(
                f"{path} has the {what} {sorted(numbers)}: some are missing, fetch the file again"
            )
    return tuple(len(found[stage]) for stage in sorted(found))


def held_image_size(
    params, fields: dict, path, grid=None, image_size=None, default=None, file_names=None
) -> tuple[int, int]:
    """The image size that a ViT's held position embedding is for: see `settle_image_size`."""
    model = create.create(**fields | dict(image_size=2**14))
    if POSEMB not in params:
        if grid is not None:
            return tuple(
                side * cell for side, cell in zip(create.pair(grid), model.cell, strict=True)
            )
        return create.pair(image_size or default or 224)
    tokens = params[POSEMB].shape[-2] - model.num_prefix if params[POSEMB].ndim > 1 else 0
    if tokens < 1:
        raise UserError(
            f"{path} has a position embedding of shape {params[POSEMB].shape}: it has no patch rows"
        )
    try:
        return settle_image_size(model, tokens, path, grid, image_size, default)
    except UserError as error:
        raise UserError(f"{error}{suspicion(params, model, tokens, file_names or {})}") from None


def suspicion(params, model, tokens: int, file_names: dict[str, str]) -> str:
    """What may be behind a number of patch tokens that is none: a token or a stem under another
    name, or missing.
    """
    wanted = flatten(create.abstract_params(model.clone(image_size=model.cell)))
    strange = sorted(file_names.get(name, name) for name in params.keys() - wanted.keys())
    if strange:
        names = [file_names.get(name, name) for name in (*wanted, "cls", "dist", "reg")]
        return f"; it has {strange[0]}, which is not known{nearest(strange[0], names)}"
    if not model.num_prefix and math.isqrt(tokens - 1) ** 2 == tokens - 1:
        return f"; {tokens - 1} and a class token would be one: is {file_names.get('cls', 'cls')} missing?"
    return ""


def settle_image_size(
    model, tokens: int, path, grid=None, image_size=None, default=None
) -> tuple[int, int]:
    """The image size that gives a number of patch tokens.

    Args:
      model: of any image size.
      grid: (h, w) of the patch tokens, as the user says.
      image_size: as the user wants it; settles the grid when it has exactly as many tokens.
      default: image size that the file's own config gives.

    Raises:
      UserError: nothing of these tells the grid, and it is no square.
    """
    if default and min(create.pair(default)) < 1:
        raise UserError(
            f"{path}: config.json has images of size {default}, which are none: fetch it again"
        )

    def settles(size):
        return size and math.prod(model.clone(image_size=create.pair(size)).grid) == tokens

    side = math.isqrt(tokens)
    if grid is None:
        if size := next(filter(settles, (default, image_size)), None):
            return create.pair(size)
        grid = (side, side) if side * side == tokens else None
    if grid is None or math.prod(create.pair(grid)) != tokens:
        raise UserError(
            f"{path} has {tokens} patch tokens, "
            f"{'no square' if grid is None else f'not {grid[0]} x {grid[1]}'}: give grid=(h, w), "
            "or the image_size= that it was trained at"
        )
    grid = create.pair(grid)
    return grid[0] * model.cell[0], grid[1] * model.cell[1]


def number_of_heads(width: int, depth: int, mlp_dim: int, path) -> int:
    """Heads of a model whose file does not show them: those of the variant with its sizes, or of
    its width.

    Raises:
      UserError: no variant has them.
    """
    for sizes in variants.SIZES.values():
        if sizes[:3] == (width, depth, mlp_dim):
            return sizes[3]
    if width in {
        sizes[0] for name, sizes in variants.SIZES.items() if name in ("Ti", "S", "B", "L")
    }:
        return width // 64
    raise UserError(f"{path} does not say how many heads a width of {width} has: give num_heads=")
