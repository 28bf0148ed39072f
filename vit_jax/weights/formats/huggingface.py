"""The .safetensors of Hugging Face transformers: ViT, DeiT (distilled or not), and the vision tower
of SigLIP.
"""

import re

from vit_jax.errors import UserError
from vit_jax.weights.formats import torch_layout
from vit_jax.weights.formats.infer import held_image_size, infer_fields, number_of_heads
from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, fused, layer, norm
from vit_jax.weights.formats.weights import BLOCK, POSEMB, Weights, rename

GELUS = dict.fromkeys(("gelu", "gelu_python"), "erf")
GELUS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "tanh")
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}
RESAMPLING = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # Pillow's numbers
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"

# Names in memory since transformers 5, and without the prefix of a model's head -> names of the
# hub.
RENAMED = [
    (r"^(vit|deit|vision_model)\.", ""),
    (r"^layers\.(\d+)\.attention\.([qkv])_proj\.", r"encoder.layer.\1.attention.attention.\2."),
    (r"(?<=attention\.attention\.)q\.", "query."),
    (r"(?<=attention\.attention\.)k\.", "key."),
    (r"(?<=attention\.attention\.)v\.", "value."),
    (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.(layernorm_\w+)\.", r"encoder.layer.\1.\2."),
]


def hub_name(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def vit_rows(depth: int, distilled: bool) -> list[Row]:
    """The name table of ViT and DeiT, without the prefix `vit.` or `deit.`."""
    names = ("query", "key", "value")
    qkv = [
        row
        for name in names
        for row in layer(f"attention.attention.{name}", f"{ATTENTION}/{name}", "heads")
    ]
    parts = ("layernorm_after", "intermediate.dense", "output.dense")
    return [
        Row("embeddings.cls_token", ("cls",)),
        Row("embeddings.distillation_token", ("dist",)),
        Row("embeddings.position_embeddings", (POSEMB,)),
        *layer("embeddings.patch_embeddings.projection", "embedding", "conv"),
        *blocks(
            block_rows("layernorm_before", qkv, "attention.output.dense", *parts),
            "encoder.layer.{}.",
            depth,
        ),
        *norm("layernorm", "Transformer/encoder_norm"),
        *layer("pooler.dense", "pre_logits", "linear"),
        *layer("cls_classifier" if distilled else "classifier", "head", "linear"),
        *layer("distillation_classifier", "head_dist", "linear"),
    ]


def siglip_rows(depth: int) -> list[Row]:
    """The name table of SigLIP's vision tower, without the prefix `vision_model.`."""
    names = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    qkv = [
        row
        for theirs, ours in names
        for row in layer(f"self_attn.{theirs}", f"{ATTENTION}/{ours}", "heads")
    ]
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


def is_huggingface(held: dict) -> bool:
    return any(re.search(r"embeddings\.patch_embedding", name) for name in held)


def spelling(rows: list[Row], in_file: dict[str, str]) -> dict[str, str]:
    """Names in the file of all rows: what is missing there would have the prefix that the others
    have.
    """
    prefix = next(
        (
            match[0]
            for name in in_file.values()
            if (match := re.match(r"(vit|deit|vision_model)\.", name))
        ),
        "",
    )
    heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
    return {
        row.theirs: row.theirs if row.theirs.startswith(heads) else prefix + row.theirs
        for row in rows
    } | in_file


def vision_tower(held: dict) -> dict:
    """SigLIP without its text tower and without what belongs to both.

    A classifier reads the mean of the tokens: the attention pooling is there, and nothing reads it.
    """
    unread = ("text_model.", "logit_") + (("head.",) if "classifier.weight" in held else ())
    return {name: value for name, value in held.items() if not name.startswith(unread)}


def read(
    held: dict, config: dict, processor: dict, path, grid=None, image_size=None, num_heads=None
) -> Weights:
    """Weights from the arrays, config.json and preprocessor_config.json ({}: none).

    Raises:
      UserError: they are of a model that is not known here.
    """
    siglip = any(name.endswith("embeddings.patch_embedding.weight") for name in held)
    held, in_file = rename(held, hub_name, path)
    if siglip:
        held, vision = vision_tower(held), config.get("vision_config", config)
        depth = torch_layout.count_blocks(held, r"encoder\.layers\.(\d+)\.")
        rows, default_eps, default_gelu = siglip_rows(depth), 1e-6, "gelu_pytorch_tanh"
        patches, fc1 = "embeddings.patch_embedding.weight", "encoder.layers.0.mlp.fc1.bias"
    else:
        vision = config
        depth = torch_layout.count_blocks(held, r"encoder\.layer\.(\d+)\.")
        rows, default_eps, default_gelu = (
            vit_rows(depth, any(name.startswith("cls_classifier.") for name in held)),
            1e-12,
            "gelu",
        )
        patches, fc1 = (
            "embeddings.patch_embeddings.projection.weight",
            "encoder.layer.0.intermediate.dense.bias",
        )
        held.pop("embeddings.mask_token", None)  # of masked image modelling; no classifier reads it
    width = held[patches].shape[0] if patches in held and held[patches].ndim else 0
    mlp_dim = held[fc1].size if fc1 in held else 0
    written = vision.get(
        "num_attention_heads", 12 if "vision_config" in config else None
    )  # a part lacks its defaults
    heads = num_heads or written or number_of_heads(width, depth, mlp_dim, path)
    if vision.get("qkv_bias") is False:
        held = torch_layout.with_zero_biases(held, rows)
    params, names = torch_layout.read(held, rows, heads, path, spelling(rows, in_file))
    layers = {name.split("/")[0] for name in params}
    if "dist" in params and layers & {"head", "pre_logits"} and "head_dist" not in layers:
        params["reg"] = params.pop("dist")  # there, and nothing reads it
    fields = infer_fields(params, path, names) | dict(
        distilled="dist" in params or "head_dist" in layers,
        registers=int("reg" in params),
        gelu=torch_layout.choice(vision.get("hidden_act", default_gelu), GELUS, "hidden_act", path),
        ln_eps=float(vision.get("layer_norm_eps", default_eps)),
        **preprocessing(processor),
    )
    if not siglip:
        fields["pool"] = "tok"
    fields["posemb"] = "learn"
    torch_layout.check_patch_size(vision, fields, names["embedding/kernel"], path)
    if fields["pre_logits"] and config.get("pooler_act", "tanh") != "tanh":
        raise UserError(
            f"{path}: config.json has pooler_act={config['pooler_act']!r}; only tanh is known here"
        )
    size = vision.get("image_size")
    fields["image_size"] = held_image_size(params, fields, path, grid, image_size, size, names)
    return Weights(
        params, fields, labels(config, fields["num_classes"]), format="hf", file_names=names
    )


def preprocessing(processor: dict) -> dict:
    """Fields of `model.preprocess`, from preprocessor_config.json."""
    fields = {
        ours: tuple(processor[f"image_{ours}"])
        for ours in ("mean", "std")
        if f"image_{ours}" in processor
    }
    if processor.get("do_normalize") is False:
        fields |= dict(mean=(0.0,) * 3, std=(1.0,) * 3)
    if "resample" in processor:
        fields["interpolation"] = RESAMPLING.get(processor["resample"], "bilinear")
    size, crop = (smallest(processor.get(name)) for name in ("size", "crop_size"))
    if processor.get("do_center_crop") and size and crop:
        fields["crop"] = crop / size
    return fields


def smallest(size) -> int | None:
    """The small side of a size, which is a number or a dict."""
    return min(size.values(), default=None) if isinstance(size, dict) else size


def labels(config: dict, num_classes: int) -> tuple[str, ...]:
    """Class names by number; placeholders (LABEL_0, ...) are none."""
    found = {int(number): str(name) for number, name in config.get("id2label", {}).items()}
    if sorted(found) != list(range(num_classes)) or all(
        re.fullmatch(r"LABEL_\d+", name) for name in found.values()
    ):
        return ()
    return tuple(found[i] for i in range(num_classes))


def obstacles(weights: Weights, model) -> list[str]:
    """What of a model transformers' ViT and DeiT have no place for."""
    if weights.fields["architecture"] != "vit":
        return [f"the architecture {weights.fields['architecture']}"]
    found = [] if model.stem_units is None else ["a ResNet stem"]
    found += [
        {"map": "map pooling", "gap": "mean pooling"}.get(model.pool, f"pool={model.pool}")
    ] * (model.pool != "tok")
    found += [f"posemb={model.posemb}"] if model.posemb in ("learn2d", "relative") else []
    found += [f"posemb_at={model.posemb_at}"] if model.posemb_at != "stem" else []
    found += ["pre_logits below a head"] if model.pre_logits and model.num_classes else []
    found += ["pre_logits of two tokens"] if model.pre_logits and model.distilled else []
    found += ["register tokens"] if model.registers else []
    found += ["LayerScale"] if model.layer_scale else []
    found += ["a final LayerNorm behind the pooling (fc_norm)"] if model.fc_norm else []
    return found


def write(weights: Weights, model) -> tuple[dict, dict]:
    """(arrays, configs): a folder that transformers' from_pretrained opens."""
    params = dict(weights.params)
    if POSEMB not in params:
        params[POSEMB] = torch_layout.fixed_positions(model)
    kind, name = ("deit", "DeiT") if model.distilled else ("vit", "ViT")
    arrays, architecture = (
        torch_layout.write(params, vit_rows(model.depth, model.distilled)),
        f"{name}Model",
    )
    if model.num_classes:
        architecture = f"{name}ForImageClassification" + ("WithTeacher" if model.distilled else "")
        heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
        arrays = {
            key if key.startswith(heads) else f"{kind}.{key}": value
            for key, value in arrays.items()
        }
    side = [
        size[0] if size[0] == size[1] else list(size)
        for size in (model.image_size, model.patch_size)
    ]
    names = weights.class_names or tuple(f"LABEL_{i}" for i in range(model.num_classes))
    config = dict(
        architectures=[architecture],
        model_type=kind,
        hidden_size=model.width,
        num_hidden_layers=model.depth,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_dim,
        hidden_act=ACTIVATIONS[model.gelu],
        layer_norm_eps=model.ln_eps,
        image_size=side[0],
        patch_size=side[1],
        num_channels=3,
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pooler_output_size=model.pre_logits or model.width,
        pooler_act="tanh",
        id2label={str(i): name for i, name in enumerate(names)},
        label2id={name: i for i, name in enumerate(names)},
    )
    height, width = model.image_size
    processor = dict(
        image_processor_type=f"{'DeiT' if model.crop else name}ImageProcessor",  # ViT's does not crop
        do_resize=True,
        size=dict(height=height, width=width),
        resample=next(
            (number for number, how in RESAMPLING.items() if how == model.interpolation), 2
        ),
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        do_center_crop=False,  # DeiT's would, to 224
        image_mean=list(model.mean),
        image_std=list(model.std),
    )
    if model.crop:
        processor |= dict(
            size=dict(height=round(height / model.crop), width=round(width / model.crop)),
            do_center_crop=True,
            crop_size=dict(height=height, width=width),
        )
    return arrays, dict(config=config, preprocessor_config=processor)
