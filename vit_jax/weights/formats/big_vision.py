"""The .npz files of big_vision: positions are added before the class token, and blocks may be
stacked for scan.
"""

import math
import re
from collections.abc import Iterable

import numpy as np

from vit_jax.models import create
from vit_jax.weights.formats import bit, mixer, vision_transformer
from vit_jax.weights.formats.infer import infer_fields, saved_image_size
from vit_jax.weights.formats.weights import POSEMB, Weights, rename

LINEN_BLOCK = {ours: theirs for theirs, ours in vision_transformer.LINEN_NAMES.items()}
MAP_PARTS = ("probe", "MlpBlock_0", "MultiHeadDotProductAttention_0", "LayerNorm_0")
STACKED = "Transformer/encoderblock/"
MARKS = ("pos_embedding", "Transformer/pos_embedding", "probe")
# Of all parameters; "opt/target/" in files of flax.optim's time, "img/" in image-text models.
PREFIXES = ("params/", "opt/target/", "img/")


def is_big_vision(names: Iterable[str]) -> bool:
    """Whether these are names of big_vision, old or new."""
    return any(name in MARKS or name.startswith((*PREFIXES, STACKED)) for name in names)


def tower(names: Iterable[str]) -> dict[str, str]:
    """{name in the file: name} of the parameters, without optimizer states and text tower."""
    short = {name: name for name in names}
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in short.values()):
            short = {
                full: name.removeprefix(prefix)
                for full, name in short.items()
                if name.startswith(prefix)
            }
    return short


def unstack(arrays: dict) -> dict:
    """One entry per layer."""
    flat = {}
    for name, value in arrays.items():
        if name.startswith(STACKED) and value.ndim:
            rest = name.removeprefix(STACKED)
            flat |= {f"Transformer/encoderblock_{i}/{rest}": layer for i, layer in enumerate(value)}
        else:
            flat[name] = value
    return flat


def read(arrays: dict, path, grid=None, image_size=None) -> Weights:
    """Weights from the arrays of a big_vision file, old or new."""
    names = {name: full for full, name in tower(arrays).items()}
    arrays = {name: arrays[full] for name, full in names.items()}
    if bit.is_bit(arrays):
        return vision_transformer.read_bit(arrays, image_size, "big_vision", pool_padding="lowest")
    if mixer.is_mixer(arrays):
        return vision_transformer.read_mixer(arrays, path, grid, image_size, "big_vision")
    arrays = unstack(arrays)
    has_probe = "probe" in arrays  # early files have the attention pooling at the top level

    def our_name(name):
        if name in ("pos_embedding", "Transformer/pos_embedding"):
            return POSEMB
        if has_probe and name.split("/")[0] in MAP_PARTS:
            name = f"MAPHead_0/{name}"
        return vision_transformer.published_name(name)

    params, file_names = rename(arrays, our_name, path)
    has_cls = "cls" in params and "embedding/kernel" in params
    if has_cls and "pos_embedding" in arrays and params[POSEMB].ndim == 3:
        add_cls_row(params, grid, image_size)
    file_names = {ours: names.get(name, name) for ours, name in file_names.items()}
    fields = infer_fields(params, path, file_names)
    fields["image_size"] = saved_image_size(
        params, fields, path, grid, image_size, file_names=file_names
    )
    return Weights(params, fields, format="big_vision", file_names=file_names)


def add_cls_row(params: dict, grid, image_size) -> None:
    """Adds the class token's position row, zero, unless there is one, as in files of 2021."""
    posemb = params[POSEMB]
    rows = posemb.shape[1]
    patch_counts = []
    if grid is not None:
        patch_counts.append(math.prod(create.pair(grid)))
    if image_size:
        height, width = create.pair(image_size)
        patch_height, patch_width = params["embedding/kernel"].shape[:2]
        patch_counts.append(height // patch_height * (width // patch_width))
    if rows not in patch_counts and rows > 1 and math.isqrt(rows - 1) ** 2 == rows - 1:
        return
    params[POSEMB] = np.concatenate([np.zeros_like(posemb[:, :1]), posemb], axis=1)


def obstacles(weights: Weights, model) -> list[str]:
    """Features of a model that these files can't represent."""
    architecture = weights.fields["architecture"]
    if architecture == "bit" and model.pool_padding == "zeros":
        return ["zeros around the root's max-pool", *vision_transformer.plain_obstacles(model)]
    if architecture != "vit":
        return vision_transformer.plain_obstacles(model)
    features = vision_transformer.vit_obstacles(model)
    if model.stem_units is not None:
        features.append("a ResNet stem")
    return features


def write(weights: Weights) -> dict:
    """The arrays of a big_vision file, not stacked; the class token's position is added to it."""
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
            params["cls"] = params["cls"] + posemb[:, :1]
            posemb = posemb[:, 1:]
        params["pos_embedding"] = posemb
    return {f"params/{linen_name(name)}": value for name, value in params.items()}


def linen_name(name: str) -> str:
    if not re.search(r"encoderblock_\d+/", name):
        return name
    return "/".join(LINEN_BLOCK.get(part, part) for part in name.split("/"))
