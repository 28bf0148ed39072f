"""What a model computes on the way from an image to its logits: tokens, attention weights, feature
maps.
"""

import functools

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.classifier import Classifier


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Classifier, params: dict, image) -> tuple[jax.Array, dict]:
    """(logits, what the modules recorded)."""
    logits, variables = model.apply({"params": params}, image, mutable=["intermediates"])
    return logits, variables["intermediates"]


def only(recorded: tuple):
    """What a module recorded in its one call."""
    (value,) = recorded
    return value


def of_layers(recorded: dict, name: str, depth: int) -> dict:
    """The records of all layers, stacked: [depth, ...]. With scan they are already."""
    if name in recorded:
        return recorded[name]
    layers = [recorded[f"{name}_{i}"] for i in range(depth)]
    return jax.tree.map(lambda *values: jnp.stack(values), *layers)


def of_vit(model: Classifier, recorded: dict) -> dict:
    encoder = recorded["Transformer"]
    tokens = only(encoder["input"])[None]
    found = {}
    if model.depth:
        layers = of_layers(encoder, "encoderblock", model.depth)
        tokens = jnp.concatenate([tokens, only(layers["output"])])
        weights = only(layers["MultiHeadDotProductAttention_1"]["weights"])
        found["attention"] = weights.astype(jnp.float32)
    if model.stem_units is not None:
        found["stem"] = only(recorded["stem"])
    if model.pool == "map":
        weights = only(recorded["MAPHead_0"]["MultiHeadDotProductAttention_0"]["weights"])
        found["pooling_attention"] = weights.astype(jnp.float32)
    return found | dict(tokens=tokens)


def of_mixer(model: Classifier, recorded: dict) -> dict:
    tokens = only(recorded["tokens"])[None]
    if model.depth:
        layers = of_layers(recorded, "MixerBlock", model.depth)
        tokens = jnp.concatenate([tokens, only(layers["output"])])
    return dict(tokens=tokens)


def of_resnet(model: Classifier, recorded: dict) -> dict:
    stages = [only(recorded[f"block{i + 1}"]["output"]) for i in range(len(model.units))]
    return dict(stem=only(recorded["stem"]), stages=stages)


OF = {"vit": of_vit, "mixer": of_mixer, "bit": of_resnet}


def intermediates(model: Classifier, params: dict, image) -> dict:
    """Tokens, attention weights and what else a model computes: see `vit_jax.intermediates`."""
    if model.architecture not in OF:
        raise UserError(
            f"what {model.architecture} computes on the way is not known here: record it in the "
            'module by sow, and call model.apply(..., mutable=["intermediates"])'
        )
    logits, recorded = forward(model, params, image)
    result = OF[model.architecture](model, recorded)
    read = "features" if "features" in recorded else "pre_logits"
    result |= dict(encoded=only(recorded["encoded"]), pre_logits=only(recorded[read]))
    grid = model.clone(image_size=tuple(image.shape[1:3])).grid
    return result | dict(logits=logits, grid=grid, num_prefix=model.num_prefix)
