"""Infers the model that parameters are for, from their names and shapes."""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.models.mae import DECODER
from vit_jax.weights.formats.weights import BLOCK, MLP, POSEMB, in_file, nearest, unknown_names
from vit_jax.weights.scan_layout import flatten


def shape_of(params, name: str, rank: int, path, file_names: dict[str, str]) -> tuple[int, ...]:
    """The shape of a parameter that every ViT has; UserError if missing or of another rank."""
    if name not in params:
        others = unknown_names(params, file_names) or params
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
    """Constructor arguments of a ViT that the names and shapes of its parameters show: all but the
    image size.

    Args:
      params: by published name.
      path: for messages.
      file_names: names in the file by published name, for messages.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(params, name, rank, path, file_names)

    def outputs(layer):
        """Width of a layer, or 0; if only a part of it is missing, that is reported later."""
        widths = [x.shape[-1] for name, x in params.items() if name.startswith(f"{layer}/")]
        return max(widths, default=0)

    kernel = shape("embedding/kernel", 4)
    blocks = numbers(r"Transformer/encoderblock_(\d+)/", params)
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(
            f"{path} has the encoder blocks {sorted(blocks)}: some are missing, fetch the file "
            "again"
        )
    fields = dict(
        architecture="vit",
        width=kernel[-1],
        depth=len(blocks),
        mlp_dim=shape(f"{MLP}/Dense_0/kernel", 2)[-1],
        mlp="swiglu" if outputs(f"{MLP}/gate") else "gelu",
        num_heads=shape(f"{BLOCK}/MultiHeadDotProductAttention_1/query/kernel", 3)[1],
        patch_size=tuple(kernel[:2]),
        pool=pooling(params),
        posemb="sincos2d",
        pre_logits=outputs("pre_logits"),
        num_classes=outputs("head"),
    )
    every = POSEMB.replace("posembed_input", "encoderblock_0/posembed_input")
    for place, name in (("every", every), ("stem", POSEMB)):
        if name in params:
            fields |= dict(posemb="learn", posemb_at=place)
    if any(re.match(r"conv_root/|gn_root/|block\d+/", name) for name in params):
        width = shape("conv_root/kernel", 4)[-1]
        fields |= dict(stem_units=stem_units(params, path), stem_width=width)
    return fields


def decoder_sizes(params: dict[str, np.ndarray], path, file_names: dict[str, str]) -> dict:
    """Sizes of the decoder of a masked autoencoder; arguments as for `infer_fields`."""
    block = f"{DECODER}/{BLOCK}"
    mlp_name = f"{block}/MlpBlock_3/Dense_0/kernel"
    query_name = f"{block}/MultiHeadDotProductAttention_1/query/kernel"
    mlp = shape_of(params, mlp_name, 2, path, file_names)
    query = shape_of(params, query_name, 3, path, file_names)
    depth = len(numbers(rf"{DECODER}/Transformer/encoderblock_(\d+)/", params))
    return dict(width=mlp[0], mlp_dim=mlp[1], num_heads=query[1], depth=depth)


def numbers(pattern: str, names) -> set[int]:
    """The numbers that `pattern` matches in names."""
    return {int(match[1]) for match in map(re.compile(pattern).match, names) if match}


def pooling(params) -> str:
    if "cls" in params:
        return "tok"
    if any(name.startswith("MAPHead_0/") for name in params):
        return "map"
    return "gap"


def stem_units(params, path) -> tuple[int, ...]:
    """Bottlenecks by stage of a hybrid's ResNet."""

    def check(what: str, present: set[int]) -> None:
        if present != set(range(1, len(present) + 1)):
            raise UserError(
                f"{path} has the {what} {sorted(present)}: some are missing, fetch the file again"
            )

    stages = numbers(r"block(\d+)/unit\d+/", params)
    check("stages block", stages)
    counts = []
    for stage in sorted(stages):
        units = numbers(rf"block0*{stage}/unit(\d+)/", params)
        check(f"units of block{stage}", units)
        counts.append(len(units))
    return tuple(counts)


def saved_image_size(
    params, fields: dict, path, grid=None, image_size=None, default=None, file_names=None
) -> tuple[int, int]:
    """The image size that a ViT's saved position embedding is for: see `image_size_of`."""
    model = create.create(**fields | dict(image_size=2**14))
    if POSEMB not in params:
        if grid is None:
            return create.pair(image_size or default or 224)
        height, width = create.pair(grid)
        return height * model.cell[0], width * model.cell[1]
    tokens = params[POSEMB].shape[-2] - model.num_prefix if params[POSEMB].ndim > 1 else 0
    if tokens < 1:
        raise UserError(
            f"{path} has a position embedding of shape {params[POSEMB].shape}: it has no patch rows"
        )
    try:
        return image_size_of(model, tokens, path, grid, image_size, default)
    except UserError as error:
        raise UserError(f"{error}{suspicion(params, model, tokens, file_names or {})}") from None


def suspicion(params, model, tokens: int, file_names: dict[str, str]) -> str:
    """A possible reason for an impossible number of patch tokens: a token or a stem that is missing
    or has another name.
    """
    target = flatten(create.abstract_params(model.clone(image_size=model.cell)))
    unknown = sorted(file_names.get(name, name) for name in params.keys() - target.keys())
    if unknown:
        names = [file_names.get(name, name) for name in (*target, "cls", "dist", "reg")]
        return f"; it has {unknown[0]}, which is not known{nearest(unknown[0], names)}"
    if not model.num_prefix and math.isqrt(tokens - 1) ** 2 == tokens - 1:
        cls = file_names.get("cls", "cls")
        return f"; {tokens - 1} and a class token would be possible: is {cls} missing?"
    return ""


def image_size_of(
    model, tokens: int, path, grid=None, image_size=None, default=None
) -> tuple[int, int]:
    """The image size that gives a number of patch tokens.

    Args:
      model: of any image size.
      tokens: number of patch tokens.
      path: for messages.
      grid: (h, w) of the patch tokens, from the user.
      image_size: from the user; it determines the grid if it has exactly as many tokens.
      default: image size in the file's own config.
    """
    if default and min(create.pair(default)) < 1:
        raise UserError(
            f"{path}: config.json has image_size {default}, which is not possible: fetch it again"
        )
    if grid is None:
        for size in (default, image_size):
            if size and math.prod(model.clone(image_size=create.pair(size)).grid) == tokens:
                return create.pair(size)
        side = math.isqrt(tokens)
        if side * side != tokens:
            raise UserError(
                f"{path} has {tokens} patch tokens, not a square number: give grid=(h, w), or the "
                "image_size= that it was trained at"
            )
        grid = (side, side)
    if math.prod(create.pair(grid)) != tokens:
        raise UserError(
            f"{path} has {tokens} patch tokens, not {grid[0]} x {grid[1]}: give grid=(h, w), or "
            "the image_size= that it was trained at"
        )
    height, width = create.pair(grid)
    return height * model.cell[0], width * model.cell[1]


def number_of_heads(width: int, depth: int, mlp_dim: int, path) -> int:
    """Heads of a model whose file does not show them: those of the variant with its sizes, or with
    its width.
    """
    for sizes in variants.SIZES.values():
        if sizes[:3] == (width, depth, mlp_dim):
            return sizes[3]
    if width in {variants.SIZES[name][0] for name in ("Ti", "S", "B", "L")}:
        return width // 64
    raise UserError(f"{path} does not say how many heads a width of {width} has: give num_heads=")
