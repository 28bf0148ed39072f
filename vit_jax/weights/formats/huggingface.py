"""The .safetensors of Hugging Face transformers: ViT, DeiT (distilled or not), DINOv2, ViTMAE, and
SigLIP's vision tower.
"""

import dataclasses
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import dinov2, hf_processor, siglip, torch_layout, vit_mae
from vit_jax.weights.formats.infer import infer_fields, number_of_heads, saved_image_size
from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, layer, norm
from vit_jax.weights.formats.weights import BLOCK, POSEMB, Weights, rename

GELUS = dict.fromkeys(("gelu", "gelu_python"), "erf")
GELUS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "tanh")
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"

MODEL_TYPES = {
    "ViT": "vit",
    "DeiT": "deit",
    "Dinov2": "dinov2",
    "Dinov2WithRegisters": dinov2.WITH_REGISTERS,
}
CLASSIFIERS = ("classifier.", "cls_classifier.", "distillation_classifier.")

PREFIX = rf"({'|'.join([*MODEL_TYPES.values(), 'vision_model'])})\."
# Names in the memory of transformers 5 or later -> the hub's names, without a model's prefix.
RENAMED = [
    (rf"^{PREFIX}", ""),
    (r"^layers\.(\d+)\.attention\.", r"encoder.layer.\1.attention."),
    (r"^(encoder\.layer\.\d+)\.attention\.([qkv])_proj\.", r"\1.attention.attention.\2."),
    (r"(?<=attention\.attention\.)q\.", "query."),
    (r"(?<=attention\.attention\.)k\.", "key."),
    (r"(?<=attention\.attention\.)v\.", "value."),
    (r"^(encoder\.layer\.\d+)\.attention\.o_proj\.", r"\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
]


def hub_name(name: str) -> str:
    if name.startswith(vit_mae.LAYERS):
        return vit_mae.layer_name(name, hub_name)
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def vit_block() -> list[Row]:
    """The name table of a block of ViT, DeiT and ViTMAE."""
    qkv = []
    for name in ("query", "key", "value"):
        qkv += layer(f"attention.attention.{name}", f"{ATTENTION}/{name}", "heads")
    parts = ("layernorm_after", "intermediate.dense", "output.dense")
    return block_rows("layernorm_before", qkv, "attention.output.dense", *parts)


def vit_rows(depth: int, distilled: bool) -> list[Row]:
    """The name table of ViT and DeiT, without the prefix `vit.` or `deit.`."""
    return [
        Row("embeddings.cls_token", ("cls",)),
        Row("embeddings.distillation_token", ("dist",)),
        Row("embeddings.position_embeddings", (POSEMB,)),
        *layer("embeddings.patch_embeddings.projection", "embedding", "conv"),
        *blocks(vit_block(), "encoder.layer.{}.", depth),
        *norm("layernorm", "Transformer/encoder_norm"),
        *layer("pooler.dense", "pre_logits", "linear"),
        *layer("cls_classifier" if distilled else "classifier", "head", "linear"),
        *layer("distillation_classifier", "head_dist", "linear"),
    ]


def is_huggingface(arrays: dict) -> bool:
    return any(re.search(r"embeddings\.patch_embedding", name) for name in arrays)


def names_in_file(rows: list[Row], file_names: dict[str, str]) -> dict[str, str]:
    """Names in the file of all rows; a missing one is assumed to have the prefix of the others."""
    prefix = ""
    for name in file_names.values():
        match = re.match(PREFIX, name)
        if match:
            prefix = match[0]
            break
    names = {row.theirs: row.theirs for row in rows}
    names |= {name: prefix + name for name in names if not name.startswith(CLASSIFIERS)}
    return names | file_names


@dataclasses.dataclass(frozen=True)
class Model:
    """What differs between the models of transformers."""

    rows: list[Row]
    depth: int
    patches: str  # kernel of the patch embedding
    mlp_dim: int  # 0: the file does not show it
    ln_eps: float  # if config.json does not say
    gelu: str  # likewise


def model_of(arrays: dict, is_siglip: bool) -> Model:
    def size(name: str) -> int:
        return arrays.get(name, np.zeros(0)).size

    if is_siglip:
        depth = torch_layout.count_blocks(arrays, r"encoder\.layers\.(\d+)\.")
        return Model(
            siglip.rows(depth),
            depth,
            patches="embeddings.patch_embedding.weight",
            mlp_dim=size("encoder.layers.0.mlp.fc1.bias"),
            ln_eps=1e-6,
            gelu="gelu_pytorch_tanh",
        )
    depth = torch_layout.count_blocks(arrays, r"encoder\.layer\.(\d+)\.")
    patches = "embeddings.patch_embeddings.projection.weight"
    if dinov2.is_dinov2(arrays):
        return Model(
            dinov2.rows(depth, dinov2.mlp_of(arrays)),
            depth,
            patches,
            mlp_dim=dinov2.mlp_dim(arrays),
            ln_eps=1e-6,
            gelu="gelu",
        )
    return Model(
        vit_rows(depth, any(name.startswith("cls_classifier.") for name in arrays)),
        depth,
        patches,
        mlp_dim=size("encoder.layer.0.intermediate.dense.bias"),
        ln_eps=1e-12,
        gelu="gelu",
    )


def read(
    arrays: dict, config: dict, processor: dict, path, grid=None, image_size=None, num_heads=None
) -> Weights:
    """Weights from the arrays, config.json and preprocessor_config.json ({}: none)."""
    is_siglip = any(name.endswith("embeddings.patch_embedding.weight") for name in arrays)
    arrays, file_names = rename(arrays, hub_name, path)
    vision = config
    is_mae = vit_mae.is_vit_mae(arrays, config)
    arrays, decoder = vit_mae.split(arrays) if is_mae else (arrays, {})
    if is_siglip:
        vision = config.get("vision_config", config)
        arrays = siglip.vision_tower(arrays)
    else:
        arrays.pop(dinov2.MASK_TOKEN, None)  # of masked pretraining; classifiers ignore it
    model = model_of(arrays, is_siglip)
    heads = num_heads or saved_heads(arrays, model, config, vision, path)
    if vision.get("qkv_bias") is False:
        arrays = torch_layout.with_zero_biases(arrays, model.rows)
    in_file = names_in_file(model.rows, file_names)
    params, names = torch_layout.read(arrays, model.rows, heads, path, in_file)
    layers = {name.split("/")[0] for name in params}
    if "dist" in params and layers & {"head", "pre_logits"} and "head_dist" not in layers:
        params["reg"] = params.pop("dist")  # nothing reads this token
    gelu = vision.get("hidden_act", model.gelu)
    fields = infer_fields(params, path, names) | dict(
        distilled="dist" in params or "head_dist" in layers,
        registers=int("reg" in params),
        gelu=torch_layout.choice(gelu, GELUS, "hidden_act", path),
        ln_eps=float(vision.get("layer_norm_eps", model.ln_eps)),
        posemb="learn",
        **hf_processor.read(processor, config, path),
    )
    if dinov2.is_dinov2(arrays):
        fields |= dinov2.fields(params, config)
        dinov2.add_register_rows(params, fields["registers"])
    elif not is_siglip:
        fields["pool"] = "tok"
    torch_layout.check_patch_size(vision, fields, names["embedding/kernel"], path)
    if fields["pre_logits"] and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(
            f"{path}: config.json has pooler_act={config['pooler_act']!r}; only tanh is supported"
        )
    size = vision.get("image_size")
    fields["image_size"] = saved_image_size(params, fields, path, grid, image_size, size, names)
    class_names = labels(config, fields["num_classes"])
    weights = Weights(params, fields, class_names, format="hf", file_names=names)
    if is_mae:
        weights = vit_mae.add_decoder(weights, decoder, vit_block(), config, path, file_names)
    return weights


def saved_heads(arrays: dict, model: Model, config: dict, vision: dict, path) -> int:
    """Number of heads, by config.json or the sizes of the model."""
    heads = vision.get("num_attention_heads")
    if "vision_config" in config and "num_attention_heads" not in vision:
        heads = 12  # a vision_config leaves out values that are the default
    if heads:
        return heads
    patches = arrays.get(model.patches, np.zeros(()))
    width = patches.shape[0] if patches.ndim else 0
    return number_of_heads(width, model.depth, model.mlp_dim, path)


def labels(config: dict, num_classes: int) -> tuple[str, ...]:
    """Class names by number; () if they are placeholders (LABEL_0, ...)."""
    names = {int(number): str(name) for number, name in config.get("id2label", {}).items()}
    if sorted(names) != list(range(num_classes)):
        return ()
    if all(re.fullmatch(r"LABEL_\d+", name) for name in names.values()):
        return ()
    return tuple(names[i] for i in range(num_classes))


def obstacles(weights: Weights, model) -> list[str]:
    """Features of a model that transformers' ViT, DeiT and DINOv2 can't represent."""
    if weights.fields["architecture"] != "vit":
        return [f"the architecture {weights.fields['architecture']}"]
    if dinov2.can_hold(model) and not vit_mae.has_decoder(weights):
        return dinov2.obstacles(model) + hf_processor.obstacles(model)
    pooling = {"map": "map pooling", "gap": "mean pooling"}.get(model.pool, f"pool={model.pool}")
    features = {
        "a ResNet stem": model.stem_units is not None,
        pooling: model.pool != "tok",
        f"posemb={model.posemb}": model.posemb in ("learn2d", "relative"),
        f"posemb_at={model.posemb_at}": model.posemb_at != "stem",
        "pre_logits below a head": model.pre_logits and model.num_classes,
        "pre_logits of two tokens": model.pre_logits and model.distilled,
        "register tokens": model.registers,
        "LayerScale": model.layer_scale,
        "SwiGLU": model.mlp == "swiglu",
        "a final LayerNorm after the pooling (fc_norm)": model.fc_norm,
    }
    found = [name for name, present in features.items() if present]
    if vit_mae.has_decoder(weights):
        found += vit_mae.obstacles(model)
    return found + hf_processor.obstacles(model)


def vit_settings(model) -> dict:
    """What config.json of ViT and DeiT says, and that of DINOv2 does not."""
    return dict(
        intermediate_size=model.mlp_dim,
        pooler_output_size=model.pre_logits or model.width,
        pooler_act="tanh",
    )


def write(weights: Weights, model) -> tuple[dict, dict]:
    """(arrays, configs): a folder that transformers' from_pretrained opens."""
    params = dict(weights.params)
    if POSEMB not in params:
        params[POSEMB] = torch_layout.fixed_positions(model)
    name = "DeiT" if model.distilled else "ViT"
    processor = name
    if dinov2.can_hold(model):
        name = dinov2.name_of(model)
        arrays, settings = dinov2.write(params, model)
    else:
        arrays = torch_layout.write(params, vit_rows(model.depth, model.distilled))
        settings = vit_settings(model)
    model_type = MODEL_TYPES[name]
    architecture = f"{name}Model"
    if vit_mae.has_decoder(weights):
        arrays = {f"vit.{key}": value for key, value in arrays.items()}
    elif model.num_classes:
        architecture = f"{name}ForImageClassification"
        if model.distilled:
            architecture += "WithTeacher"
        arrays = {
            key if key.startswith(CLASSIFIERS) else f"{model_type}.{key}": value
            for key, value in arrays.items()
        }
    names = weights.class_names or tuple(f"LABEL_{i}" for i in range(model.num_classes))
    config = dict(
        architectures=[architecture],
        model_type=model_type,
        hidden_size=model.width,
        num_hidden_layers=model.depth,
        num_attention_heads=model.num_heads,
        hidden_act=ACTIVATIONS[model.gelu],
        layer_norm_eps=model.ln_eps,
        image_size=torch_layout.one_side(model.image_size),
        patch_size=torch_layout.one_side(model.patch_size),
        num_channels=3,
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label={str(i): name for i, name in enumerate(names)},
        label2id={name: i for i, name in enumerate(names)},
        **settings,
    )
    if vit_mae.has_decoder(weights):
        decoder, changes = vit_mae.write(weights, vit_block())
        arrays |= decoder
        config |= changes
    return arrays, dict(config=config, preprocessor_config=hf_processor.write(model, processor))
