"""Attention compiled for TPUs without a TPU: which kernel is used, communication, and memory."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models import encoder
from vit_jax.models.ops import attention

pytestmark = pytest.mark.plan

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce")


@pytest.fixture(scope="module")
def devices():
    """Four v5e chips, as the compiler sees them."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    os.environ |= dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def compiled(function, mesh, x, *others):
    """Forward and backward pass of `function`, whose output has the shape of `x`, on a described
    mesh.
    """

    def step(x, *others):
        y, vjp = jax.vjp(function, x, *others)
        return y, *vjp(y)

    with jax.set_mesh(mesh):
        return jax.jit(step).lower(x, *others).compile()


def placed(mesh, shape, dtype, *axes):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.NamedSharding(mesh, sharding.spec(*axes))
    )


# A length that makes one block, one that makes two; widths of H, g and G; what float32 adds to the
# memory of a kernel.
@pytest.mark.parametrize(
    ("length", "width", "dtype"),
    [(600, 80, "bfloat16"), (1370, 104, "bfloat16"), (1370, 88, "float32"), (2305, 64, "bfloat16")],
)
def test_auto_takes_splash_which_every_device_computes_alone(devices, length, width, dtype):
    mesh = meshes.make_mesh(dict(replica=1, data=2, fsdp=1, tensor=2), devices)
    function = lambda x: attention.attend(x, x, x, x.dtype, jnp.float32)  # noqa: E731
    program = compiled(
        function, mesh, placed(mesh, (2, length, 4, width), dtype, "batch", "length", "heads", "kv")
    )
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert not any(f" {word}(" in text for word in COLLECTIVES)
    # Of either example and head, the scores alone are length^2 float32: einsum holds several of
    # those.
    assert program.memory_analysis().temp_size_in_bytes < 2 * length * length * 4 + 16 * 2**20


def test_a_scanned_and_rematerialised_encoder_takes_splash_and_much_less_memory(devices):
    mesh = meshes.make_mesh(dict(replica=1, data=4, fsdp=1, tensor=1), devices)
    x = placed(mesh, (256, 600, 256), jnp.bfloat16, "batch", "length", "embed")
    temporary = {}
    for way in ("auto", "einsum"):
        layers = encoder.Encoder(
            2, 256, 4, posemb="none", scan=True, remat="full", dtype=jnp.bfloat16, attention=way
        )
        params = jax.eval_shape(layers.init, jax.random.key(0), jnp.zeros((1, 600, 256)), (20, 30))
        params = jax.tree.map(lambda leaf: placed(mesh, leaf.shape, leaf.dtype), params)
        program = compiled(
            lambda x, params, layers=layers: layers.apply(params, x, (20, 30)), mesh, x, params
        )
        assert ("tpu_custom_call" in program.as_text()) == (way == "auto")
        temporary[way] = program.memory_analysis().temp_size_in_bytes
    assert temporary["auto"] < 0.7 * temporary["einsum"]


def test_no_square_of_scores_is_copied_with_128_images_per_chip(devices):
    """The compiler by itself puts the images last in memory and copies each of the squares to and
    fro.
    """
    mesh = meshes.make_mesh(dict(replica=1, data=4, fsdp=1, tensor=1), devices)
    x = placed(mesh, (4 * 128, 197, 768), jnp.bfloat16, "batch", "length", "embed")
    layers = encoder.Encoder(2, 3072, 12, posemb="none", dtype=jnp.bfloat16)
    params = jax.eval_shape(layers.init, jax.random.key(0), jnp.zeros((1, 197, 768)), (14, 14))
    params = jax.tree.map(lambda leaf: placed(mesh, leaf.shape, leaf.dtype), params)
    text = compiled(lambda x, params: layers.apply(params, x, (14, 14)), mesh, x, params).as_text()
    squares = re.findall(r"= \w+\[128,12,197,197\]\S* ([\w-]+)\(", text)
    assert squares and "copy" not in squares
