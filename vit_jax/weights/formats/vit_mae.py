"""The decoder of transformers' ViTMAEForPreTraining; its encoder has the names of ViT.

The hub's files call its blocks decoder.decoder_layers.N, those that transformers 5 writes
decoder.decoder_encoder.layer.N, and each block has the names of ViT's blocks in either style.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.mae import DECODER
from vit_jax.weights.formats import torch_layout
from vit_jax.weights.formats.infer import decoder_sizes
from vit_jax.weights.formats.torch_layout import Row, blocks, layer, norm
from vit_jax.weights.formats.weights import POSEMB, Weights

PREFIX = "decoder."
BLOCKS = f"{PREFIX}decoder_layers."
LAYERS = (BLOCKS, f"{PREFIX}decoder_encoder.layer.")

# Of a config.json that leaves them out: transformers' ViTMAEConfig.
MASK_RATIO = 0.75
NUM_HEADS = 16
WIDTH = 512


def layer_name(name: str, encoder_name: Callable[[str], str]) -> str:
    """The hub's name of a parameter of a block; `encoder_name` gives that of the encoder's."""
    for prefix in LAYERS:
        name = name.removeprefix(prefix)
    return BLOCKS + encoder_name(f"layers.{name}").removeprefix("encoder.layer.")


def is_vit_mae(arrays: dict, config: dict) -> bool:
    is_mae = config.get("model_type") == "vit_mae"
    return is_mae or any(name.startswith(f"{PREFIX}decoder_") for name in arrays)


def split(arrays: dict) -> tuple[dict, dict]:
    """(encoder, decoder)."""
    decoder = {name: value for name, value in arrays.items() if name.startswith(PREFIX)}
    return {name: value for name, value in arrays.items() if name not in decoder}, decoder


def rows(block: list[Row], depth: int) -> list[Row]:
    """The name table; `block`: that of one block of ViT."""

    def ours(row: Row) -> Row:
        return dataclasses.replace(row, ours=tuple(f"{DECODER}/{name}" for name in row.ours))

    table = [
        *layer(f"{PREFIX}decoder_embed", "embedding", "linear"),
        Row(f"{PREFIX}mask_token", ("mask",)),
        Row(f"{PREFIX}decoder_pos_embed", (POSEMB,)),
        *blocks(block, BLOCKS + "{}.", depth),
        *norm(f"{PREFIX}decoder_norm", "Transformer/encoder_norm"),
        *layer(f"{PREFIX}decoder_pred", "head", "linear"),
    ]
    return [ours(row) for row in table]


def add_decoder(
    weights: Weights, arrays: dict, block: list[Row], config: dict, path, file_names: dict
) -> Weights:
    """The encoder's weights with those of the decoder, if the file has one.

    Args:
      arrays: of the decoder, by the hub's names.
      block: the name table of one block.
      config: config.json.
      file_names: names in the file by the hub's names.
    """
    settings = dict(
        mask_ratio=float(config.get("mask_ratio", MASK_RATIO)),
        norm_pixels=bool(config.get("norm_pix_loss", False)),
    )
    extra: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}
    if arrays:
        depth = torch_layout.count_blocks(arrays, re.escape(BLOCKS) + r"(\d+)\.")
        check_depth(config, depth, path)
        table = rows(block, depth)
        if config.get("qkv_bias") is False:
            arrays = torch_layout.with_zero_biases(arrays, table)
        heads = number_of_heads(config, arrays, path)
        extra, names = torch_layout.read(arrays, table, heads, path, file_names)
    return dataclasses.replace(
        weights,
        objective="mae",
        settings=settings,
        extra=extra,
        file_names=weights.file_names | names,
    )


def number_of_heads(config: dict, arrays: dict, path) -> int:
    """Those of the decoder; without a config.json they are known for the usual width alone."""
    width = arrays.get(f"{PREFIX}mask_token", np.zeros(0)).size
    if not config and width != WIDTH:
        raise UserError(
            f"{path} does not say how many heads its decoder of width {width} has: put its "
            "config.json beside it"
        )
    return config.get("decoder_num_attention_heads", NUM_HEADS)


def check_depth(config: dict, depth: int, path) -> None:
    """Raises UserError if config.json has another number of decoder blocks."""
    declared = config.get("decoder_num_hidden_layers", depth)
    if declared != depth:
        raise UserError(
            f"{path}: config.json has decoder_num_hidden_layers={declared}, but the file has "
            f"{depth} decoder blocks: fetch both again"
        )


def has_decoder(weights: Weights) -> bool:
    return weights.objective == "mae" and bool(weights.extra)


def obstacles(model) -> list[str]:
    """Features of an autoencoder's ViT that only ViTMAE can't represent: it cuts images into
    patches by one side.
    """
    sizes = (model.image_size, model.patch_size)
    features = {
        "a decoder of images or patches that are not square": any(h != w for h, w in sizes),
        "a decoder of images with a border": model.image_size[0] % model.patch_size[0],
        "a decoder of two class tokens": model.distilled,
    }
    return [name for name, present in features.items() if present]


def write(weights: Weights, block: list[Row]) -> tuple[dict, dict]:
    """(arrays of the decoder by the hub's names, which transformers 4 and 5 read; what config.json
    has besides that of ViT).
    """
    sizes = decoder_sizes(weights.extra, weights.path, weights.file_names)
    config = dict(
        architectures=["ViTMAEForPreTraining"],
        model_type="vit_mae",
        decoder_hidden_size=sizes["width"],
        decoder_num_hidden_layers=sizes["depth"],
        decoder_num_attention_heads=sizes["num_heads"],
        decoder_intermediate_size=sizes["mlp_dim"],
        mask_ratio=weights.settings.get("mask_ratio", MASK_RATIO),
        norm_pix_loss=weights.settings.get("norm_pixels", True),
    )
    return torch_layout.write(weights.extra, rows(block, sizes["depth"])), config
