"""The .npz files of vision_transformer (ViT and hybrids of arXiv 2010.11929 and 2106.10270, Mixer),
and BiT's.
"""

import logging
import re

from vit_jax.models import create
from vit_jax.weights.formats import bit, mixer
from vit_jax.weights.formats.infer import held_image_size, infer_fields, settle_image_size
from vit_jax.weights.formats.weights import Weights, rename

log = logging.getLogger(__name__)

# Linen numbers the sub-modules of a block by class; published names count them through.
LINEN_NAMES = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}


def published_name(name: str) -> str:
    """The name as published, from that or from Linen's."""
    parts = name.split("/")
    if any(part.startswith("encoderblock") for part in parts):
        parts = [LINEN_NAMES.get(part, part) for part in parts]
    return "/".join(parts)


def is_group_norm(name: str) -> bool:
    """Whether a leaf is GroupNorm's, which the published hybrids store as [1, 1, 1, C]."""
    return bool(re.search(r"(^|/)gn(\d|_\w+)/[^/]+$", name))


def read(held: dict, path, grid=None, image_size=None) -> Weights:
    """Weights from the arrays of a published file.

    Raises:
      UserError: they are of no architecture that is known here.
    """
    if bit.is_bit(held):
        return read_bit(held, image_size, "published")
    if mixer.is_mixer(held):
        return read_mixer(held, path, grid, image_size, "published")
    params, file_names = rename(held, published_name, path)
    params = {
        name: value.reshape(-1) if is_group_norm(name) else value for name, value in params.items()
    }
    fields = infer_fields(params, path, file_names)
    fields["image_size"] = held_image_size(
        params, fields, path, grid, image_size, file_names=file_names
    )
    if fields["posemb"] == "sincos2d":
        log.warning("%s has no position embedding: fixed sines and cosines are taken", path)
    return Weights(params, fields, format="published", file_names=file_names)


def read_bit(held: dict, image_size, format: str, **fields) -> Weights:
    """Weights of a BiT ResNet, which takes images of any size."""
    params = bit.read(held)
    fields |= bit.infer_fields(params) | dict(image_size=image_size or 224)
    return Weights(params, fields, format=format)


def read_mixer(params: dict, path, grid, image_size, format: str) -> Weights:
    """Weights of a Mixer, whose token mixing shows how many patches it is for."""
    fields = mixer.infer_fields(params)
    model = create.create(**fields | dict(image_size=2**14))
    tokens = params["MixerBlock_0/token_mixing/Dense_0/kernel"].shape[0]
    size = settle_image_size(model, tokens, path, grid, image_size)
    return Weights(params, fields | dict(image_size=size), format=format)


def obstacles(weights: Weights, model) -> list[str]:
    """What of a model these files have no place for."""
    architecture = weights.fields["architecture"]
    if architecture == "bit" and model.pool_padding != "zeros":
        return ["minus infinity around the root's max-pool", *plain_obstacles(model)]
    if architecture != "vit":
        return plain_obstacles(model)
    found = vit_obstacles(model)
    if model.pool == "map":
        found.append("map pooling")
    if model.posemb == "sincos2d":
        found.append("posemb=sincos2d")
    return found


def plain_obstacles(model) -> list[str]:
    """What no .npz says, whatever the architecture."""
    if any(value != 0.5 for value in (*model.mean, *model.std)):
        return [f"images normalised by mean={model.mean}, std={model.std}"]
    return []


def vit_obstacles(model) -> list[str]:
    """What neither of the two .npz formats says of a ViT."""
    found = plain_obstacles(model)
    found += [f"pool={model.pool}"] if model.pool not in ("tok", "gap", "map") else []
    found += [f"posemb={model.posemb}"] if model.posemb not in ("learn", "sincos2d") else []
    found += [f"posemb_at={model.posemb_at}"] if model.posemb_at != "stem" else []
    found += ["a distillation token"] if model.distilled else []
    found += ["register tokens"] if model.registers else []
    found += (
        [f"a class token beside pool={model.pool}"]
        if model.class_token and model.pool != "tok"
        else []
    )
    found += ["a final LayerNorm behind the pooling (fc_norm)"] if model.fc_norm else []
    found += ["LayerScale"] if model.layer_scale else []
    found += [f"GELU by {model.gelu}"] if model.gelu != "tanh" else []
    return found


def write(weights: Weights) -> dict:
    """The arrays of a published file."""
    if weights.fields["architecture"] == "bit":
        return bit.write(weights.params)
    return {
        name: value.reshape(1, 1, 1, -1) if is_group_norm(name) else value
        for name, value in weights.params.items()
    }
