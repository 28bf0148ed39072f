"""Muon for the matrices of encoder blocks, and Adam for all other parameters.

Muon (https://kellerjordan.github.io/posts/muon, by optax) replaces the momentum of a matrix by the
nearest matrix whose singular values are all about 1.
"""

import math
import re

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from vit_jax.distributed.sharding import path_name

BLOCK_KERNEL = re.compile(r"(?:.*/)?encoderblock(_\d+)?/(?:.*/)?kernel")
# With this factor the updates of all shapes have the RMS of Adam's, so that one learning rate and
# one weight decay do for both (arXiv 2502.16982 section 2.2).
RMS_OF_ADAM = 0.2


def is_matrix(path) -> bool:
    """Whether Muon updates the parameter."""
    return bool(BLOCK_KERNEL.fullmatch(path_name(path)))


def axes(path, kernel) -> MuonDimensionNumbers:
    """Which axes of a block's kernel are the rows and the columns of its matrix.

    Query, key and value [embed, heads, kv] map to all heads, and the output [heads, kv, embed] from
    all heads. Before these, blocks that are stacked for scan have an axis of layers.
    """
    name = path_name(path)
    stacked = not BLOCK_KERNEL.fullmatch(name)[1]
    places = tuple(range(stacked, kernel.ndim))
    if name.endswith("/out/kernel"):
        return MuonDimensionNumbers(places[:-1], places[-1:])
    return MuonDimensionNumbers(places[:1], places[1:])


def axes_of_all(kernels):
    return jax.tree_util.tree_map_with_path(axes, kernels)


def scale_to_adam(path, update):
    rows, columns = (
        math.prod(update.shape[axis] for axis in found) for found in axes(path, update)
    )
    return RMS_OF_ADAM * math.sqrt(max(rows, columns)) * update


def muon(config, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """`config`: the `optim` part of a config. `adam`: for what is not a matrix of a block."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "matrix" if is_matrix(path) else "other", params
        )

    def rescale(updates, params):
        return jax.tree_util.tree_map_with_path(scale_to_adam, updates)

    matrices = optax.chain(
        scale_by_muon(
            beta=config.momentum,
            mu_dtype=config.momentum_dtype,
            weight_dimension_numbers=axes_of_all,
        ),
        optax.stateless(rescale),
    )
    return optax.partition({"matrix": matrices, "other": adam}, labels)
