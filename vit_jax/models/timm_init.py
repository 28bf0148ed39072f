"""Initial parameters as of timm's ViTs: `init_weights` of vision_transformer.py and deit.py, timm
1.0.31, with its default `weight_init=''`.

The other default, of the models here, is that of the published JAX code, which timm calls 'jax'.
"""

import math
import re

import jax
from flax import traverse_util

uniform = jax.nn.initializers.uniform
normal = jax.nn.initializers.normal
SMALL = 0.02  # timm truncates this normal distribution at 100 standard deviations


def conv_limit(params: dict) -> float:
    """The limit of the uniform distribution of the patch embedding's kernel and bias, which keep
    the default of torch's nn.Conv2d: 1 / sqrt(fan in).
    """
    height, width, channels, _ = params["embedding", "kernel"].shape
    return 1 / math.sqrt(height * width * channels)


def symmetric(limit: float):
    """The initializer U(-limit, limit)."""

    def init(key, shape, dtype):
        return uniform(2 * limit)(key, shape, dtype) - limit

    return init


def initializers(params: dict, width: int, head_std: float) -> tuple:
    """(pattern, initializer) pairs for the paths of parameters; the first that matches a whole path
    counts. All other parameters are the same in both: positions, norms, LayerScale, biases of
    attention and head, and the ResNet stem of a hybrid.
    """
    return (
        ("embedding/(kernel|bias)", symmetric(conv_limit(params))),
        ("cls|reg", normal(1e-6)),
        ("dist", normal(SMALL)),
        ("MAPHead_0/probe", jax.nn.initializers.truncated_normal(width**-0.5)),
        ("(head|head_dist)/kernel", normal(head_std or SMALL)),
        ("((Transformer|MAPHead_0)/.*|pre_logits)/kernel", normal(SMALL)),
        (r".*/MlpBlock_\d/.*/bias", jax.nn.initializers.zeros),
    )


def like_timm(key, params: dict, width: int, head_std: float = 0.0) -> dict:
    """Parameters with values drawn anew.

    Args:
      key: PRNG key.
      params: of a VisionTransformer, in either layout of layers.
      width: of the model.
      head_std: standard deviation of the heads; 0: timm's 0.02.
    """
    flat = traverse_util.flatten_dict(params)
    rules = initializers(flat, width, head_std)
    for number, path in enumerate(sorted(flat)):
        name = "/".join(path)
        found = next((init for pattern, init in rules if re.fullmatch(pattern, name)), None)
        if found is not None:
            leaf = flat[path]
            flat[path] = found(jax.random.fold_in(key, number), leaf.shape, leaf.dtype)
    return traverse_util.unflatten_dict(flat)
