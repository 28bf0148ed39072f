"""Where tokens look: attention rollout and mean attention distance, of the attention weights that
`vit_jax.intermediates` returns.

Arrays of NumPy give arrays of NumPy; those of JAX give JAX's, and may be traced.
"""

import math

import numpy as np


def namespace(array):
    """(array, NumPy or jax.numpy); what is neither becomes an array of NumPy.

    Integers and 16-bit floats, which can't count the tokens of a long row, become float32.
    """
    array = array if hasattr(array, "__array_namespace__") else np.asarray(array)
    xp = array.__array_namespace__()
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32)
    return array, xp


def rollout(weights):
    """Attention rollout (arXiv 2005.00928, section 3): how much of each token's output comes from
    each token of the input, if a layer passes on half of its input beside what it attends to.

    Args:
      weights: [layers, batch, heads, length, length]; each row, of a query, sums to 1.

    Returns:
      [batch, length, length]: the product of 0.5 A + 0.5 I over the layers, A the mean of the
      heads, later layers from the left. Rows sum to 1, also if those of 16-bit weights do not.
    """
    weights, xp = namespace(weights)
    identity = xp.eye(weights.shape[-1], dtype=weights.dtype)
    result = xp.broadcast_to(identity, (weights.shape[1], *identity.shape))
    for layer in weights:
        mixed = layer.mean(axis=1) + identity
        result = mixed / mixed.sum(axis=-1, keepdims=True) @ result
    return result


def distances(grid: tuple[int, int], patch_size: int | tuple[int, int]) -> np.ndarray:
    """Pixels between the centres of all pairs of patches: [patches, patches], row by row."""
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    height, width = np.broadcast_to(patch_size, 2)
    return np.hypot(height * (y[:, None] - y), width * (x[:, None] - x))


def distance_sums(weights, grid, patch_size, num_prefix: int = 1):
    """What `mean_distance` divides: (sum of the distances of queries in pixels, how many queries
    count), each [layers, batch, heads]; arguments and errors are the same.
    """
    weights, xp = namespace(weights)
    length = num_prefix + grid[0] * grid[1]
    if weights.shape[-2:] != (length, length):
        raise ValueError(
            f"weights {weights.shape} do not fit num_prefix {num_prefix} and grid {grid}: their "
            f"last two axes must be {length}"
        )
    to_patches = weights[..., num_prefix:, num_prefix:]
    total = to_patches.sum(axis=-1)
    weighted = (to_patches * xp.asarray(distances(grid, patch_size), weights.dtype)).sum(axis=-1)
    counts = total != 0  # true for NaN, which shows in the result
    distance = xp.where(counts, weighted / xp.where(counts, total, 1), 0)
    return distance.sum(axis=-1), counts.sum(axis=-1)


def mean_distance(weights, grid, patch_size, num_prefix: int = 1):
    """Mean attention distance (arXiv 2010.11929 appendix D.7): how far patches look, by layer and
    head.

    It is from patch to patch: prefix tokens are dropped, and the weights of each query on patches
    are scaled to sum to 1. A query with no weight on any patch is left out.

    Args:
      weights: [layers, batch, heads, length, length].
      grid: (height, width) of the patch tokens.
      patch_size: side of a patch in pixels, or (height, width).
      num_prefix: tokens before the patches.

    Returns:
      [layers, heads] in pixels, the mean over the batch and over all queries; NaN for a head none
      of whose queries has weight on a patch.

    Raises:
      ValueError: the length is not `num_prefix` and the patches of the grid.
    """
    distance, counts = distance_sums(weights, grid, patch_size, num_prefix)
    return mean_of(distance.sum(axis=1), counts.sum(axis=1))


def mean_of(distance, counts):
    """Sums of distances by the number of queries, NaN if there are none."""
    distance, xp = namespace(distance)
    return xp.where(counts > 0, distance / xp.maximum(counts, 1), xp.nan)


def tokens_read(model, num_prefix: int) -> slice:
    """The tokens whose mean a ViT's head reads, if it has no attention pooling."""
    if model.distilled:
        return slice(0, 2)
    if model.pool.startswith("tok"):
        return slice(0, 1)
    if model.pool == "0":
        return slice(num_prefix, num_prefix + 1)
    return slice(num_prefix, None)


def attention_bytes(model) -> int:
    """Bytes of the attention weights of one image, of all layers, in float32; 0 if the model has
    none.
    """
    if model.architecture != "vit":
        return 0
    length = model.num_prefix + math.prod(model.grid)
    return 4 * model.depth * model.num_heads * length**2


def attention_map(model, found: dict):
    """How much of what the head reads comes from each patch, by attention rollout.

    The head reads the class token (and that of distillation), the mean of the patch tokens, or what
    attention pooling gathers from them. Equal to those rows of `rollout`, for much less work.

    Args:
      model: a ViT.
      found: what `vit_jax.intermediates` returns for it.

    Returns:
      [batch, h, w], h and w those of the grid of patches.
    """
    weights, xp = namespace(found["attention"])
    prefix = found["num_prefix"]
    if model.pool == "map":
        to_patches = found["pooling_attention"].mean(axis=(1, 2))
        row = xp.pad(to_patches, ((0, 0), (prefix, 0)))
    else:
        row = np.zeros((weights.shape[1], weights.shape[-1]), weights.dtype)
        row[:, tokens_read(model, prefix)] = 1
        row = row / row.sum(axis=-1, keepdims=True)
    for layer in reversed(list(weights)):
        heads = layer.mean(axis=1)
        row = row / (heads.sum(axis=-1) + 1)
        row = row + (row[:, None] @ heads)[:, 0]
    return row[:, prefix:].reshape(-1, *found["grid"])


def head_maps(model, found: dict):
    """Where each attention head looks for what the model's head reads: of attention pooling if
    there is one, otherwise of the last layer.

    The queries are the class token (and that of distillation), all patches, or the probe of
    attention pooling; as `attention_map` without the layers before.

    Args:
      model: a ViT.
      found: what `vit_jax.intermediates` returns for it.

    Returns:
      [batch, heads, h, w], h and w those of the grid of patches.
    """
    if model.pool == "map":
        to_patches, _ = namespace(found["pooling_attention"][:, :, 0])
    else:
        last, _ = namespace(found["attention"][-1])
        prefix = found["num_prefix"]
        to_patches = last[:, :, tokens_read(model, prefix), prefix:].mean(axis=2)
    return to_patches.reshape(*to_patches.shape[:2], *found["grid"])
