"""SigLIP's vision tower (arXiv 2303.15343) as in Hugging Face transformers."""

from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, fused, layer, norm
from vit_jax.weights.formats.weights import BLOCK, POSEMB

ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"


def rows(depth: int) -> list[Row]:
    """The name table, without the prefix `vision_model.`."""
    qkv = []
    for name in ("query", "key", "value"):
        qkv += layer(f"self_attn.{name[0]}_proj", f"{ATTENTION}/{name}", "heads")
    block = block_rows(
        "layer_norm1", qkv, "self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2"
    )
    return [
        Row("embeddings.position_embedding.weight", (POSEMB,), "rows"),
        *layer("embeddings.patch_embedding", "embedding", "conv"),
        *blocks(block, "encoder.layers.{}.", depth),
        *norm("post_layernorm", "Transformer/encoder_norm"),
        Row("head.probe", ("MAPHead_0/probe",)),
        *fused(
            "head.attention.in_proj_", (f"{POOLING}/{name}" for name in ("query", "key", "value"))
        ),
        *layer("head.attention.out_proj", f"{POOLING}/out", "out"),
        *norm("head.layernorm", "MAPHead_0/LayerNorm_0"),
        *layer("head.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0", "linear"),
        *layer("head.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1", "linear"),
        *layer("classifier", "head", "linear"),
    ]


def vision_tower(arrays: dict) -> dict:
    """SigLIP without its text tower and the parameters of both towers.

    A classifier reads the mean of the tokens; its file has the attention pooling too, unused.
    """
    other = ["text_model.", "logit_"]
    if "classifier.weight" in arrays:
        other.append("head.")
    return {name: value for name, value in arrays.items() if not name.startswith(tuple(other))}
