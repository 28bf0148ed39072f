"""The mesh, the rules, and where parameters live."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import vit_jax
from vit_jax import adapt, layout, sharding
from vit_jax.errors import UserError

ONE = dict(replica=1, data=1, fsdp=1, tensor=1)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [(dict(data=-1), (1, 8, 1, 1)), (dict(data=-1, tensor=2), (1, 4, 1, 2)), (dict(fsdp=-1, data=2), (1, 2, 4, 1))],
)
def test_one_axis_takes_what_remains(sizes, shape):
    assert tuple(sharding.make_mesh(ONE | sizes).shape.values()) == shape


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
        sharding.make_mesh(ONE | sizes)


def test_constrain_knows_its_axes_and_does_nothing_without_a_mesh():
    x = jnp.ones((8, 2))
    assert sharding.constrain(x, "batch", "embed") is x
    with pytest.raises(ValueError, match="unknown logical axis 'batchs'"):
        sharding.constrain(x, "batchs", "embed")
    with pytest.raises(ValueError, match="one logical axis per dimension"):
        sharding.constrain(x, "batch")
    with jax.set_mesh(sharding.make_mesh(ONE | dict(data=8))):
        out = jax.jit(lambda x: sharding.constrain(x, "batch", None))(x)
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 2)}


def test_tensor_parallelism_splits_heads_and_mlp_and_fsdp_the_rest():
    model = vit_jax.create_model("S/16", num_classes=1000)
    mesh = sharding.make_mesh(ONE | dict(fsdp=4, tensor=2))
    specs = {k: v.spec for k, v in layout.flatten(sharding.param_specs(adapt.abstract_params(model), mesh)).items()}
    block = "Transformer/encoderblock_3"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    assert specs[f"{attention}/query/kernel"] == PartitionSpec("fsdp", "tensor", None)
    assert specs[f"{attention}/query/bias"] == PartitionSpec("tensor", None)
    assert specs[f"{attention}/out/kernel"] == PartitionSpec("tensor", None, "fsdp")
    assert specs[f"{block}/MlpBlock_3/Dense_0/kernel"] == PartitionSpec("fsdp", "tensor")
    assert specs[f"{block}/MlpBlock_3/Dense_1/kernel"] == PartitionSpec("tensor", "fsdp")
    assert specs[f"{block}/LayerNorm_0/scale"] == PartitionSpec(None)  # vectors stay whole
    assert specs["head/kernel"] == PartitionSpec("fsdp", None)  # 1,000 classes do not make 4 shards of 8 rows


def test_scanned_layers_are_split_like_single_ones():
    model = vit_jax.create_model("S/16", scan=True)
    mesh = sharding.make_mesh(ONE | dict(fsdp=4, tensor=2))
    specs = layout.flatten(sharding.param_specs(adapt.abstract_params(model), mesh))
    query = specs["Transformer/encoderblock/MultiHeadDotProductAttention_1/query/kernel"].spec
    assert query == PartitionSpec(None, "fsdp", "tensor", None)


@pytest.mark.parametrize(
    ("sizes", "wanted"), [(dict(data=8), 8), (dict(data=2, tensor=4), 2), (dict(fsdp=4, data=2), 8)]
)
def test_local_rows_are_all_rows_of_a_single_process_and_must_divide(sizes, wanted):
    mesh = sharding.make_mesh(ONE | sizes)
    np.testing.assert_array_equal(sharding.local_rows(mesh, 16), np.arange(16))
    with pytest.raises(UserError, match=f"batch_size=15 is not divisible by the {wanted} devices"):
        sharding.local_rows(mesh, 15)


def test_tensor_parallelism_must_divide_the_model():
    mesh = sharding.make_mesh(ONE | dict(tensor=8))
    with pytest.raises(UserError, match="tensor=8 does not divide the model's num_heads=12"):
        sharding.check_model(vit_jax.create_model("B/16"), mesh)
