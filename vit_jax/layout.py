"""Parameter trees: flat names, and the two layouts of the encoder blocks (one entry per layer, or stacked for scan)."""

import re

import jax
import numpy as np

from vit_jax.sharding import path_name

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
    """Loop layout (`encoderblock_0`, ...) -> scan layout (`encoderblock` with a leading layers axis)."""
    encoder = dict(params["Transformer"])
    names = sorted((name for name in encoder if BLOCK.match(name)), key=lambda name: int(BLOCK.match(name)[1]))
    if not names:
        return params
    encoder["encoderblock"] = jax.tree.map(lambda *leaves: stack(leaves), *[encoder.pop(name) for name in names])
    return params | {"Transformer": encoder}


def unstack_blocks(params: dict) -> dict:
    """Scan layout -> loop layout."""
    encoder = dict(params["Transformer"])
    if "encoderblock" not in encoder:
        return params
    stacked = encoder.pop("encoderblock")
    for i in range(jax.tree.leaves(stacked)[0].shape[0]):
        encoder[f"encoderblock_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
    return params | {"Transformer": encoder}


def relayout(tree, scan: bool, stack):
    """Brings every parameter tree inside `tree` (such as the moments in an optimizer state) into one layout."""

    def is_params(node):
        return isinstance(node, dict) and "Transformer" in node

    def change(node):
        if not is_params(node):
            return node
        return stack_blocks(node, stack) if scan else unstack_blocks(node)

    return jax.tree.map(change, tree, is_leaf=is_params)
