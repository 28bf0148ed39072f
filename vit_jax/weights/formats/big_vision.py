"""The .npz files of big_vision: positions are added before the class token, and blocks may be
stacked for scan.
"""

import math
import re
from collections.abc import Iterable

import numpy as np

from vit_jax.models import create
from vit_jax.weights.formats import bit, mixer, vision_transformer
from vit_jax.weights.formats.infer import held_image_size, infer_fields
from vit_jax.weights.formats.weights import POSEMB, Weights, rename

LINEN_BLOCK = {ours: theirs for theirs, ours in vision_transformer.LINEN_NAMES.items()}
MAP_PARTS = ("probe", "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_0")
STACKED = "Transformer/encoderblock/"
MARKS = ("pos_embedding", "Transformer/pos_embedding", "probe")
# Above the parameters; "opt/target/" is of the time of flax.optim, "img/" of models of image and
# text.
PREFIXES = ("params/", "opt/target/", "img/")


def is_big_vision(held: Iterable[str]) -> bool:
    """Whether these are big_vision's names of any age."""
    return any(name in MARKS or name.startswith((*PREFIXES, STACKED)) for name in held)


def tower(names: Iterable[str]) -> dict[str, str]:
    """{name in the file: name} of the parameters, without the optimizer states and the text tower
    that stand beside.
    """
    found = {name: name for name in names}
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in found.values()):
            found = {
                full: name.removeprefix(prefix)
                for full, name in found.items()
                if name.startswith(prefix)
            }
    return found


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
    names = {name: full for full, name in tower(held).items()}
    held = {name: held[full] for name, full in names.items()}
    if bit.is_bit(held):
        return vision_transformer.read_bit(held, image_size, "big_vision", pool_padding="lowest")
    if mixer.is_mixer(held):
        return vision_transformer.read_mixer(held, path, grid, image_size, "big_vision")
    held = unstack(held)
    has_probe = "probe" in held  # the attention pooling of ViT-G's time stood at the top

    def our_name(name):
        if name in ("pos_embedding", "Transformer/pos_embedding"):
            return POSEMB
        below_head = has_probe and name.split("/")[0] in MAP_PARTS
        return vision_transformer.published_name(f"MAPHead_0/{name}" if below_head else name)

    params, file_names = rename(held, our_name, path)
    if (
        "cls" in params
        and "pos_embedding" in held
        and params[POSEMB].ndim == 3
        and "embedding/kernel" in params
    ):
        add_cls_row(params, grid, image_size)
    file_names = {ours: names.get(name, name) for ours, name in file_names.items()}
    fields = infer_fields(params, path, file_names)
    fields["image_size"] = held_image_size(
        params, fields, path, grid, image_size, file_names=file_names
    )
    return Weights(params, fields, format="big_vision", file_names=file_names)


def add_cls_row(params: dict, grid, image_size) -> None:
    """Gives the class token a position, zero; files of 2021 have one although their positions stand
    at the top.
    """
    posemb, patch = params[POSEMB], params["embedding/kernel"].shape[:2]
    rows = posemb.shape[1]
    sizes = [math.prod(create.pair(grid))] if grid is not None else []
    if image_size:
        sizes.append(
            math.prod(
                side // cell for side, cell in zip(create.pair(image_size), patch, strict=False)
            )
        )
    if rows not in sizes and rows > 1 and math.isqrt(rows - 1) ** 2 == rows - 1:
        return
    params[POSEMB] = np.concatenate([np.zeros_like(posemb[:, :1]), posemb], axis=1)


def obstacles(weights: Weights, model) -> list[str]:
    """What of a model these files have no place for."""
    if weights.fields["architecture"] == "bit":
        zeros = ["zeros around the root's max-pool"] if model.pool_padding == "zeros" else []
        return zeros + vision_transformer.plain_obstacles(model)
    if weights.fields["architecture"] == "mixer":
        return vision_transformer.plain_obstacles(model)
    found = vision_transformer.vit_obstacles(model)
    return found + (["a ResNet stem"] if model.stem_units is not None else [])


def write(weights: Weights) -> dict:
    """The arrays of a big_vision file, one entry per layer; a class token takes its position's row
    with it.
    """
    params = dict(weights.params)
    if weights.fields["architecture"] == "bit":
        norms = [
            name
            for name in params
            if name.endswith(("/scale", "/bias")) and not name.startswith("head/")
        ]
        params |= {name: params[name].reshape(1, 1, 1, -1) for name in norms}
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
