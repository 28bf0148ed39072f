"""DINOv2 (arXiv 2304.07193) as in Hugging Face transformers: its name table, its settings, and
position embeddings without rows for the registers.
"""

from collections.abc import Iterable

import numpy as np

from vit_jax.weights.formats import torch_layout
from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, layer, norm
from vit_jax.weights.formats.weights import BLOCK, MLP, POSEMB

ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
WITH_REGISTERS = "dinov2_with_registers"  # a model_type
MASK_TOKEN = "embeddings.mask_token"
LARGEST_RATIO = 64  # of the MLP's width

# The two layers of the MLP. In the memory of transformers 5, SwiGLU's first layer and its gate,
# which are one array on the hub, are two.
MLPS = {
    "gelu": ("mlp.fc1", "mlp.fc2"),
    "swiglu": ("mlp.weights_in", "mlp.weights_out"),
    "separate": ("mlp.up_proj", "mlp.down_proj"),
}
GATE = "mlp.gate_proj"


def is_dinov2(names: Iterable[str]) -> bool:
    """Whether a file has these names: in transformers, only DINOv2's blocks have LayerScale."""
    return any(name.startswith("encoder.layer.") and ".layer_scale" in name for name in names)


def mlp_of(names: Iterable[str]) -> str:
    """The key of `MLPS` whose layers a file has."""
    for kind, layers in MLPS.items():
        if any(f".{layer}." in name for name in names for layer in layers):
            return kind
    return "gelu"


def mlp_dim(arrays: dict) -> int:
    """Hidden units of the MLP; 0 if the file does not show them."""
    kind = mlp_of(arrays)
    bias = arrays.get(f"encoder.layer.0.{MLPS[kind][0]}.bias", np.zeros(0))
    return bias.size // 2 if kind == "swiglu" else bias.size


def rows(depth: int, mlp: str) -> list[Row]:
    """The name table, without the model's prefix; `mlp`: a key of `MLPS`."""
    qkv = []
    for name in ("query", "key", "value"):
        qkv += layer(f"attention.attention.{name}", f"{ATTENTION}/{name}", "heads")
    layers = (*MLPS[mlp], mlp == "swiglu")
    block = block_rows("norm1", qkv, "attention.output.dense", "norm2", *layers)
    if mlp == "separate":
        block += layer(GATE, f"{MLP}/gate", "linear")
    block.append(Row("layer_scale1.lambda1", (f"{BLOCK}/LayerScale_1/gamma",)))
    block.append(Row("layer_scale2.lambda1", (f"{BLOCK}/LayerScale_3/gamma",)))
    return [
        Row("embeddings.cls_token", ("cls",)),
        Row("embeddings.register_tokens", ("reg",)),
        Row("embeddings.position_embeddings", (POSEMB,)),
        *layer("embeddings.patch_embeddings.projection", "embedding", "conv"),
        *blocks(block, "encoder.layer.{}.", depth),
        *norm("layernorm", "Transformer/encoder_norm"),
        *layer("classifier", "head", "linear"),
    ]


def fields(params: dict, config: dict) -> dict:
    """Fields of a model that has these parameters, besides those that every ViT has.

    A classifier reads the class token and the mean of the patch tokens.
    """
    has_head = any(name.startswith("head/") for name in params)
    registers = 0
    if "reg" in params:
        registers = params["reg"].shape[1]
    elif config.get("model_type") == WITH_REGISTERS:  # they are missing
        registers = config.get("num_register_tokens", 4)
    return dict(
        pool="tok_gap" if has_head else "tok",
        registers=registers,
        layer_scale=float(config.get("layerscale_value") or 1.0),
    )


def add_register_rows(params: dict, registers: int) -> None:
    """Adds position rows for the registers, zero, after that of the class token."""
    if POSEMB in params and params[POSEMB].ndim == 3:
        params[POSEMB] = np.insert(params[POSEMB], [1] * registers, 0.0, axis=1)


def remove_register_rows(params: dict, registers: int) -> None:
    """Adds the position rows of the registers to the registers, and removes them."""
    first, own, rest = np.split(params[POSEMB], [1, 1 + registers], axis=1)
    if registers:
        params["reg"] = params["reg"] + own
    params[POSEMB] = np.concatenate([first, rest], axis=1)


def can_hold(model) -> bool:
    """Whether a model is of this family, rather than a ViT."""
    return bool(model.layer_scale) and model.pool == ("tok_gap" if model.num_classes else "tok")


def mlp_ratio(model) -> int | None:
    """The mlp_ratio of config.json that gives the model's MLP; None if there is none.

    With SwiGLU the width is two thirds of that, rounded up to a multiple of 8.
    """
    for ratio in range(1, LARGEST_RATIO + 1):
        width = ratio * model.width
        if model.mlp == "swiglu":
            width = (int(width * 2 / 3) + 7) // 8 * 8
        if width == model.mlp_dim:
            return ratio
    return None


def obstacles(model) -> list[str]:
    """Features of a model that DINOv2 can't represent."""
    features = {
        "a ResNet stem": model.stem_units is not None,
        "a distillation token": model.distilled,
        f"posemb={model.posemb}": model.posemb in ("learn2d", "relative"),
        f"posemb_at={model.posemb_at}": model.posemb_at != "stem",
        "pre_logits": model.pre_logits,
        "a final LayerNorm after the pooling (fc_norm)": model.fc_norm,
        "images that are not square": model.image_size[0] != model.image_size[1],
        f"mlp_dim={model.mlp_dim}": mlp_ratio(model) is None,
    }
    return [name for name, present in features.items() if present]


def name_of(model) -> str:
    """What the names of its classes in transformers begin with."""
    return "Dinov2WithRegisters" if model.registers else "Dinov2"


def write(params: dict, model) -> tuple[dict, dict]:
    """(arrays without the model's prefix, the settings in config.json that ViT does not have)."""
    remove_register_rows(params, model.registers)
    arrays = torch_layout.write(params, rows(model.depth, model.mlp))
    arrays[MASK_TOKEN] = np.zeros((1, model.width), np.float32)  # of pretraining
    settings = dict(
        mlp_ratio=mlp_ratio(model),
        use_swiglu_ffn=model.mlp == "swiglu",
        layerscale_value=model.layer_scale,
    )
    if model.registers:
        settings["num_register_tokens"] = model.registers
    return arrays, settings
