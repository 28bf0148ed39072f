"""The .safetensors of timm: ViT with class token, mean or attention pooling, registers, and
distilled DeiT.
"""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.weights.formats import torch_layout
from vit_jax.weights.formats.infer import held_image_size, infer_fields, number_of_heads
from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, fused, layer, norm
from vit_jax.weights.formats.weights import BLOCK, POSEMB, Weights

PATCHES = "patch_embed.proj.weight"
POOLS = {"token": "tok", "avg": "gap", "map": "map", "": "unpooled"}
GELUS = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh"}
# What timm's table of models says of an entry, and a config.json, which holds only what differs
# from it, does not.
HEADS = dict(
    tiny=3,
    xsmall=4,
    wee=4,
    little=5,
    small=6,
    medium=8,
    mediumd=8,
    betwixt=10,
    base=12,
    so150m2=13,
    so150m=14,
)
HEADS |= dict(large=16, so400m=16, huge=16, giant=16, giantopt=16, gigantic=16)
TANH = r"vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512|(so400m_patch16|giantopt_patch\d+)_siglip.*)"
ENTRIES = [
    (TANH, dict(act_layer="gelu_tanh")),
    (r"vit_base_patch16_gap_224", dict(num_heads=16)),
    (r"vit_base_patch16_224_miil", dict(qkv_bias=False)),
    (r"vit_.*_clip_.*", dict(pre_norm=True)),
    (r"deit3_.*", dict(init_values=1e-6, no_embed_class=True)),
    (r"test_vit\d?", dict(num_heads=2)),
    (r"test_vit3", dict(num_heads=3, pool_include_prefix=True)),
]
UNKNOWN = ("qk_norm", "pre_norm", "pool_include_prefix", "scale_attn_norm", "scale_mlp_norm")
NORMS = (None, "layernorm", "layernormfp32")
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"


def rows(depth: int) -> list[Row]:
    """The name table."""
    qkv = fused("attn.qkv.", (f"{ATTENTION}/{name}" for name in ("query", "key", "value")))
    block = block_rows("norm1", qkv, "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    block += [
        Row(f"ls{i}.gamma", (f"{BLOCK}/LayerScale_{part}/gamma",)) for i, part in ((1, 1), (2, 3))
    ]
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


def preprocessing(given: dict) -> dict:
    """Fields of `model.preprocess`, from a pretrained_cfg."""
    fields = {name: tuple(given[name]) for name in ("mean", "std") if name in given}
    if "interpolation" in given:
        fields["interpolation"] = str(given["interpolation"])
    if "crop_pct" in given:
        whole = given.get("crop_mode") == "squash" and given["crop_pct"] == 1
        fields["crop"] = None if whole else float(given["crop_pct"])
    return fields


def entry_args(architecture: str) -> dict:
    """Arguments by which timm builds an entry of its table, as far as arrays do not show them."""
    size = re.match(r"(?:vit|deit3?|flexivit|eva)_([a-z0-9]+)", architecture)
    args = dict(num_heads=HEADS[size[1]]) if size and size[1] in HEADS else {}
    for pattern, more in ENTRIES:
        if re.fullmatch(pattern, architecture):
            args |= more
    return args


def check_known(held: dict, args: dict, config: dict, path) -> None:
    """Raises UserError where timm computes what no field of the model says, even if every array
    fits.
    """
    found = [f"{name}={args[name]!r}" for name in UNKNOWN if args.get(name)]
    found += [f"norm_layer={args['norm_layer']!r}"] if args.get("norm_layer") not in NORMS else []
    if held[PATCHES].ndim == 4 and held[PATCHES].shape[1] != 3:
        found += [f"images of {held[PATCHES].shape[1]} channels"]
    if "dist_token" in held:
        found += ["registers beside a distillation token"] * ("reg_token" in held)
        found += ["fc_norm in a distilled model"] * ("fc_norm.weight" in held)
    if found:
        name = config.get("architecture", "without a name")
        raise UserError(
            f"{path} is timm's model {name} with {', '.join(found)}, which is not known here: "
            "choose another"
        )


def read(held: dict, config: dict, path, grid=None, image_size=None, num_heads=None) -> Weights:
    """Weights from the arrays and the config.json ({}: none) of timm.

    Raises:
      UserError: they are of a model that is not known here.
    """
    given = config.get("pretrained_cfg", config)  # old files have one object for everything
    args = entry_args(str(config.get("architecture", ""))) | config.get("model_args", {})
    check_known(held, args, config, path)
    depth = torch_layout.count_blocks(held, r"blocks\.(\d+)\.")
    width = held[PATCHES].shape[0] if held[PATCHES].ndim else 0
    fc1 = held.get("blocks.0.mlp.fc1.bias", np.zeros(0))
    heads = num_heads or args.get("num_heads") or number_of_heads(width, depth, fc1.size, path)
    if args.get("qkv_bias") is False:
        held = torch_layout.with_zero_biases(held, rows(depth))
    params, names = torch_layout.read(held, rows(depth), heads, path)
    fields = infer_fields(params, path, names)
    has_fc_norm = any(name.startswith("fc_norm/") for name in params)
    pool = args.get("global_pool", config.get("global_pool", given.get("global_pool")))
    if pool is not None:
        fields["pool"] = torch_layout.choice(pool, POOLS, "global_pool", path)
    elif has_fc_norm:
        fields["pool"] = "gap"
    elif "MAPHead_0/probe" in params:
        fields["pool"] = "map"
    fields |= dict(
        class_token="cls" in params and fields["pool"] != "tok",
        distilled=any(name in params for name in ("dist", "head_dist/kernel", "head_dist/bias")),
        registers=params["reg"].shape[1] if "reg" in params else 0,
        fc_norm=has_fc_norm,
        layer_scale=layer_scale(params, args),
        gelu=torch_layout.choice(args.get("act_layer") or "gelu", GELUS, "act_layer", path),
        **preprocessing(given),
    )
    size = args.get("img_size") or (given["input_size"][1:] if "input_size" in given else None)
    if POSEMB in params:
        hints = [grid and create.pair(grid), size, image_size]
        add_prefix_rows(params, args.get("no_embed_class"), fields, hints, "architecture" in config)
    else:
        fields["posemb"] = "none" if args.get("pos_embed") in ("none", "") else "learn"
    fields["image_size"] = held_image_size(params, fields, path, grid, image_size, size, names)
    check_padding(args, fields, path)
    torch_layout.check_patch_size(args, fields, names["embedding/kernel"], path)
    labels = class_names(
        given.get("label_names") or config.get("label_names") or (), fields["num_classes"]
    )
    return Weights(params, fields, labels, format="timm", file_names=names)


def layer_scale(params: dict, args: dict) -> float:
    """The initial LayerScale; where only the arrays show that there is one, timm's usual."""
    held = f"{BLOCK}/LayerScale_1/gamma" in params
    return float(args.get("init_values") or (1e-5 if held else 0.0))


def check_padding(args: dict, fields: dict, path) -> None:
    """Raises UserError where timm pads an image whose border is dropped here."""
    sides = zip(fields["image_size"], fields["patch_size"], strict=True)
    if args.get("dynamic_img_pad") and any(side % patch for side, patch in sides):
        raise UserError(
            f"{path} pads images of {fields['image_size']} to patches of {fields['patch_size']} "
            "(dynamic_img_pad), which is not known here: give an image_size= that the patches "
            "divide"
        )


def class_names(given, num_classes: int) -> tuple[str, ...]:
    """Names by number, from a list or from {number: name}; () where some have none."""
    if isinstance(given, dict):
        given = {int(number): name for number, name in given.items()}
        given = (
            [given[i] for i in sorted(given)] if sorted(given) == list(range(len(given))) else []
        )
    if not isinstance(given, list | tuple):
        raise ValueError(f"label_names is {given!r}, no list")
    return tuple(map(str, given)) if len(given) == num_classes else ()


def add_prefix_rows(
    params: dict, no_embed_class: bool | None, fields: dict, hints: list, is_named: bool
) -> None:
    """Gives the prefix tokens positions, zero, where the model was built with positions for patches
    only.

    Args:
      params: changed in place.
      no_embed_class: what config.json says; None: nothing, as an entry of timm's table may say it.
      fields: of the model.
      is_named: config.json names an entry of timm's table.
      hints: grid as the user gives it, then image sizes, each None where unknown: whichever fits
        first decides.
    """
    prefix = sum(params[name].shape[1] for name in ("cls", "dist", "reg") if name in params)
    held = params[POSEMB].shape[1]
    (grid, *sizes), patch = hints, fields["patch_size"]
    tokens = [
        math.prod(side // p for side, p in zip(create.pair(size), patch, strict=True))
        for size in sizes
        if size
    ]
    tokens = [math.prod(grid), *tokens] if grid else tokens
    # Without any that fits: a square of patches, where only one way of counting gives one.
    square = [
        count for count in (held - prefix, held) if count > 0 and math.isqrt(count) ** 2 == count
    ]
    square = (
        square if is_named or fields["registers"] else []
    )  # timm's default: positions for all tokens
    fitting = [count for count in (*tokens, *square) if count in (held, held - prefix)]
    if no_embed_class is None:
        no_embed_class = bool(fitting) and fitting[0] == held
    if prefix and no_embed_class:
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
    found += (
        ["register tokens beside a distillation token"]
        if model.registers and model.distilled
        else []
    )
    found += (
        ["a final LayerNorm behind the pooling of two tokens"]
        if model.fc_norm and model.distilled
        else []
    )
    return found


def write(weights: Weights, model) -> tuple[dict, dict]:
    """(arrays, configs): a folder that timm.create_model("local-dir:FOLDER", pretrained=True)
    opens.
    """
    params = dict(weights.params)
    if POSEMB not in params:
        params[POSEMB] = torch_layout.fixed_positions(model)
    pool = {ours: theirs for theirs, ours in POOLS.items()}[model.pool]
    args = dict(
        img_size=model.image_size,
        patch_size=model.patch_size
        if model.patch_size[0] != model.patch_size[1]
        else model.patch_size[0],
        embed_dim=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_ratio=(model.mlp_dim + 0.5) / model.width,  # timm rounds down
        act_layer={"erf": "gelu", "tanh": "gelu_tanh"}[model.gelu],
    )
    if model.layer_scale:
        args["init_values"] = model.layer_scale
    if not model.distilled:
        has_cls = "cls" in params
        args |= dict(
            global_pool=pool, class_token=has_cls, reg_tokens=model.registers, fc_norm=model.fc_norm
        )
    preprocess = dict(
        input_size=[3, *model.image_size],
        mean=model.mean,
        std=model.std,
        interpolation=model.interpolation,
        crop_pct=model.crop or 1.0,
        crop_mode="center" if model.crop else "squash",
        num_classes=model.num_classes,
        first_conv="patch_embed.proj",
        classifier=["head", "head_dist"] if model.distilled else "head",
    )
    config = dict(
        architecture="deit_base_distilled_patch16_224"
        if model.distilled
        else "vit_base_patch16_224",
        num_classes=model.num_classes,
        num_features=model.width,
        global_pool=pool,
        model_args=args,
        pretrained_cfg=preprocess,
    )
    if weights.class_names:
        config["label_names"] = list(weights.class_names)
    return torch_layout.write(params, rows(model.depth)), dict(config=config)
