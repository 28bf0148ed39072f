"""Mixer weights: the published names are ours, so only the model is inferred."""

import re
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats.infer import numbers


def is_mixer(names: Iterable[str]) -> bool:
    """Whether parameter names (or a dict of them) are a Mixer's."""
    return any(re.match(r"MixerBlock_\d+/", name) for name in names)


def infer_fields(params: dict[str, np.ndarray]) -> dict:
    """Constructor arguments that a Mixer's parameters show: all but the image size."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in params:
            raise UserError(
                f"there is no {name} among the {len(params)} parameters: these are not the weights "
                "of a Mixer"
            )
        if params[name].ndim != rank or not params[name].size:
            raise UserError(
                f"{name} has shape {params[name].shape}: these are not the weights of a Mixer"
            )
        return params[name].shape

    stem = shape("stem/kernel", 4)
    blocks = numbers(r"MixerBlock_(\d+)/", params)
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(
            f"there are the blocks {sorted(blocks)} of MixerBlock_<i>: some are missing, fetch the "
            "file again"
        )
    has_head = any(name.startswith("head/") for name in params)
    return dict(
        architecture="mixer",
        width=stem[-1],
        depth=len(blocks),
        patch_size=tuple(stem[:2]),
        tokens_mlp_dim=shape("MixerBlock_0/token_mixing/Dense_0/kernel", 2)[-1],
        channels_mlp_dim=shape("MixerBlock_0/channel_mixing/Dense_0/kernel", 2)[-1],
        num_classes=shape("head/kernel", 2)[-1] if has_head else 0,
    )
