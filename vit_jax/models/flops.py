"""How much work a model is: FLOPs by architecture."""

import math


def conv_flops(out_h: int, out_w: int, side: int, c_in: int, c_out: int) -> int:
    return 2 * out_h * out_w * side * side * c_in * c_out


def stem_flops(image_size: tuple[int, int], units: tuple[int, ...], width: int) -> tuple[int, int]:
    """Forward FLOPs of a ResNet (of a hybrid's stem, or BiT's) for one image, and the channels of
    its output.
    """
    h, w = (math.ceil(side / 2) for side in image_size)
    flops, c_in = conv_flops(h, w, 7, 3, width), width
    h, w = math.ceil(h / 2), math.ceil(w / 2)
    for stage, count in enumerate(units):
        features = width * 2**stage
        for unit in range(count):
            stride = 2 if unit == 0 and stage > 0 else 1
            flops += conv_flops(h, w, 1, c_in, features)
            if c_in != 4 * features or stride != 1:
                flops += conv_flops(
                    math.ceil(h / stride), math.ceil(w / stride), 1, c_in, 4 * features
                )
            h, w = math.ceil(h / stride), math.ceil(w / stride)
            flops += conv_flops(h, w, 3, features, features) + conv_flops(
                h, w, 1, features, 4 * features
            )
            c_in = 4 * features
    return flops, c_in


def vit_flops(model) -> int:
    d, m, tokens = model.width, model.mlp_dim, math.prod(model.grid)
    flops, channels = (
        (0, 3)
        if model.stem_units is None
        else stem_flops(model.image_size, model.stem_units, model.stem_width)
    )
    flops += 2 * tokens * math.prod(model.patch_size) * channels * d
    length = tokens + model.num_prefix
    products = (
        3 if model.posemb == "relative" else 2
    )  # by key and by value; relative: by the distance, too
    flops += model.depth * (
        2 * length * (4 * d * d + 2 * d * m) + 2 * products * length * length * d
    )
    heads = length if "unpooled" in model.pool else 2 if model.distilled else 1
    if model.pool == "map":
        flops += 2 * (2 * tokens + 2) * d * d + 4 * tokens * d + 4 * d * m
    flops += 2 * heads * (model.pre_logits * d + model.num_classes * (model.pre_logits or d))
    return flops


def mixer_flops(model) -> int:
    d, tokens = model.width, math.prod(model.grid)
    flops = 2 * tokens * math.prod(model.patch_size) * 3 * d
    flops += model.depth * 4 * tokens * d * (model.tokens_mlp_dim + model.channels_mlp_dim)
    return flops + 2 * d * model.num_classes


def resnet_flops(model) -> int:
    flops, channels = stem_flops(model.image_size, model.units, model.stem_width)
    return flops + 2 * channels * model.num_classes


FLOPS = {"VisionTransformer": vit_flops, "MlpMixer": mixer_flops, "ResNet": resnet_flops}


def model_flops(model) -> int:
    """Forward FLOPs of one image: 2 per multiply-add of every matrix product and convolution,
    attention included.
    """
    return FLOPS[type(model).__name__](model)
