"""Checksums: every change is detected, and the sharding of an array does not matter."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from vit_jax.checkpoints import checksums
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError

CHANCE = np.random.default_rng(0)
ARRAYS = {
    "float32": CHANCE.normal(size=(16, 24)).astype(np.float32),
    "bfloat16": CHANCE.normal(size=(8, 3, 8)).astype(jnp.bfloat16),
    "int32": CHANCE.integers(-9, 9, (64,)).astype(np.int32),
    "uint8": CHANCE.integers(0, 255, (8, 8)).astype(np.uint8),
    "bool": CHANCE.random((32,)) < 0.5,
    "scalar": np.int32(7),
    "empty": np.zeros((0, 4), np.float32),
}


def only(array) -> str:
    return checksums.checksums(dict(x=array))["x"]


def test_a_tree_has_a_checksum_for_each_leaf_by_its_path():
    found = checksums.checksums(dict(params=dict(head=ARRAYS["float32"]), mu=(ARRAYS["bool"],)))
    assert list(found) == ["mu/0", "params/head"] and all(
        len(value) == 16 for value in found.values()
    )
    assert found["params/head"] == only(ARRAYS["float32"])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "uint8"])
def test_it_is_the_same_however_the_array_is_sharded(name):
    array, mesh = ARRAYS[name], meshes.make_mesh(dict(replica=1, data=2, fsdp=2, tensor=2))
    specs = [PartitionSpec(), PartitionSpec(("data", "fsdp")), PartitionSpec("tensor")]
    if array.ndim > 1:
        specs += [
            PartitionSpec(*[None] * (array.ndim - 1), ("data", "tensor")),
            PartitionSpec("data", *[None] * (array.ndim - 2), "fsdp"),
        ]
    placed = [jax.device_put(array, jax.NamedSharding(mesh, spec)) for spec in specs]
    assert {only(x) for x in placed} == {only(array)} == {only(jnp.asarray(array))}
    with jax.set_mesh(mesh):
        assert {only(x) for x in placed} == {only(array)} == {only(jnp.asarray(array))}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "uint8"])
def test_every_flipped_bit_is_seen(name):
    array = ARRAYS[name]
    expected = only(array)
    size = array.size * array.itemsize * 8
    for bit in CHANCE.choice(size, 100, replace=False):
        raw = bytearray(array.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        damaged = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        assert only(damaged) != expected


def test_order_shape_and_the_sign_of_zero_count():
    array = ARRAYS["float32"]
    swapped = array.copy()
    swapped[0, 0], swapped[5, 7] = array[5, 7], array[0, 0]
    zeros = np.zeros((4, 4), np.float32)
    assert len({only(array), only(swapped), only(array[::-1]), only(array.T), only(array[:8])}) == 5
    assert only(zeros) != only(-zeros) and only(zeros) != only(np.zeros((4, 5), np.float32))


def test_what_was_sealed_is_opened_through_json():
    meta = dict(config=dict(lr=1e-3, betas=(0.9, 0.999)), class_names=["a", "b"])
    sealed = json.loads(json.dumps(checksums.seal(meta, ARRAYS)))
    found, saved = checksums.unseal(sealed)
    assert found == json.loads(json.dumps(meta)) and set(saved) == set(ARRAYS)
    checksums.check(ARRAYS, saved)


def test_a_changed_fact_checksum_or_array_is_an_error():
    sealed = json.loads(json.dumps(checksums.seal(dict(lr=0.1), dict(x=ARRAYS["int32"]))))
    changed = [
        sealed | dict(meta=dict(lr=0.2)),
        sealed | dict(checksums=dict(x="0" * 16)),
        sealed | dict(more=1),
    ]
    for one in (*changed, {}, [], None, dict(meta={}, checksums={})):
        with pytest.raises(UserError, match="checksum"):
            checksums.unseal(one)
    with pytest.raises(UserError, match="1 arrays are damaged, such as x"):
        checksums.check(dict(x=ARRAYS["int32"] + 1), sealed["checksums"])
    with pytest.raises(UserError, match="damaged, such as y"):
        checksums.check(dict(y=ARRAYS["int32"]), sealed["checksums"])


def test_copies_that_are_not_alike_are_found():
    """Every process reads the files itself: what one of the copies has may be wrong."""
    mesh, array = meshes.make_mesh(dict(replica=1, data=4, fsdp=2, tensor=1)), ARRAYS["float32"]
    place = jax.NamedSharding(mesh, PartitionSpec("fsdp"))
    expected = dict(x=only(array))
    for bad in (None, 0, 3, 7):
        shards = []
        for number, (device, index) in enumerate(
            place.addressable_devices_indices_map(array.shape).items()
        ):
            part = array[index].copy()
            part[1, 2] += number == bad
            shards.append(jax.device_put(part, device))
        tree = dict(x=jax.make_array_from_single_device_arrays(array.shape, place, shards))
        if bad is None:
            checksums.check(tree, expected)
        else:
            with pytest.raises(UserError, match="1 arrays are damaged, such as x"):
                checksums.check(tree, expected)
