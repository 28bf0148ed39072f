"""BiT weights: published files have the names of TensorFlow's scopes, big_vision's files have ours.

    resnet/root_block/standardized_conv2d/kernel root_block/conv_root/kernel
    resnet/block1/unit01/{a,b,c}/standardized_conv2d/kernel block1/unit01/{conv1,conv2,conv3}/kernel
    resnet/block1/unit01/{a,b,c}/group_norm/{gamma,beta} block1/unit01/{gn1,gn2,gn3}/{scale,bias}
    resnet/block1/unit01/a/proj/standardized_conv2d/kernel block1/unit01/conv_proj/kernel
    resnet/group_norm/{gamma,beta} norm-pre-head/{scale,bias} resnet/head/conv2d/{kernel,bias}
    head/{kernel,bias}

The published head is a 1x1 convolution [1, 1, width, classes], ours a matrix [width, classes].
GroupNorm's parameters are [C] in published files, [1, 1, 1, C] in big_vision's.
"""

import re
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats.infer import numbers

LEAVES = {"gamma": "scale", "beta": "bias"}
LAYERS = {"a": "1", "b": "2", "c": "3"}
UNIT = re.compile(r"(block\d+/unit\d+)/(.+)")
OURS = re.compile(
    r"root_block/conv_root/kernel|(block\d+/unit\d+/(conv[123]|conv_proj)/kernel)"
    r"|(block\d+/unit\d+/gn[123]|norm-pre-head)/(scale|bias)|head/(kernel|bias)"
)


def is_bit(names: Iterable[str]) -> bool:
    """Whether names (or a dict of them) are those of a BiT ResNet, published or ours."""
    return any(re.match(r"resnet/|(params/)?root_block/conv_root/", name) for name in names)


def our_name(published: str) -> str | None:
    """Our name for a published name or one of ours (big_vision's, below params/); None if it is not
    of a BiT.
    """
    name = published.removeprefix("params/")
    if OURS.fullmatch(name):
        return name
    # Some published files number the convolutions: TensorFlow made their names unique.
    name = re.sub(r"/standardized_conv2d(_\d+)?/", "/conv/", name)
    fixed = {
        "resnet/root_block/conv/kernel": "root_block/conv_root/kernel",
        "resnet/group_norm/gamma": "norm-pre-head/scale",
        "resnet/group_norm/beta": "norm-pre-head/bias",
        "resnet/head/conv2d/kernel": "head/kernel",
        "resnet/head/conv2d/bias": "head/bias",
    }
    if name in fixed:
        return fixed[name]
    match = UNIT.fullmatch(name.removeprefix("resnet/"))
    if match is None or not name.startswith("resnet/"):
        return None
    unit, rest = match.groups()
    if rest == "a/proj/conv/kernel":
        return f"{unit}/conv_proj/kernel"
    conv = re.fullmatch(r"([abc])/conv/kernel", rest)
    if conv:
        return f"{unit}/conv{LAYERS[conv[1]]}/kernel"
    norm = re.fullmatch(r"([abc])/group_norm/(gamma|beta)", rest)
    if norm:
        return f"{unit}/gn{LAYERS[norm[1]]}/{LEAVES[norm[2]]}"
    return None


def published_name(ours: str) -> str:
    """The inverse of `our_name`, for the parameters of a `models.bit.ResNet`."""
    if not OURS.fullmatch(ours):
        raise UserError(
            f"{ours} is not a parameter of a BiT ResNet: the published files have no name for it"
        )
    leaves = {ours: published for published, ours in LEAVES.items()}
    *path, layer, leaf = ours.split("/")
    if layer == "head":
        return f"resnet/head/conv2d/{leaf}"
    if layer == "norm-pre-head":
        return f"resnet/group_norm/{leaves[leaf]}"
    if layer == "conv_root":
        return "resnet/root_block/standardized_conv2d/kernel"
    prefix = "/".join(["resnet", *path])
    if layer == "conv_proj":
        return f"{prefix}/a/proj/standardized_conv2d/kernel"
    scope = "abc"[int(layer[-1]) - 1]
    if layer.startswith("conv"):
        return f"{prefix}/{scope}/standardized_conv2d/kernel"
    return f"{prefix}/{scope}/group_norm/{leaves[leaf]}"


def read(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Published or big_vision's arrays -> ours, by name."""
    params = {}
    for name, value in arrays.items():
        ours = our_name(name)
        if ours is None:
            raise UserError(
                f"{name} is not a parameter of a BiT ResNet: these are other weights, or the file "
                "is damaged"
            )
        if ours in params:
            raise UserError(f"{name} comes twice, under another number: fetch the file again")
        value = np.asarray(value)
        extra = value.ndim - rank_of(ours)
        if extra < 0 or not value.size or any(size != 1 for size in value.shape[:extra]):
            raise UserError(
                f"{name} has shape {value.shape}: these are not the weights of a BiT ResNet"
            )
        params[ours] = value.reshape(value.shape[extra:])
    return params


def rank_of(ours: str) -> int:
    if ours == "head/kernel":
        return 2
    return 4 if ours.endswith("kernel") else 1


def write(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our arrays by flat name -> published: the inverse of `read`."""
    arrays = {published_name(name): np.asarray(value) for name, value in params.items()}
    head = "resnet/head/conv2d/kernel"
    if head in arrays:
        arrays[head] = arrays[head][None, None]
    return arrays


def infer_fields(params: dict[str, np.ndarray]) -> dict:
    """Constructor arguments that a BiT ResNet's parameters (by our names) show: all but the image
    size.
    """
    root = "root_block/conv_root/kernel"
    if root not in params:
        raise UserError(
            f"there is no {root} among the {len(params)} parameters: these are not the weights of "
            "a BiT ResNet"
        )
    if params[root].ndim != 4:
        raise UserError(
            f"{root} has shape {params[root].shape}: these are not the weights of a BiT ResNet"
        )
    factor = params[root].shape[-1] / 64
    classes = [params[name].shape[-1] for name in ("head/kernel", "head/bias") if name in params]
    return dict(
        architecture="bit",
        units=units_by_stage(params),
        width_factor=int(factor) if factor.is_integer() else factor,
        num_classes=next(iter(classes), 0),
    )


def units_by_stage(params) -> tuple[int, ...]:
    stages = numbers(r"block(\d+)/unit\d+/", params)
    if stages != set(range(1, len(stages) + 1)) or not stages:
        raise UserError(
            f"there are the stages {sorted(stages)} of block<i>/: some are missing, fetch the file "
            "again"
        )
    counts = []
    for stage in sorted(stages):
        units = numbers(rf"block0*{stage}/unit(\d+)/", params)
        if units != set(range(1, len(units) + 1)):
            raise UserError(
                f"block{stage} has the units {sorted(units)}: some are missing, fetch the file "
                "again"
            )
        counts.append(len(units))
    return tuple(counts)
