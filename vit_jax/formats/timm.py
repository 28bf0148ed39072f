"""The .safetensors of timm: ViT with class token, mean or attention pooling, registers, and distilled DeiT."""

import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.formats import torch_layout
from vit_jax.formats.torch_layout import Row, block_rows, blocks, fused, layer, norm
from vit_jax.formats.weights import BLOCK, POSEMB, Weights, held_image_size, infer_fields, number_of_heads
from vit_jax.models import posemb

PATCHES = "patch_embed.proj.weight"
POOLS = {"token": "tok", "avg": "gap", "map": "map", "": "unpooled"}
GELUS = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh"}
# Entries of timm's own table of models whose GELU is not the exact one; their config.json does not say so.
TANH = re.compile(
    r"vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip.*|giantopt_.*siglip.*)"
)
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"


def rows(depth: int) -> list[Row]:
    """The name table."""
    qkv = fused("attn.qkv.", (f"{ATTENTION}/{name}" for name in ("query", "key", "value")))
    block = block_rows("norm1", qkv, "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    return [
        Row("cls_token", ("cls",)),
        Row("dist_token", ("dist",)),
        Row("reg_token", ("reg",)),
        Row("pos_embed", (POSEMB,)),
        *layer("patch_embed.proj", "embedding", "conv"),
        *blocks(block, "blocks.{}.", depth),
        *norm("norm", "Transformer/encoder_norm"),
        *norm("fc_norm", "fc_norm"),
        Row("attn_pool.latent", ("MAPHead_0/probe",)),
        *layer("attn_pool.q", f"{POOLING}/query", "heads"),
        *fused("attn_pool.kv.", (f"{POOLING}/key", f"{POOLING}/value")),
        *layer("attn_pool.proj", f"{POOLING}/out", "out"),
        *norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
        *layer("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0", "linear"),
        *layer("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1", "linear"),
        *layer("head", "head", "linear"),
        *layer("head_dist", "head_dist", "linear"),
    ]


def count_blocks(held: dict, pattern: str) -> int:
    return 1 + max((int(match[1]) for name in held if (match := re.match(pattern, name))), default=-1)


def choice(value, table: dict, what: str, path):
    if value not in table:
        known = ", ".join(map(repr, table))
        raise UserError(f"{path}: config.json has {what}={value!r}, which is not known here: it knows {known}")
    return table[value]


def preprocessing(config: dict, path) -> dict:
    """Fields of `model.preprocess`, from a pretrained_cfg."""
    given = config.get("pretrained_cfg", {})
    fields = {name: tuple(given[name]) for name in ("mean", "std") if name in given}
    if "interpolation" in given:
        fields["interpolation"] = str(given["interpolation"])
    if "crop_pct" in given:
        fields["crop"] = float(given["crop_pct"])
    return fields


def read(held: dict, config: dict, path, grid=None, image_size=None, num_heads=None) -> Weights:
    """Weights from the arrays and the config.json ({}: none) of timm.

    Raises:
      UserError: they are of a model that is not known here.
    """
    args, given = config.get("model_args", {}), config.get("pretrained_cfg", {})
    depth = count_blocks(held, r"blocks\.(\d+)\.")
    width = held[PATCHES].shape[0] if held[PATCHES].ndim else 0
    fc1 = held.get("blocks.0.mlp.fc1.bias", np.zeros(0))
    heads = num_heads or args.get("num_heads") or number_of_heads(width, depth, fc1.size, path)
    params, names = torch_layout.read(held, rows(depth), heads, path)
    fields = infer_fields(params, path)
    pool = config.get("global_pool", args.get("global_pool"))
    if pool is not None:
        fields["pool"] = choice(pool, POOLS, "global_pool", path)
    elif "fc_norm/scale" in params:
        fields["pool"] = "gap"
    elif "MAPHead_0/probe" in params:
        fields["pool"] = "map"
    tanh = bool(TANH.fullmatch(str(config.get("architecture", ""))))
    fields |= dict(
        class_token="cls" in params and fields["pool"] != "tok",
        distilled="dist" in params,
        registers=params["reg"].shape[1] if "reg" in params else 0,
        fc_norm="fc_norm/scale" in params,
        gelu=choice(args["act_layer"], GELUS, "act_layer", path)
        if args.get("act_layer")
        else "tanh"
        if tanh
        else "erf",
        **preprocessing(config, path),
    )
    for name in ("pool_include_prefix", "qk_norm", "pre_norm", "init_values"):
        if args.get(name):
            raise UserError(f"{path}: config.json has model_args.{name}={args[name]!r}, which is not known here")
    if POSEMB in params:
        add_prefix_rows(params, bool(args.get("no_embed_class")), fields)
    elif args.get("pos_embed") == "none":
        fields["posemb"] = "none"
    size = args.get("img_size") or (given["input_size"][1:] if "input_size" in given else None)
    fields["image_size"] = held_image_size(params, fields, path, grid, image_size, size)
    labels = given.get("label_names") or config.get("label_names") or ()
    labels = tuple(map(str, labels)) if len(labels) == fields["num_classes"] else ()
    return Weights(params, fields, labels, format="timm", file_names=names)


def add_prefix_rows(params: dict, no_embed_class: bool, fields: dict) -> None:
    """Gives the prefix tokens positions, zero, where the model was built with positions for patches only."""
    prefix = sum(params[name].shape[1] for name in ("cls", "dist", "reg") if name in params)
    rows, side = params[POSEMB].shape[1], int(params[POSEMB].shape[1] ** 0.5)
    patches_only = no_embed_class or (fields["registers"] and side * side == rows)
    if prefix and patches_only:
        zeros = np.zeros((1, prefix, fields["width"]), np.float32)
        params[POSEMB] = np.concatenate([zeros, params[POSEMB]], axis=1)


def obstacles(weights: Weights, model) -> list[str]:
    """What of a model timm's VisionTransformer has no place for."""
    if weights.fields["architecture"] != "vit":
        return [f"the architecture {weights.fields['architecture']}"]
    found = [] if model.stem_units is None else ["a ResNet stem"]
    found += [f"pool={model.pool}"] if model.pool not in ("tok", "gap", "map", "unpooled") else []
    found += [f"posemb={model.posemb}"] if model.posemb in ("learn2d", "relative") else []
    found += [f"posemb_at={model.posemb_at}"] if model.posemb_at != "stem" else []
    found += ["pre_logits"] if model.pre_logits else []
    found += ["register tokens beside a distillation token"] if model.registers and model.distilled else []
    return found


def fixed_positions(model) -> np.ndarray:
    """Positions that a model computes, as the rows of a learned embedding: [1, length, embed]."""
    rows = np.zeros((1, model.num_prefix + model.grid[0] * model.grid[1], model.width), np.float32)
    if model.posemb == "sincos2d":
        rows[:, model.num_prefix :] = posemb.sincos2d(model.grid, model.width, np.float32)
    return rows


def write(weights: Weights, model) -> tuple[dict, dict]:
    """(arrays, configs): a folder that timm.create_model("local-dir:FOLDER", pretrained=True) opens."""
    params = dict(weights.params)
    if POSEMB not in params:
        params[POSEMB] = fixed_positions(model)
    pool = {ours: theirs for theirs, ours in POOLS.items()}[model.pool]
    args = dict(
        img_size=model.image_size,
        patch_size=model.patch_size if model.patch_size[0] != model.patch_size[1] else model.patch_size[0],
        embed_dim=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_ratio=(model.mlp_dim + 0.5) / model.width,  # timm rounds down
        act_layer={"erf": "gelu", "tanh": "gelu_tanh"}[model.gelu],
    )
    if not model.distilled:
        has_cls = "cls" in params
        args |= dict(global_pool=pool, class_token=has_cls, reg_tokens=model.registers, fc_norm=model.fc_norm)
    preprocess = dict(
        input_size=[3, *model.image_size],
        mean=model.mean,
        std=model.std,
        interpolation=model.interpolation,
        crop_pct=model.crop or 1.0,
        num_classes=model.num_classes,
        first_conv="patch_embed.proj",
        classifier=["head", "head_dist"] if model.distilled else "head",
    )
    config = dict(
        architecture="deit_base_distilled_patch16_224" if model.distilled else "vit_base_patch16_224",
        num_classes=model.num_classes,
        num_features=model.width,
        global_pool=pool,
        model_args=args,
        pretrained_cfg=preprocess,
    )
    if weights.class_names:
        config["label_names"] = list(weights.class_names)
    return torch_layout.write(params, rows(model.depth)), dict(config=config)
