"""Attention compiled for TPUs without a TPU: which kernel is used, communication, and memory."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models import encoder
from vit_jax.models.ops import attention, short_attention

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


# For splash a length that makes one block, and one that makes two; widths of H, g and G; what
# float32 adds to the memory of a kernel. For `short` the longest sequences, and the widest blocks.
@pytest.mark.parametrize(
    ("way", "length", "heads", "width", "dtype"),
    [
        ("splash", 700, 4, 80, "bfloat16"),
        ("splash", 1370, 4, 104, "bfloat16"),
        ("splash", 1370, 4, 88, "float32"),
        ("splash", 2305, 4, 64, "bfloat16"),
        ("short", 640, 4, 64, "float32"),
        ("short", 600, 4, 80, "bfloat16"),
        ("short", 257, 32, 80, "float32"),
        ("short", 256, 32, 104, "bfloat16"),
    ],
)
def test_auto_takes_a_kernel_which_every_device_computes_alone(
    devices, way, length, heads, width, dtype
):
    mesh = meshes.make_mesh(dict(replica=1, data=2, fsdp=1, tensor=2), devices)
    function = lambda x: attention.attend(x, x, x, x.dtype, jnp.float32)  # noqa: E731
    x = placed(mesh, (2, length, heads, width), dtype, "batch", "length", "heads", "kv")
    program = compiled(function, mesh, x)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    assert (f"{short_attention.NAME}{width}" in text) == (way == "short")
    assert not any(f" {word}(" in text for word in COLLECTIVES)
    # Of either example and head, the scores alone are length^2 float32: einsum holds several of
    # those.
    limit = heads // 2 * length * length * 4 + 16 * 2**20
    assert program.memory_analysis().temp_size_in_bytes < limit


@pytest.mark.parametrize("rows", [20, 24])
def test_a_scanned_and_rematerialised_encoder_takes_a_kernel_and_much_less_memory(devices, rows):
    """`short` for 600 tokens, splash for 720."""
    mesh = meshes.make_mesh(dict(replica=1, data=4, fsdp=1, tensor=1), devices)
    length = 30 * rows
    x = placed(mesh, (256, length, 256), jnp.bfloat16, "batch", "length", "embed")
    temporary = {}
    for way in ("auto", "einsum"):
        layers = encoder.Encoder(
            2, 256, 4, posemb="none", scan=True, remat="full", dtype=jnp.bfloat16, attention=way
        )
        params = jax.eval_shape(
            layers.init, jax.random.key(0), jnp.zeros((1, length, 256)), (rows, 30)
        )
        params = jax.tree.map(lambda leaf: placed(mesh, leaf.shape, leaf.dtype), params)
        program = compiled(
            lambda x, params, layers=layers: layers.apply(params, x, (rows, 30)), mesh, x, params
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
    options = dict(posemb="none", dtype=jnp.bfloat16, attention="einsum")
    layers = encoder.Encoder(2, 3072, 12, **options)
    params = jax.eval_shape(layers.init, jax.random.key(0), jnp.zeros((1, 197, 768)), (14, 14))
    params = jax.tree.map(lambda leaf: placed(mesh, leaf.shape, leaf.dtype), params)
    text = compiled(lambda x, params: layers.apply(params, x, (14, 14)), mesh, x, params).as_text()
    squares = re.findall(r"= \w+\[128,12,197,197\]\S* ([\w-]+)\(", text)
    assert squares and "copy" not in squares
