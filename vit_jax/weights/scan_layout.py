"""Parameter trees: flat names, and the two layouts of the encoder blocks (one entry per layer, or
stacked for scan).
"""

import re

import jax
import numpy as np

from vit_jax.distributed.sharding import path_name

BLOCK = re.compile(r"encoderblock_(\d+)$")


def flatten(tree) -> dict:
    """{"a/b": leaf} for every leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten(flat: dict) -> dict:
    """The inverse of `flatten`, for trees of dicts."""
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def stack_blocks(params: dict, stack=np.stack) -> dict:
    """Loop layout (`encoderblock_0`, ...) -> scan layout (`encoderblock` with a leading layers
    axis).
    """
    encoder = dict(params["Transformer"])
    names = [name for name in encoder if BLOCK.match(name)]
    if not names:
        return params
    names.sort(key=lambda name: int(BLOCK.match(name)[1]))
    layers = [encoder.pop(name) for name in names]
    encoder["encoderblock"] = jax.tree.map(lambda *leaves: stack(leaves), *layers)
    return params | {"Transformer": encoder}


def depth_of(params: dict) -> int:
    """Number of stacked layers; 0 if none are stacked, or if there is no array to show it (frozen
    parameters have no optimizer state).
    """
    stacked = jax.tree.leaves(params["Transformer"].get("encoderblock", {}))
    return max((leaf.shape[0] for leaf in stacked if leaf.shape), default=0)


def unstack_blocks(params: dict, depth: int = 0) -> dict:
    """Scan layout -> loop layout; `depth` is needed if no array shows it."""
    encoder = dict(params["Transformer"])
    if "encoderblock" not in encoder:
        return params
    stacked = encoder.pop("encoderblock")
    for i in range(depth or depth_of(params)):
        encoder[f"encoderblock_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    return params | {"Transformer": encoder}


def relayout(tree, scan: bool, stack):
    """Converts every parameter tree inside `tree`, such as the moments in an optimizer state, to
    the scan or the loop layout.
    """

    def is_params(node):
        return isinstance(node, dict) and "Transformer" in node

    trees = [node for node in jax.tree.leaves(tree, is_leaf=is_params) if is_params(node)]
    depth = max(map(depth_of, trees), default=0)

    def change(node):
        if not is_params(node):
            return node
        return stack_blocks(node, stack) if scan else unstack_blocks(node, depth)

    return jax.tree.map(change, tree, is_leaf=is_params)
