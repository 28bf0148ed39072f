"""Checksums that find a damaged checkpoint before it is used; those of arrays do not depend on how
they are sharded.
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
# Odd constants of MurmurHash3's 32-bit finaliser and, for a second hash, of the "lowbias32" of
# Chris Wellons.
CONSTANTS = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x7FEB352D, 15, 0x846CA68B, 16))


def hashed(x, constants):
    """A permutation of uint32 in which every bit depends on every bit."""
    first, one, second, two, third = constants
    x = (x ^ (x >> first)) * jnp.uint32(one)
    x = (x ^ (x >> second)) * jnp.uint32(two)
    return x ^ (x >> third)


def partial(x, starts, shape):
    """Checksum uint32[2] of the bits of a part of an array.

    Each is the sum, modulo 2^32, of a hash of every element and its place in the whole. Sums have
    no order, so those of all parts add to that of the whole, whatever the parts.

    Args:
      x: the part.
      starts: of it in the whole, by axis.
      shape: of the whole.
    """
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    bits = jax.lax.bitcast_convert_type(bits, WORDS[bits.dtype.itemsize]).astype(jnp.uint32)
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + jnp.uint32(starts[axis])
        place += index * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return jnp.stack(
        [jnp.sum(hashed(bits ^ hashed(place, c), c), dtype=jnp.uint32) for c in CONSTANTS]
    )


@jax.jit
def whole(x):
    return partial(x, [0] * x.ndim, x.shape)[None]


@functools.cache
def of_devices(place: NamedSharding, ndim: int):
    """f(array so placed) -> uint32[devices, 2], the checksum of what each device holds.

    The devices send one another nothing: on CPUs, many small programs that wait for each other can
      block for ever.
    """
    mesh, taken = (
        place.mesh,
        [part or () for part in (*place.spec, *[None] * (ndim - len(place.spec)))],
    )
    taken = [(part,) if isinstance(part, str) else part for part in taken]

    def own(x):
        starts, shape = [], []
        for names, size in zip(taken, x.shape, strict=True):
            index, count = 0, 1
            for name in names:
                index, count = (
                    index * mesh.shape[name] + jax.lax.axis_index(name),
                    count * mesh.shape[name],
                )
            starts.append(index * size)
            shape.append(count * size)
        return partial(x, starts, shape)[None]

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(own, mesh=mesh, in_specs=place.spec, out_specs=spec, check_vma=False)
    )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The checksums of what this process holds of an array, as numbers that add up."""

    by_copy: dict[
        int, int
    ]  # of the parts that belong to each of the copies that there are of the array
    by_place: dict[str, set[int]]  # of each part; where copies are not alike there are several
    is_whole: bool  # whether these are all parts of it

    def is_as(self, expected: str | None) -> bool:
        """Whether this process alone knows better; it can't, of an array that is not all here."""
        alike = all(len(numbers) == 1 for numbers in self.by_place.values())
        return alike and (
            not self.is_whole or as_text(sum(map(min, self.by_place.values()))) == expected
        )


def leaf_of(parts: list[tuple[str, int]], numbers: list[int], places: set[str]) -> Leaf:
    """`parts`: (place, copy) by device."""
    by_copy, by_place = collections.Counter(), collections.defaultdict(set)
    for (place, copy), number in zip(parts, numbers, strict=True):
        by_copy[copy] += number
        by_place[place].add(number)
    return Leaf(dict(by_copy), by_place, by_place.keys() == places)


def leaves(tree) -> tuple[dict[str, Leaf], bool]:
    """(what this process holds by name, whether other processes hold other parts)."""
    parts, words, places, is_spread = {}, {}, {}, False
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_name(path)
        is_spread |= not getattr(leaf, "is_fully_addressable", True)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            sums = {
                shard.device: shard.data
                for shard in of_devices(leaf.sharding, leaf.ndim)(leaf).addressable_shards
            }
            parts[name] = [
                (str(shard.index), shard.replica_id) for shard in leaf.addressable_shards
            ]
            words[name] = [sums[shard.device] for shard in leaf.addressable_shards]
            places[name] = {
                str(index) for index in leaf.sharding.devices_indices_map(leaf.shape).values()
            }
        else:  # in a mesh every device computes it
            parts[name], places[name] = [("", 0)], {""}
            words[name] = [whole(np.asarray(leaf)).addressable_shards[0].data]
    found = jax.device_get(words)
    return {
        name: leaf_of(parts[name], list(map(as_number, found[name])), places[name])
        for name in parts
    }, is_spread


def checksums(tree) -> dict[str, str]:
    """Name of a leaf -> its checksum in hexadecimal; of a tree that is spread over processes only
    the leading one knows them, and the others get those of their parts. All processes that hold
    parts must call it."""
    held, is_spread = leaves(tree)
    own = {name: leaf.by_copy.get(0, 0) for name, leaf in held.items()}
    said = (
        messages.gather("the checksums", json.dumps(own), messages.PATIENCE_S)
        if is_spread
        else None
    )
    if said:
        all_parts = [json.loads(text) for text in said]
        own = {name: sum(found[name] for found in all_parts) for name in own}
    return {name: as_text(value) for name, value in own.items()}


def as_number(words) -> int:
    """Two sums as one number that can be added up: carries of the first do not reach the second."""
    return int(words[0, 0]) << 64 | int(words[0, 1])


def as_text(number: int) -> str:
    return f"{(number >> 64) % 2**32:08x}{number % 2**32:08x}"


def fingerprint(facts) -> str:
    """SHA-256 of JSON-able facts, whatever the order of their keys."""
    return hashlib.sha256(
        json.dumps(json.loads(json.dumps(facts)), sort_keys=True).encode()
    ).hexdigest()


def seal(meta: Mapping, tree) -> dict:
    """What `opened` and `check` need: `meta` and the checksums of a tree, with a checksum over
    both.
    """
    content = dict(meta=meta, checksums=checksums(tree))
    return content | dict(sha256=fingerprint(content))


def opened(sealed) -> tuple[dict, dict[str, str]]:
    """(meta, checksums of the leaves) of what `seal` gave.

    Raises:
      UserError: it is not as it was written.
    """
    if not isinstance(sealed, dict) or "sha256" not in sealed:
        raise UserError("it has no checksum: it is damaged, or was written by something else")
    content = {key: value for key, value in sealed.items() if key != "sha256"}
    if fingerprint(content) != sealed["sha256"] or set(content) != {"meta", "checksums"}:
        raise UserError("it is damaged: it does not have the checksum that it was written with")
    return content["meta"], content["checksums"]


def check(tree, expected: Mapping[str, str]) -> None:
    """Raises UserError, which names leaves, where a tree is not what it was when `expected` was
    taken.

    It does so on all processes, also where only the copy of one is damaged.
    """
    held, is_spread = leaves(tree)
    bad = {name for name, leaf in held.items() if not leaf.is_as(expected.get(name))}
    if is_spread:
        own = {name: leaf.by_copy for name, leaf in held.items() if not leaf.is_whole}
        for name, by_copy in added_up(own).items():
            bad |= {name for number in by_copy.values() if as_text(number) != expected.get(name)}
    problem = None
    if bad:
        problem = f"{len(bad)} arrays are damaged, as {min(bad)}: their checksums are not those of what was saved"
    if is_spread:
        problem = messages.first_problem("the comparison of checksums", problem)
    if problem:
        raise UserError(problem)


def added_up(own: dict[str, dict[int, int]]) -> dict[str, dict[str, int]]:
    """Name -> copy -> the sum of what all processes hold of it; {} where this process does not
    lead.
    """
    total = collections.defaultdict(collections.Counter)
    for text in messages.gather("the checksums", json.dumps(own), messages.PATIENCE_S) or ():
        for name, by_copy in json.loads(text).items():
            total[name].update(by_copy)
    return total
