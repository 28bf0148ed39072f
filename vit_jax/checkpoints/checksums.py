"""Checksums that detect a damaged checkpoint before it is used. Those of arrays do not depend on
the sharding.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.distributed import messages
from vit_jax.distributed.sharding import path_name
from vit_jax.errors import UserError

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# From MurmurHash3's 32-bit finaliser and, for a second hash, from Chris Wellons' "lowbias32".
CONSTANTS = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16))


def hashed(x, constants):
    """A permutation of uint32 in which every output bit depends on every input bit."""
    first, one, second, two, third = constants
    x = (x ^ (x >> first)) * jnp.uint32(one)
    x = (x ^ (x >> second)) * jnp.uint32(two)
    return x ^ (x >> third)


def partial(x, starts, shape):
    """Checksum uint32[2] of the bits of one part of an array.

    Each of the two is the sum, modulo 2^32, of a hash of every element and its position in the
    array. Sums do not depend on order, so those of the parts add up to that of the array, however
    it is divided.

    Args:
      x: the part.
      starts: index of its first element in the array, by axis.
      shape: of the array.
    """
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(bits, WORDS[bits.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + jnp.uint32(starts[axis])
        position += index * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return jnp.stack(
        [jnp.sum(hashed(bits ^ hashed(position, c), c), dtype=jnp.uint32) for c in CONSTANTS]
    )


@jax.jit
def of_array(x):
    """uint32[1, 2]: the checksum of an array that is completely on this process."""
    return partial(x, [0] * x.ndim, x.shape)[None]


@functools.cache
def of_shards(sharding: NamedSharding, ndim: int):
    """f(array with this sharding) -> uint32[devices, 2], the checksum of the shard on each device.

    The devices do not communicate: on CPUs, many small programs that wait for each other can
    deadlock.
    """
    mesh = sharding.mesh
    axes = [part or () for part in (*sharding.spec, *[None] * (ndim - len(sharding.spec)))]
    axes = [(part,) if isinstance(part, str) else part for part in axes]

    def own(x):
        starts = []
        shape = []
        for names, size in zip(axes, x.shape, strict=True):
            index = 0
            count = 1
            for name in names:
                index = index * mesh.shape[name] + jax.lax.axis_index(name)
                count *= mesh.shape[name]
            starts.append(index * size)
            shape.append(count * size)
        return partial(x, starts, shape)[None]

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(own, mesh=mesh, in_specs=sharding.spec, out_specs=spec, check_vma=False)
    )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The checksums of the shards of one array on this process, as numbers that can be added."""

    by_copy: dict[int, int]  # replica id -> sum over its shards
    by_index: dict[str, set[int]]  # shard index -> checksums; several if the copies differ
    is_complete: bool  # whether this process has all shards

    def matches(self, expected: str | None) -> bool:
        """False if this process alone can tell that the array is damaged."""
        if any(len(numbers) > 1 for numbers in self.by_index.values()):
            return False
        return not self.is_complete or as_text(sum(map(min, self.by_index.values()))) == expected


def leaf_of(shards: list[tuple[str, int]], numbers: list[int], indices: set[str]) -> Leaf:
    """`shards`: (index, replica id) by device; `indices`: those of all shards of the array."""
    by_copy = collections.Counter()
    by_index = collections.defaultdict(set)
    for (index, copy), number in zip(shards, numbers, strict=True):
        by_copy[copy] += number
        by_index[index].add(number)
    return Leaf(dict(by_copy), by_index, by_index.keys() == indices)


def leaves(tree) -> tuple[dict[str, Leaf], bool]:
    """(leaf by name, whether other processes have other shards)."""
    shards = {}
    words = {}
    indices = {}
    is_spread = False
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_name(path)
        is_spread |= not getattr(leaf, "is_fully_addressable", True)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            own = leaf.addressable_shards
            sums = of_shards(leaf.sharding, leaf.ndim)(leaf).addressable_shards
            sums = {shard.device: shard.data for shard in sums}
            shards[name] = [(str(shard.index), shard.replica_id) for shard in own]
            words[name] = [sums[shard.device] for shard in own]
            every = leaf.sharding.devices_indices_map(leaf.shape).values()
            indices[name] = {str(index) for index in every}
        else:
            shards[name] = [("", 0)]
            # In a mesh every device computes it.
            words[name] = [of_array(np.asarray(leaf)).addressable_shards[0].data]
            indices[name] = {""}
    words = jax.device_get(words)
    by_name = {}
    for name in shards:
        numbers = [as_number(word) for word in words[name]]
        by_name[name] = leaf_of(shards[name], numbers, indices[name])
    return by_name, is_spread


def checksums(tree) -> dict[str, str]:
    """Leaf name -> its checksum in hexadecimal.

    All processes with shards of the tree must call it. If the tree is spread over processes, only
    process 0 gets the checksums of the arrays; the others get those of their own shards.
    """
    by_name, is_spread = leaves(tree)
    sums = {name: leaf.by_copy.get(0, 0) for name, leaf in by_name.items()}
    if is_spread:
        texts = messages.gather("the checksums", json.dumps(sums), messages.PATIENCE_S)
        if texts:
            by_process = [json.loads(text) for text in texts]
            sums = {name: sum(own[name] for own in by_process) for name in sums}
    return {name: as_text(value) for name, value in sums.items()}


def as_number(words) -> int:
    """Two sums as one integer that can be added: carries from one sum do not reach the other."""
    return int(words[0, 0]) << 64 | int(words[0, 1])


def as_text(number: int) -> str:
    return f"{(number >> 64) % 2**32:08x}{number % 2**32:08x}"


def fingerprint(facts) -> str:
    """SHA-256 of JSON-able facts; the order of their keys does not matter."""
    text = json.dumps(json.loads(json.dumps(facts)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(meta: Mapping, tree) -> dict:
    """What `unseal` and `check` need: `meta`, the checksums of a tree, and a checksum of both."""
    content = dict(meta=meta, checksums=checksums(tree))
    return content | dict(sha256=fingerprint(content))


def unseal(sealed) -> tuple[dict, dict[str, str]]:
    """(meta, checksums of the leaves) of a dict from `seal`; a damaged one is a UserError."""
    if not isinstance(sealed, dict) or "sha256" not in sealed:
        raise UserError("it has no checksum: it is damaged, or was written by another program")
    content = {key: value for key, value in sealed.items() if key != "sha256"}
    if fingerprint(content) != sealed["sha256"] or set(content) != {"meta", "checksums"}:
        raise UserError("it is damaged: its checksum is not the one that was saved with it")
    return content["meta"], content["checksums"]


def check(tree, expected: Mapping[str, str]) -> None:
    """Raises UserError, which names a leaf, if a tree differs from the one with the checksums
    `expected`.

    It is raised on all processes, even if only the copy of one of them is damaged.
    """
    by_name, is_spread = leaves(tree)
    bad = {name for name, leaf in by_name.items() if not leaf.matches(expected.get(name))}
    if is_spread:
        own = {name: leaf.by_copy for name, leaf in by_name.items() if not leaf.is_complete}
        for name, by_copy in sums_over_processes(own).items():
            bad |= {name for number in by_copy.values() if as_text(number) != expected.get(name)}
    problem = None
    if bad:
        problem = (
            f"{len(bad)} arrays are damaged, such as {min(bad)}: their checksums differ from the "
            "saved ones"
        )
    if is_spread:
        problem = messages.first_problem("the comparison of checksums", problem)
    if problem:
        raise UserError(problem)


def sums_over_processes(own: dict[str, dict[int, int]]) -> dict[str, dict[str, int]]:
    """Name -> replica id -> the sum over all processes; {} on all processes but process 0."""
    total = collections.defaultdict(collections.Counter)
    for text in messages.gather("the checksums", json.dumps(own), messages.PATIENCE_S) or ():
        for name, by_copy in json.loads(text).items():
            total[name].update(by_copy)
    return total
