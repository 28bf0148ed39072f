"""What the first layer looks for, and what a model knows of where patches are."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from vit_jax.figures.vectors import cosine_similarity, principal_components
from vit_jax.models import posemb, resnet
from vit_jax.weights.scan_layout import flatten, unstack_blocks

COUNT = 28  # filters, as in arXiv 2010.11929 figure 7
# Architecture -> the convolution on pixels; of a hybrid it is that of its stem.
KERNELS = {
    "vit": "embedding/kernel",
    "mixer": "stem/kernel",
    "bit": "root_block/conv_root/kernel",
}
STEM = "conv_root/kernel"

# --- filters ---


def first_kernel(model, params: dict) -> tuple[str, np.ndarray] | None:
    """(name, kernel [h, w, 3, width]) of the convolution on pixels, standardised where the model
    standardises it; None if a model of the user's own has none.
    """
    arrays = flatten(params)
    name = STEM if model.stem_units is not None else KERNELS.get(model.architecture)
    name = name or next(filter(lambda name: is_on_pixels(arrays[name]), arrays), None)
    if name is None:
        return None
    kernel = arrays[name]
    if name.endswith(STEM):
        kernel = resnet.standardized(jnp.asarray(kernel))
    return name, np.asarray(kernel, np.float32)


def is_on_pixels(leaf) -> bool:
    """Whether a parameter is the kernel of a convolution of three channels."""
    return np.ndim(leaf) == 4 and np.shape(leaf)[2] == 3


def filters(kernel, count: int = COUNT) -> np.ndarray:
    """Principal components of the filters of the first layer (arXiv 2010.11929, section 4.5).

    Args:
      kernel: [h, w, 3, width], `width` filters.
      count: how many, less if the filters have not so many.

    Returns:
      [count, h, w, 3], each of length 1 and with positive and negative numbers; the most important
      first.

    Raises:
      ValueError: the kernel is not finite.
    """
    h, w, channels, width = np.shape(kernel)
    vectors = np.reshape(kernel, (-1, width)).T
    components = principal_components(vectors, min(count, max(width - 1, 1)))
    return components.reshape(-1, h, w, channels)


# --- position embeddings ---


def position_similarity(model, params: dict) -> np.ndarray | None:
    """Cosine similarity of the position embeddings of all pairs of patches (arXiv 2010.11929 figure
    7), without prefix tokens.

    With `posemb=relative` it says how alike a query treats a patch and itself: the similarity of
    the embedding of their distance with that of no distance, the mean over the layers. With
    `posemb_at=every` it is that of the first layer.

    Args:
      model, params: as `vit_jax.from_pretrained` returns them; the layers may be stacked.

    Returns:
      [h, w, h, w], from (row, column) to (row, column); None if the model has no position
      embedding.

    Raises:
      ValueError: the embeddings are not finite.
    """
    if model.architecture != "vit" or model.posemb == "none":
        return None
    if not model.depth and (model.posemb == "relative" or model.posemb_at == "every"):
        return None  # it is in layers
    if model.posemb == "relative":
        return relative_similarity(model, params)
    rows = position_rows(model, params)
    return cosine_similarity(rows, rows).reshape(*model.grid, *model.grid)


def position_rows(model, params: dict) -> np.ndarray:
    """What is added to the patches, learned or fixed: [h * w, width]."""
    if model.posemb == "sincos2d":
        return np.asarray(posemb.sincos2d(model.grid, model.width, jnp.float32))[0]
    encoder = unstack_blocks(params)["Transformer"]
    where = encoder["encoderblock_0"] if model.posemb_at == "every" else encoder
    embedding = posemb.PositionEmbedding(model.posemb, model.grid, model.num_prefix, model.width)
    rows = embedding.apply({"params": where["posembed_input"]})[0]
    return np.asarray(rows)[model.num_prefix :]


def relative_similarity(model, params: dict) -> np.ndarray:
    """See `position_similarity`."""
    encoder = unstack_blocks(params)["Transformer"]
    h, w = model.grid
    length = model.num_prefix + h * w
    no_distance = length - 1
    similar = []
    for i in range(model.depth):
        rows = relative_embedding(encoder[f"encoderblock_{i}"])
        similar.append(cosine_similarity(rows, rows[no_distance : no_distance + 1])[:, 0])
    index = np.asarray(posemb.relative_index(h * w)) + model.num_prefix
    return np.mean(similar, axis=0)[index].reshape(h, w, h, w)


def relative_embedding(layer: Mapping) -> np.ndarray:
    """Of an encoder block: [2 * length - 1, kv], a row for each distance of two tokens."""
    return layer["MultiHeadDotProductAttention_1"]["relative_embedding"]
