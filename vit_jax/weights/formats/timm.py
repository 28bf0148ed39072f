"""The .safetensors of timm: ViT with class token, mean or attention pooling, registers, and
distilled DeiT.
"""

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import create, preparation
from vit_jax.models.classifier import Classifier
from vit_jax.models.preparation import expected
from vit_jax.weights.formats import torch_layout
from vit_jax.weights.formats.infer import infer_fields, number_of_heads, saved_image_size
from vit_jax.weights.formats.timm_entries import entry_args
from vit_jax.weights.formats.torch_layout import Row, block_rows, blocks, fused, layer, norm
from vit_jax.weights.formats.weights import BLOCK, POSEMB, Weights

PATCHES = "patch_embed.proj.weight"
POOLS = {"token": "tok", "avg": "gap", "map": "map", "": "unpooled"}
GELUS = {"gelu": "erf", "gelu_erf": "erf", "gelu_tanh": "tanh"}
GATES = dict.fromkeys(("silu", "swish"), "erf")  # of SwiGLU, which has no GELU
CROP_MODES = {"center": "shorter", "border": "longer", "squash": "squash"}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
UNSUPPORTED = ("qk_norm", "pre_norm", "pool_include_prefix", "scale_attn_norm", "scale_mlp_norm")
NORMS = (None, "layernorm", "layernormfp32")
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"


def rows(depth: int, swiglu: bool) -> list[Row]:
    """The name table."""
    qkv = fused("attn.qkv.", (f"{ATTENTION}/{name}" for name in ("query", "key", "value")))
    block = block_rows("norm1", qkv, "attn.proj", "norm2", "mlp.fc1", "mlp.fc2", swiglu)
    block.append(Row("ls1.gamma", (f"{BLOCK}/LayerScale_1/gamma",)))
    block.append(Row("ls2.gamma", (f"{BLOCK}/LayerScale_3/gamma",)))
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


def preparation_fields(config: dict) -> dict:
    """Fields of a model that say how images are prepared, from a pretrained_cfg.

    The defaults are those of `timm.data.resolve_data_config`; but if there is no config at all,
    pixels are [-1, 1], as for most ViTs of timm.
    """
    given = {key: value for key, value in config.items() if value is not None}
    normalization = dict(
        mean=tuple(given.get("mean", IMAGENET_MEAN)),
        std=tuple(given.get("std", IMAGENET_STD)),
    )
    crop = float(given.get("crop_pct", 0.875))
    resize = CROP_MODES.get(given.get("crop_mode"), "shorter")
    return dict(
        pixels_of="timm",
        interpolation=str(given.get("interpolation", "bicubic")),
        crop=None if resize == "squash" and crop == 1 else crop,
        resize=resize,
        **(normalization if config else {}),
    )


def crop_pct(model: Classifier) -> float | None:
    """The crop_pct with which timm resizes an image to the same target; None: there is none."""
    how = expected(model)
    exact = how.size[0] / how.target[0]
    for share in (model.crop or 1.0, exact, math.nextafter(exact, 0)):
        if preparation.target(how.size, share, "timm") == how.target:
            return share
    return None


def check_supported(arrays: dict, args: dict, config: dict, path) -> None:
    """Raises UserError if timm computes something that no field of our model can express."""
    features = [f"{name}={args[name]!r}" for name in UNSUPPORTED if args.get(name)]
    if args.get("norm_layer") not in NORMS:
        features.append(f"norm_layer={args['norm_layer']!r}")
    if arrays[PATCHES].ndim == 4 and arrays[PATCHES].shape[1] != 3:
        features.append(f"images of {arrays[PATCHES].shape[1]} channels")
    if "dist_token" in arrays and "reg_token" in arrays:
        features.append("registers with a distillation token")
    if "dist_token" in arrays and "fc_norm.weight" in arrays:
        features.append("fc_norm in a distilled model")
    if features:
        name = config.get("architecture", "without a name")
        raise UserError(
            f"{path} is timm's model {name} with {', '.join(features)}, which is not supported: "
            "choose another"
        )


def has_swiglu(arrays: dict) -> bool:
    """Whether the MLP's first layer has twice the outputs that its second one takes (timm's
    SwiGLUPacked).
    """
    fc1 = arrays.get("blocks.0.mlp.fc1.bias", np.zeros(0))
    fc2 = arrays.get("blocks.0.mlp.fc2.weight", np.zeros(0))
    return fc2.ndim == 2 and fc1.size == 2 * fc2.shape[1] > 0


def read(arrays: dict, config: dict, path, grid=None, image_size=None, num_heads=None) -> Weights:
    """Weights from the arrays and the config.json ({}: none) of timm."""
    pretrained = config.get("pretrained_cfg", config)  # old files have one object for everything
    args = entry_args(str(config.get("architecture", ""))) | config.get("model_args", {})
    check_supported(arrays, args, config, path)
    depth = torch_layout.count_blocks(arrays, r"blocks\.(\d+)\.")
    width = arrays[PATCHES].shape[0] if arrays[PATCHES].ndim else 0
    swiglu = has_swiglu(arrays)
    mlp_dim = arrays.get("blocks.0.mlp.fc1.bias", np.zeros(0)).size // (2 if swiglu else 1)
    heads = num_heads or args.get("num_heads") or number_of_heads(width, depth, mlp_dim, path)
    table = rows(depth, swiglu)
    if args.get("qkv_bias") is False:
        arrays = torch_layout.with_zero_biases(arrays, table)
    params, names = torch_layout.read(arrays, table, heads, path)
    fields = infer_fields(params, path, names)
    global_pool = config.get("global_pool", pretrained.get("global_pool"))
    fields |= token_fields(params, fields["pool"], args.get("global_pool", global_pool), path)
    activations = GATES if swiglu else GELUS
    activation = args.get("act_layer") or next(iter(activations))
    fields |= dict(
        registers=params["reg"].shape[1] if "reg" in params else args.get("reg_tokens", 0),
        layer_scale=layer_scale(params, args),
        gelu=torch_layout.choice(activation, activations, "act_layer", path),
        **preparation_fields(pretrained),
    )
    size = args.get("img_size")
    if not size and "input_size" in pretrained:
        size = pretrained["input_size"][1:]
    if POSEMB in params:
        sizes = [size, image_size]
        has_entry = "architecture" in config
        add_prefix_rows(params, args.get("no_embed_class"), fields, grid, sizes, has_entry)
    elif args.get("pos_embed") in ("none", ""):
        fields["posemb"] = "none"
    else:
        fields["posemb"] = "learn"
    fields["image_size"] = saved_image_size(params, fields, path, grid, image_size, size, names)
    check_padding(args, fields, path)
    torch_layout.check_patch_size(args, fields, names["embedding/kernel"], path)
    labels = pretrained.get("label_names") or config.get("label_names") or ()
    labels = class_names(labels, fields["num_classes"])
    return Weights(params, fields, labels, format="timm", file_names=names)


def token_fields(params: dict, pool: str, global_pool: str | None, path) -> dict:
    """Fields of class token, distillation token and pooling; `pool`: as inferred from the class
    token alone.
    """
    has_fc_norm = any(name.startswith("fc_norm/") for name in params)
    if global_pool is not None:
        pool = torch_layout.choice(global_pool, POOLS, "global_pool", path)
    elif has_fc_norm:
        pool = "gap"
    elif "MAPHead_0/probe" in params:
        pool = "map"
    return dict(
        pool=pool,
        class_token="cls" in params and pool != "tok",
        distilled=any(name in params for name in ("dist", "head_dist/kernel", "head_dist/bias")),
        fc_norm=has_fc_norm,
    )


def layer_scale(params: dict, args: dict) -> float:
    """The initial LayerScale; timm's usual one if only the arrays show that there is one."""
    initial = args.get("init_values")
    if not initial and any("/LayerScale_" in name for name in params):
        initial = 1e-5
    return float(initial or 0.0)


def check_padding(args: dict, fields: dict, path) -> None:
    """Raises UserError if timm pads images whose border is dropped by our models."""
    sides = zip(fields["image_size"], fields["patch_size"], strict=True)
    if args.get("dynamic_img_pad") and any(side % patch for side, patch in sides):
        raise UserError(
            f"{path} pads images of {fields['image_size']} to patches of {fields['patch_size']} "
            "(dynamic_img_pad), which is not supported: give an image_size= that is a multiple of "
            "the patch size"
        )


def class_names(labels, num_classes: int) -> tuple[str, ...]:
    """Names by number, from a list or from {number: name}; () if some are missing."""
    if isinstance(labels, dict):
        by_number = {int(number): name for number, name in labels.items()}
        if sorted(by_number) != list(range(len(by_number))):
            return ()
        labels = [by_number[i] for i in sorted(by_number)]
    if not isinstance(labels, list | tuple):
        raise ValueError(f"label_names is {labels!r}, not a list")
    return tuple(map(str, labels)) if len(labels) == num_classes else ()


def add_prefix_rows(
    params: dict, no_embed_class: bool | None, fields: dict, grid, sizes: list, has_entry: bool
) -> None:
    """Adds position rows, zero, for the prefix tokens if the model has positions for patches only.

    Args:
      params: changed in place.
      no_embed_class: from config.json; None: it does not say, but the entry in timm's table may.
      fields: of the model.
      grid: (h, w) of the patch tokens from the user, or None.
      sizes: image sizes, each None if unknown. The first of grid and sizes that fits decides.
      has_entry: whether config.json names an entry of timm's table.
    """
    has_cls = "cls" in params or fields["pool"] == "tok"
    prefix = int(has_cls) + int(fields["distilled"]) + fields["registers"]
    length = params[POSEMB].shape[1]
    counts = []
    if grid:
        counts.append(math.prod(create.pair(grid)))
    for size in sizes:
        if size:
            height, width = create.pair(size)
            patch_height, patch_width = fields["patch_size"]
            counts.append(height // patch_height * (width // patch_width))
    # If none fits, the number of patches may be square. Without an entry and registers, timm's
    # default is assumed: positions for all tokens.
    if has_entry or fields["registers"]:
        for count in (length - prefix, length):
            if count > 0 and math.isqrt(count) ** 2 == count:
                counts.append(count)
    fitting = [count for count in counts if count in (length, length - prefix)]
    if no_embed_class is None:
        no_embed_class = bool(fitting) and fitting[0] == length
    if prefix and no_embed_class:
        zeros = np.zeros((1, prefix, fields["width"]), np.float32)
        params[POSEMB] = np.concatenate([zeros, params[POSEMB]], axis=1)


def obstacles(weights: Weights, model) -> list[str]:
    """Features of a model that timm's VisionTransformer can't represent."""
    if weights.fields["architecture"] != "vit":
        return [f"the architecture {weights.fields['architecture']}"]
    distilled = model.distilled
    how = expected(model)
    is_square = how.target[0] == how.target[1]
    by_shorter_side = how.resize == "shorter" and how.pixels_of == "transformers"
    features = {
        "a ResNet stem": model.stem_units is not None,
        f"pool={model.pool}": model.pool not in POOLS.values(),
        f"posemb={model.posemb}": model.posemb in ("learn2d", "relative"),
        f"posemb_at={model.posemb_at}": model.posemb_at != "stem",
        "pre_logits": model.pre_logits,
        "register tokens with a distillation token": model.registers and distilled,
        "a final LayerNorm after the pooling of two tokens": model.fc_norm and distilled,
        "SwiGLU with a distillation token": model.mlp == "swiglu" and distilled,
        "a crop of images that are not square": by_shorter_side and not is_square,
        f"a crop of {how.size} from {how.target}": not (
            crop_pct(model) and how.crops_as_in("timm")
        ),
    }
    return [name for name, present in features.items() if present]


def write(weights: Weights, model) -> tuple[dict, dict]:
    """(arrays, configs): a folder that timm.create_model("local-dir:FOLDER", pretrained=True)
    opens.
    """
    params = dict(weights.params)
    if POSEMB not in params:
        params[POSEMB] = torch_layout.fixed_positions(model)
    pool = {ours: theirs for theirs, ours in POOLS.items()}[model.pool]
    swiglu = model.mlp == "swiglu"
    hidden = 2 * model.mlp_dim if swiglu else model.mlp_dim
    args = dict(
        img_size=model.image_size,
        patch_size=torch_layout.one_side(model.patch_size),
        embed_dim=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_ratio=(hidden + 0.5) / model.width,  # timm rounds down
        act_layer="silu" if swiglu else {"erf": "gelu", "tanh": "gelu_tanh"}[model.gelu],
        init_values=model.layer_scale,
    )
    if not model.distilled:
        args |= dict(
            global_pool=pool,
            class_token="cls" in params,
            reg_tokens=model.registers,
            fc_norm=model.fc_norm,
        )
    how = expected(model)
    modes = {ours: theirs for theirs, ours in CROP_MODES.items()}
    preprocess = dict(
        input_size=[3, *model.image_size],
        mean=model.mean,
        std=model.std,
        interpolation=model.interpolation,
        crop_pct=crop_pct(model),
        crop_mode=modes[how.resize],
        num_classes=model.num_classes,
        first_conv="patch_embed.proj",
        classifier=["head", "head_dist"] if model.distilled else "head",
    )
    architecture = "vit_base_patch16_224"
    if model.distilled:
        architecture = "deit_base_distilled_patch16_224"
    if swiglu:  # no argument in JSON chooses it, only timm's table
        architecture = "vit_giant_patch14_dinov2"
    config = dict(
        architecture=architecture,
        num_classes=model.num_classes,
        num_features=model.width,
        global_pool=pool,
        model_args=args,
        pretrained_cfg=preprocess,
    )
    if weights.class_names:
        config["label_names"] = list(weights.class_names)
    return torch_layout.write(params, rows(model.depth, swiglu)), dict(config=config)
