"""The .npz files of big_vision: positions are added before the class token, and blocks may be stacked for scan."""

import math
import re

import numpy as np

from vit_jax.formats import mixer, published
from vit_jax.formats.weights import POSEMB, Weights, held_image_size, infer_fields
from vit_jax.models import create

LINEN_BLOCK = {ours: theirs for theirs, ours in published.LINEN_NAMES.items()}
MAP_PARTS = ("probe", "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_0")
STACKED = "Transformer/encoderblock/"


def is_big_vision(held: dict) -> bool:
    """Whether these are big_vision's names: below params/, with positions at the top, or stacked."""
    return "pos_embedding" in held or any(name.startswith(("params/", "img/", STACKED)) for name in held)


def tower(held: dict) -> dict:
    """The parameters below params/ (beside them stand optimizer states), and of an image-text model its image tower."""
    for prefix in ("params/", "img/"):
        if any(name.startswith(prefix) for name in held):
            held = {name.removeprefix(prefix): value for name, value in held.items() if name.startswith(prefix)}
    return held


def unstack(held: dict) -> dict:
    """One entry per layer."""
    flat = {}
    for name, value in held.items():
        if name.startswith(STACKED) and value.ndim:
            rest = name.removeprefix(STACKED)
            flat |= {f"Transformer/encoderblock_{i}/{rest}": layer for i, layer in enumerate(value)}
        else:
            flat[name] = value
    return flat


def read(held: dict, path, grid=None, image_size=None) -> Weights:
    """Weights from the arrays of a big_vision file of any age.

    Raises:
      UserError: they are no ViT and no Mixer.
    """
    held = tower(held)
    if mixer.is_mixer(held):
        return published.read_mixer(held, path, grid, image_size, "big_vision")
    held = unstack(held)
    has_probe = "probe" in held  # the attention pooling of ViT-G's time stood at the top
    params, file_names = {}, {}
    for name, value in held.items():
        parts = name.split("/")
        if has_probe and parts[0] in MAP_PARTS:
            parts = ["MAPHead_0", *parts]
        ours = published.published_name("/".join(parts))
        if ours in ("pos_embedding", "Transformer/pos_embedding"):
            ours = POSEMB
        params[ours], file_names[ours] = value, name
    if "cls" in params and "pos_embedding" in held and params[POSEMB].ndim == 3:
        add_cls_row(params, grid, image_size)
    fields = infer_fields(params, path)
    fields["image_size"] = held_image_size(params, fields, path, grid, image_size)
    return Weights(params, fields, format="big_vision", file_names=file_names)


def add_cls_row(params: dict, grid, image_size) -> None:
    """Gives the class token a position, zero; files of 2021 have one although their positions stand at the top."""
    posemb, patch = params[POSEMB], params["embedding/kernel"].shape[:2]
    rows = posemb.shape[1]
    sizes = [math.prod(create.pair(grid))] if grid is not None else []
    if image_size:
        sizes.append(math.prod(side // cell for side, cell in zip(create.pair(image_size), patch, strict=False)))
    if rows not in sizes and rows > 1 and math.isqrt(rows - 1) ** 2 == rows - 1:
        return
    params[POSEMB] = np.concatenate([np.zeros_like(posemb[:, :1]), posemb], axis=1)


def obstacles(weights: Weights, model) -> list[str]:
    """What of a model these files have no place for."""
    if weights.fields["architecture"] == "bit":
        return ["a BiT ResNet"]
    if weights.fields["architecture"] == "mixer":
        return published.plain_obstacles(model)
    found = published.vit_obstacles(model)
    return found + (["a ResNet stem"] if model.stem_units is not None else [])


def write(weights: Weights) -> dict:
    """The arrays of a big_vision file, one entry per layer; a class token takes its position's row with it."""
    params = dict(weights.params)
    if POSEMB in params:
        posemb = params.pop(POSEMB)
        if "cls" in params:
            params["cls"], posemb = params["cls"] + posemb[:, :1], posemb[:, 1:]
        params["pos_embedding"] = posemb
    return {f"params/{linen_name(name)}": value for name, value in params.items()}


def linen_name(name: str) -> str:
    if not re.search(r"encoderblock_\d+/", name):
        return name
    return "/".join(LINEN_BLOCK.get(part, part) for part in name.split("/"))
