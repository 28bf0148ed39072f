"""The .npz files of vision_transformer (ViT and hybrids of arXiv 2010.11929 and 2106.10270, Mixer)
and of BiT.
"""

import logging
import re

from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.weights.formats import bit, mixer
from vit_jax.weights.formats.infer import image_size_of, infer_fields, saved_image_size
from vit_jax.weights.formats.weights import POSEMB, Weights, rename

log = logging.getLogger(__name__)

# Linen numbers the sub-modules of a block per class; the published names number them all together.
LINEN_NAMES = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}


def published_name(name: str) -> str:
    """The published name, from itself or from Linen's."""
    parts = name.split("/")
    if any(part.startswith("encoderblock") for part in parts):
        parts = [LINEN_NAMES.get(part, part) for part in parts]
    return "/".join(parts)


def is_group_norm(name: str) -> bool:
    """Whether a leaf is of a GroupNorm; the published hybrids store these as [1, 1, 1, C]."""
    return bool(re.search(r"(^|/)gn(\d|_\w+)/[^/]+$", name))


def read(arrays: dict, path, grid=None, image_size=None, posemb=None) -> Weights:
    """Weights from the arrays of a published file.

    Args:
      arrays: by name.
      path: for messages.
      grid, image_size: see `weights.load.read`.
      posemb: the position embedding of a model whose file has none.
    """
    if bit.is_bit(arrays):
        return read_bit(arrays, image_size, "published")
    if mixer.is_mixer(arrays):
        return read_mixer(arrays, path, grid, image_size, "published")
    params, file_names = rename(arrays, published_name, path)
    params = {
        name: value.reshape(-1) if is_group_norm(name) else value for name, value in params.items()
    }
    fields = infer_fields(params, path, file_names)
    fields["image_size"] = saved_image_size(
        params, fields, path, grid, image_size, file_names=file_names
    )
    if fields["posemb"] == "sincos2d":
        fields["posemb"] = unlearned_posemb(arrays, path, posemb)
    return Weights(params, fields, format="published", file_names=file_names)


def unlearned_posemb(arrays: dict, path, posemb: str | None) -> str:
    """The position embedding of a model whose file has none.

    Raises:
      UserError: all files with names such as these have one, and `posemb` is not given.
    """
    if posemb in ("sincos2d", "none"):
        return posemb
    if posemb is None and any("/MultiHeadDotProductAttention_1/" in name for name in arrays):
        raise UserError(
            f"{path} has no {POSEMB}, the position embedding, although its names are those of "
            "vision_transformer: fetch it again; if its model has a fixed one, give "
            "posemb=sincos2d (--config.model.posemb=sincos2d in training)"
        )
    log.warning("%s has no position embedding: using a fixed sin-cos embedding", path)
    return "sincos2d"


def read_bit(arrays: dict, image_size, format: str, **fields) -> Weights:
    """Weights of a BiT ResNet, which accepts images of any size."""
    params = bit.read(arrays)
    fields |= bit.infer_fields(params) | dict(image_size=image_size or 224)
    return Weights(params, fields, format=format)


def read_mixer(params: dict, path, grid, image_size, format: str) -> Weights:
    """Weights of a Mixer, whose token mixing shows how many patches it is for."""
    fields = mixer.infer_fields(params)
    model = create.create(**fields | dict(image_size=2**14))
    tokens = params["MixerBlock_0/token_mixing/Dense_0/kernel"].shape[0]
    size = image_size_of(model, tokens, path, grid, image_size)
    return Weights(params, fields | dict(image_size=size), format=format)


def obstacles(weights: Weights, model) -> list[str]:
    """Features of a model that these files can't represent."""
    architecture = weights.fields["architecture"]
    if architecture == "bit" and model.pool_padding != "zeros":
        return ["minus infinity around the root's max-pool", *plain_obstacles(model)]
    if architecture != "vit":
        return plain_obstacles(model)
    features = vit_obstacles(model)
    if model.pool == "map":
        features.append("map pooling")
    if model.posemb == "sincos2d":
        features.append("posemb=sincos2d")
    return features


def plain_obstacles(model) -> list[str]:
    """Features that no .npz can represent, of any architecture."""
    if any(value != 0.5 for value in (*model.mean, *model.std)):
        return [f"images normalised by mean={model.mean}, std={model.std}"]
    return []


def vit_obstacles(model) -> list[str]:
    """Features of a ViT that neither of the two .npz formats can represent."""
    features = {
        f"pool={model.pool}": model.pool not in ("tok", "gap", "map"),
        f"posemb={model.posemb}": model.posemb not in ("learn", "sincos2d"),
        f"posemb_at={model.posemb_at}": model.posemb_at != "stem",
        "a distillation token": model.distilled,
        "register tokens": model.registers,
        f"a class token with pool={model.pool}": model.class_token and model.pool != "tok",
        "a final LayerNorm after the pooling (fc_norm)": model.fc_norm,
        "LayerScale": model.layer_scale,
        "SwiGLU": model.mlp == "swiglu",
        "exact (erf) GELU": model.gelu != "tanh",
    }
    return plain_obstacles(model) + [name for name, present in features.items() if present]


def write(weights: Weights) -> dict:
    """The arrays of a published file."""
    if weights.fields["architecture"] == "bit":
        return bit.write(weights.params)
    return {
        name: value.reshape(1, 1, 1, -1) if is_group_norm(name) else value
        for name, value in weights.params.items()
    }
