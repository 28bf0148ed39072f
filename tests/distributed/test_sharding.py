"""The mesh, the rules, and where parameters live."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import vit_jax
from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.train import optim, step
from vit_jax.weights import adapt, scan_layout

ONE = dict(replica=1, data=1, fsdp=1, tensor=1)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (dict(data=-1), (1, 8, 1, 1)),
        (dict(data=-1, tensor=2), (1, 4, 1, 2)),
        (dict(fsdp=-1, data=2), (1, 2, 4, 1)),
    ],
)
def test_one_axis_takes_what_remains(sizes, shape):
    assert tuple(meshes.make_mesh(ONE | sizes).shape.values()) == shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=3), "data=3 .* = 3 devices, but there are 8"),
        (dict(data=-1, tensor=3), "= 3 devices or a multiple, but there are 8"),
        (dict(data=-1, fsdp=-1), "at most one may be -1"),
        (dict(data=0), "sizes are positive"),
    ],
)
def test_a_mesh_that_does_not_match_says_both_numbers(sizes, message):
    with pytest.raises(UserError, match=message):
        meshes.make_mesh(ONE | sizes)


def test_constrain_knows_its_axes_and_does_nothing_without_a_mesh():
    x = jnp.ones((8, 2))
    assert sharding.constrain(x, "batch", "embed") is x
    with pytest.raises(ValueError, match="unknown logical axis 'batchs'"):
        sharding.constrain(x, "batchs", "embed")
    with pytest.raises(ValueError, match="one logical axis per dimension"):
        sharding.constrain(x, "batch")
    with jax.set_mesh(meshes.make_mesh(ONE | dict(data=8))):
        out = jax.jit(lambda x: sharding.constrain(x, "batch", None))(x)
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 2)}


def test_tensor_parallelism_splits_heads_and_mlp_and_fsdp_the_rest():
    model = vit_jax.create_model("S/16", num_classes=1000)
    mesh = meshes.make_mesh(ONE | dict(fsdp=4, tensor=2))
    shardings = sharding.param_specs(adapt.abstract_params(model), mesh)
    specs = {name: place.spec for name, place in scan_layout.flatten(shardings).items()}
    block = "Transformer/encoderblock_3"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    assert specs[f"{attention}/query/kernel"] == PartitionSpec("fsdp", "tensor", None)
    assert specs[f"{attention}/query/bias"] == PartitionSpec("tensor", None)
    assert specs[f"{attention}/out/kernel"] == PartitionSpec("tensor", None, "fsdp")
    assert specs[f"{block}/MlpBlock_3/Dense_0/kernel"] == PartitionSpec("fsdp", "tensor")
    assert specs[f"{block}/MlpBlock_3/Dense_1/kernel"] == PartitionSpec("tensor", "fsdp")
    assert specs[f"{block}/LayerNorm_0/scale"] == PartitionSpec(None)  # vectors stay whole
    # 1,000 classes are not divisible into 4 shards of full rows.
    assert specs["head/kernel"] == PartitionSpec("fsdp", None)


def test_the_share_of_the_parameters_that_is_split():
    params = adapt.abstract_params(vit_jax.create_model("S/16", num_classes=0))
    # What stays whole: vectors, the class token, and biases by head.
    vectors = sum(leaf.size for leaf in jax.tree.leaves(params) if max(leaf.shape) == leaf.size)
    biases = 12 * 3 * 384  # [heads, kv]: 6 x 64
    share = sharding.split_share(params, meshes.make_mesh(ONE | dict(fsdp=8)))
    assert share == 1 - (vectors + biases) / sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sharding.split_share(params, meshes.make_mesh(ONE | dict(data=8))) == 0


def test_scanned_layers_are_split_like_single_ones():
    model = vit_jax.create_model("S/16", scan=True)
    mesh = meshes.make_mesh(ONE | dict(fsdp=4, tensor=2))
    specs = scan_layout.flatten(sharding.param_specs(adapt.abstract_params(model), mesh))
    query = specs["Transformer/encoderblock/MultiHeadDotProductAttention_1/query/kernel"].spec
    assert query == PartitionSpec(None, "fsdp", "tensor", None)


@pytest.mark.parametrize(
    ("sizes", "wanted"), [(dict(data=8), 8), (dict(data=2, tensor=4), 2), (dict(fsdp=4, data=2), 8)]
)
def test_local_rows_are_all_rows_of_a_single_process_and_must_divide(sizes, wanted):
    mesh = meshes.make_mesh(ONE | sizes)
    np.testing.assert_array_equal(sharding.local_rows(mesh, 16), np.arange(16))
    with pytest.raises(UserError, match=f"batch_size=15 is not divisible by the {wanted} devices"):
        sharding.local_rows(mesh, 15)


def test_tensor_parallelism_must_divide_the_model():
    mesh = meshes.make_mesh(ONE | dict(tensor=8))
    with pytest.raises(UserError, match="tensor=8 does not divide the model's num_heads=12"):
        sharding.check_model(vit_jax.create_model("B/16"), mesh)


LARGE = ("H/14", "G/14", "So400m/14")


@functools.cache
def shapes(variant: str, stacked: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes by path of all parameters of a large model, with single or stacked layers."""
    params = adapt.abstract_params(vit_jax.create_model(variant, num_classes=21843))
    if stacked:
        params = scan_layout.stack_blocks(
            params, lambda leaves: jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), "f4")
        )
    return {name: leaf.shape for name, leaf in scan_layout.flatten(params).items()}


def split_axes(spec: PartitionSpec) -> list[str]:
    return [axis for part in spec for axis in sharding.mesh_axes(part)]


def ways(part, mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in sharding.mesh_axes(part))


@pytest.mark.parametrize("variant", LARGE)
@pytest.mark.parametrize("fsdp", [2, 4, 8, 16, 32, 64, 128, 256])
def test_every_shard_of_a_large_model_has_full_rows(variant, fsdp):
    for tensor, layers in ((1, shapes(variant)), (2, shapes(variant)), (1, shapes(variant, True))):
        mesh = ONE | dict(fsdp=fsdp, tensor=tensor)
        for name, shape in layers.items():
            spec = sharding.leaf_spec(name, shape, mesh)
            axes = split_axes(spec)
            stacked = "encoderblock" in name.split("/")
            assert len(axes) == len(set(axes)), name
            for size, part in zip(shape, spec, strict=True):
                assert size % ways(part, mesh) == 0, name
                if "fsdp" in (part or ()):
                    assert size // fsdp % sharding.SHARD_ROWS == 0, (name, shape, spec)
            assert not stacked or spec[0] is None, name
            if len(shape) - stacked < 2:
                assert "fsdp" not in axes, name


@pytest.mark.parametrize("variant", LARGE)
def test_most_of_a_large_model_is_split_over_a_pod(variant):
    mesh = ONE | dict(fsdp=16)
    whole = [
        math.prod(shape)
        for name, shape in shapes(variant).items()
        if "fsdp" not in split_axes(sharding.leaf_spec(name, shape, mesh))
    ]
    assert sum(whole) / sum(map(math.prod, shapes(variant).values())) < 0.01


@pytest.mark.parametrize("variant", LARGE)
@pytest.mark.parametrize("fsdp", [2, 16, 64])
def test_stacked_layers_are_split_along_the_axis_of_single_ones(variant, fsdp):
    stacked, mesh = shapes(variant, True), ONE | dict(fsdp=fsdp, tensor=2)
    compared = 0
    for name, shape in shapes(variant).items():
        if name.startswith("Transformer/encoderblock_0/"):
            other = name.replace("encoderblock_0", "encoderblock")
            spec = sharding.leaf_spec(other, stacked[other], mesh)
            assert spec == PartitionSpec(None, *sharding.leaf_spec(name, shape, mesh)), name
            compared += 1
    assert compared == 16


@pytest.fixture(scope="module")
def state():
    """Shapes of a whole state with Adam and averaging."""
    model = vit_jax.create_model("S/16", num_classes=1000)
    config = configs.defaults().optim
    config.ema_decay = 0.9
    params = adapt.abstract_params(model)
    tx, _ = optim.make_optimizer(config, params, 10)
    return jax.eval_shape(lambda p: step.create_state(p, tx, 0.9), params)


@pytest.mark.parametrize("sizes", [dict(data=4), dict(data=4, fsdp=2)])
def test_zero_splits_optimizer_state_and_averages_over_data_but_no_parameters(state, sizes):
    mesh = meshes.abstract_mesh(ONE | sizes)
    plain = scan_layout.flatten(sharding.param_specs(state, mesh))
    zero = scan_layout.flatten(sharding.param_specs(state, mesh, zero=True))
    params = {name: place.spec for name, place in zero.items() if name.startswith("params/")}
    assert params == {name: plain[name].spec for name in params}
    split = {name for name, place in zero.items() if "data" in split_axes(place.spec)}
    kernel = "Transformer/encoderblock_3/MlpBlock_3/Dense_0/kernel"
    kernels = {name for name in zero if name.endswith(kernel)}
    assert kernels & split == kernels - {f"params/{kernel}"}
    assert len(kernels & split) == 3  # both moments and the average
    assert not any("data" in split_axes(place.spec) for place in plain.values())


class Device(types.SimpleNamespace):
    """A chip of a slice that does not exist."""

    __hash__ = object.__hash__


def two_slices() -> list[Device]:
    """2 x 4 chips each, in an order that mixes the slices."""
    common = dict(core_on_chip=0, process_index=0, platform="tpu", device_kind="TPU v5 lite")
    return [
        Device(id=8 * index + 2 * y + x, coords=(x, y, 0), slice_index=index, **common)
        for y in range(4)
        for x in range(2)
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        (dict(replica=2, data=-1), 0),
        (dict(replica=2, fsdp=8), 0),
        (dict(replica=4, data=2, tensor=2), 0),
        (dict(data=-1), 1),
        (dict(data=4, fsdp=2, tensor=2), 1),
    ],
)
def test_slices_lie_along_replica_or_else_along_data(sizes, axis):
    devices = meshes.make_mesh(ONE | sizes, two_slices()).devices
    assert len({device.id for device in devices.flat}) == 16
    slices = np.vectorize(lambda device: device.slice_index)(devices)
    half = devices.shape[axis] // 2
    first, second = np.split(slices, [half], axis)
    assert (first == 0).all() and (second == 1).all()


def test_slices_that_would_be_divided_are_refused_with_what_to_do():
    message = "replica=1 and data=1, but the devices form 2 slices: make --config.mesh.replica a "
    message += "multiple of 2"
    with pytest.raises(UserError, match=message):
        meshes.make_mesh(ONE | dict(fsdp=16), two_slices())
