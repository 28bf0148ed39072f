"""Every way to compute attention against einsum in float32, its memory, and which one is taken
where.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from vit_jax import config as configs
from vit_jax.distributed import hardware, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models.ops import attention, blockwise, einsum, short_attention, splash
from vit_jax.weights import scan_layout

WAYS = dict(
    blockwise=blockwise.blockwise,
    short=functools.partial(short_attention.short_attention, interpret=True),
    splash=functools.partial(splash.splash, interpret=True),
)


def inputs(
    length: int, width: int, batch: int = 3, heads: int = 2, other: int = 0, dtype=jnp.float32
):
    """Query, key, value and the gradient of the output; scores spread over some units, as those of
    a trained model.
    """
    keys = jax.random.split(jax.random.key(length + width), 4)
    lengths = (length, other or length, other or length, length)
    return [
        2 * jax.random.normal(k, (batch, n, heads, width), dtype)
        for k, n in zip(keys, lengths, strict=True)
    ]


def reference(query, key, value):
    return einsum.weighted(einsum.attention_weights(query, key, jnp.float32), value)


@functools.partial(jax.jit, static_argnums=0)
def outputs(function, query, key, value, gradient):
    """The output, and the gradients of query, key and value."""
    y, vjp = jax.vjp(function, query, key, value)
    return y, *vjp(gradient)


def assert_close(found, truth, share):
    for name, one, other in zip(("output", "query", "key", "value"), found, truth, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        assert np.isfinite(one).all(), name
        assert np.abs(one - other).max() <= share * np.abs(other).max(), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("length", "width"), [(5, 64), (17, 80), (197, 64), (300, 80)])
def test_outputs_and_gradients_equal_einsum(way, length, width, monkeypatch):
    """Both sum in float32, in another order: 1e-5 of the largest value."""
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 128)
    arrays = inputs(length, width)
    assert_close(outputs(WAYS[way], *arrays), outputs(reference, *arrays), 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_several_blocks_of_queries_and_keys_equal_einsum(way, monkeypatch):
    """Two blocks of 150 keys, which divide the length, and blocks of both that do not."""
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 150)
    monkeypatch.setattr(splash, "MAX_ROWS", 512)
    monkeypatch.setattr(splash, "MAX_TILE", 2**15)
    monkeypatch.setattr(short_attention, "MAX_REGISTERS", 256)
    if way == "splash":
        assert splash.splash_blocks(300, 300, 4) == (512, 512, 256, 256, 128)
    arrays = inputs(300, 64, heads=4)
    if way == "short":
        assert short_attention.block_width(300, 300, 256, 64, 4) == 128
    assert_close(outputs(WAYS[way], *arrays), outputs(reference, *arrays), 1e-5)


@pytest.mark.parametrize(("heads", "width"), [(4, 32), (3, 64), (8, 80), (2, 104), (3, 200)])
def test_short_heads_may_share_registers_or_take_several(heads, width):
    """Of 128 channels: a head is a part of one, lies in two, or takes more than one."""
    arrays = inputs(20, width, heads=heads, other=11)
    assert_close(outputs(WAYS["short"], *arrays), outputs(reference, *arrays), 1e-5)


def test_a_step_of_short_takes_as_many_heads_as_fit():
    """Of the models of the papers with 224 and 384 pixels; 0 if a sequence is too long."""
    widths = functools.partial(short_attention.block_width, itemsize=2)
    assert widths(197, 197, 1024, 64) == 1024
    assert widths(577, 577, 1024, 64) == 128
    assert widths(257, 257, 1280, 80) == 640  # the fewest heads of 80 that fill registers
    assert widths(256, 256, 1408, 88) == 1408
    assert widths(256, 256, 1664, 104) == 1664
    assert widths(197, 197, 192, 64) == 192
    assert widths(785, 785, 1024, 64) == 0
    assert widths(577, 577, 1280, 80) == 0


def test_a_chip_with_little_memory_takes_smaller_steps(monkeypatch):
    """G/14 would need 16.5 MiB with the registers that are spilled; v4 has 16."""
    monkeypatch.setattr(hardware, "kernel_bytes", lambda: hardware.KERNEL_BYTES["TPU v4"])
    assert short_attention.block_width(256, 256, 1664, 104, 2) == 0
    assert short_attention.block_width(256, 256, 1408, 88, 2) == 1408


@pytest.mark.parametrize("way", WAYS)
def test_queries_may_be_fewer_than_keys(way):
    arrays = inputs(1, 64, other=50)
    assert_close(outputs(WAYS[way], *arrays), outputs(reference, *arrays), 1e-5)


def test_bfloat16_is_as_precise_as_einsum():
    """Largest errors: at most twice those of einsum with a float32 softmax."""
    arrays = inputs(197, 64, dtype=jnp.bfloat16)
    truth = outputs(reference, *(x.astype(jnp.float32) for x in arrays))
    rounded = outputs(reference, *arrays)
    for way in WAYS.values():
        for one, other, wanted in zip(outputs(way, *arrays), rounded, truth, strict=True):
            assert one.dtype == jnp.bfloat16
            assert np.abs(one - wanted).max() <= 2 * np.abs(other - wanted).max()


@pytest.mark.parametrize(
    ("way", "batch"), [("blockwise", 8), ("short", 8), ("short", 1), ("splash", 8), ("splash", 1)]
)
def test_every_device_computes_its_own_examples_and_heads(way, batch):
    """On a mesh, also with one example, which does not divide: the same numbers, and no device
    talks to another.
    """
    mesh = meshes.make_mesh(dict(replica=2, data=1, fsdp=2, tensor=2))
    arrays = inputs(17, 64, batch=batch)
    truth = outputs(reference, *arrays)
    with jax.set_mesh(mesh):
        wanted = sharding.spec("batch" if batch > 1 else None, None, "heads", None)
        placed = [jax.device_put(x, jax.NamedSharding(mesh, wanted)) for x in arrays]
        run = jax.jit(outputs, static_argnums=0).lower(
            functools.partial(attention.on_every_device, WAYS[way]), *placed
        )
        compiled = run.compile()
        found = compiled(*placed)
    assert_close(found, truth, 1e-5)
    assert all(x.sharding.spec == wanted or batch == 1 for x in found)
    if batch > 1:
        assert not any(
            word in compiled.as_text()
            for word in ("all-gather", "all-to-all", "collective-permute")
        )


@pytest.mark.parametrize("way", WAYS)
def test_remat_and_scan_change_no_number(way):
    query, key, value, gradient = inputs(17, 64)

    def layers(function):
        def run(query, key, value):
            return jax.lax.scan(lambda x, _: (x + function(x, key, value), None), query, length=2)[
                0
            ]

        return run

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    found = outputs(layers(jax.checkpoint(WAYS[way], policy=policy)), query, key, value, gradient)
    assert_close(found, outputs(layers(reference), query, key, value, gradient), 1e-5)


def test_memory_of_blockwise_grows_with_the_tokens_and_not_with_their_square():
    def temporary(function, length):
        shapes = [jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)] * 4
        return outputs.lower(function, *shapes).compile().memory_analysis().temp_size_in_bytes

    small, large = (temporary(blockwise.blockwise, length) for length in (1024, 4096))
    assert large <= 4.4 * small
    assert temporary(reference, 4096) >= 4 * large


# Of 144 tokens, 197, 196, 256, 576, 577 and 1,370.
CHOICES = {
    ("tpu", "bfloat16"): ["short"] * 4 + ["splash"] * 3,
    ("tpu", "float32"): ["short"] * 4 + ["splash"] * 3,
    ("cuda", "bfloat16"): ["einsum"] * 2 + ["cudnn"] * 5,
    ("cuda", "float32"): ["einsum"] * 4 + ["blockwise"] * 3,
    ("gpu", "bfloat16"): ["einsum"] * 4 + ["blockwise"] * 3,
    ("cpu", "float32"): ["einsum"] * 4 + ["blockwise"] * 3,
}


@pytest.mark.parametrize(("platform", "dtype"), CHOICES)
def test_auto_chooses_by_length_platform_and_dtype(platform, dtype):
    lengths = (144, 197, 196, 256, 576, 577, 1370)
    shapes = [jax.ShapeDtypeStruct((8, length, 16, 80), dtype) for length in lengths]
    found = [attention.choose("auto", x, x, platform) for x in shapes]
    assert found == CHOICES[platform, dtype]
    probe = jax.ShapeDtypeStruct((8, 1, 16, 80), dtype)
    for wanted in ("auto", "blockwise"):
        assert attention.choose(wanted, probe, shapes[-1], platform) == "einsum"
    for wanted in ("einsum", "blockwise"):
        assert attention.choose(wanted, shapes[0], shapes[0], platform) == wanted


def test_heads_that_cudnn_does_not_take_are_computed_in_blocks():
    x = jax.ShapeDtypeStruct((8, 1370, 4, 100), jnp.bfloat16)
    assert attention.choose("auto", x, x, "cuda") == "blockwise"


def test_the_platform_is_that_of_the_mesh():
    assert hardware.platform() == "cpu"
    fields = dict(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    known = inspect.signature(jax.sharding.AbstractDevice).parameters
    device = jax.sharding.AbstractDevice(**{key: fields[key] for key in known})
    types = (jax.sharding.AxisType.Auto,) * len(meshes.AXES)
    mesh = jax.sharding.AbstractMesh((1, 4, 1, 1), meshes.AXES, types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert hardware.platform() == "tpu"
        found = jax.eval_shape(
            lambda x: attention.attend(x, x, x, x.dtype, jnp.float32),
            inputs(600, 64, 4, dtype=jnp.bfloat16)[0],
        )
        assert found.shape == (4, 600, 2, 64)


@pytest.mark.parametrize("options", [dict(pool="map"), dict(depth=2, scan=True, remat="full")])
def test_the_whole_model_gives_the_same_logits_and_gradients(options):
    """Of einsum on one device and blockwise on eight."""
    sizes = dict(
        width=32,
        depth=1,
        mlp_dim=64,
        num_heads=2,
        patch_size=4,
        image_size=32,
        num_classes=5,
        head_std=1.0,
    )
    model = vit_jax.create_model(**(sizes | options), attention="einsum")
    image = jax.random.normal(jax.random.key(1), (4, 32, 32, 3))
    params = jax.jit(model.init)(jax.random.key(0), image)["params"]

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params):
        def loss(params):
            logits = model.apply({"params": params}, image)
            return jnp.square(logits).sum(), logits

        return jax.grad(loss, has_aux=True)(params)

    grads, logits = run(model, params)
    with jax.set_mesh(meshes.make_mesh(dict(replica=2, data=1, fsdp=2, tensor=2))):
        other_grads, other_logits = run(model.clone(attention="blockwise"), params)
    assert np.abs(other_logits - logits).max() <= 1e-5 * np.abs(logits).max()
    grads, other_grads = scan_layout.flatten(grads), scan_layout.flatten(other_grads)
    largest = max(np.abs(x).max() for x in grads.values())
    for name, wanted in grads.items():
        assert np.abs(other_grads[name] - wanted).max() <= 1e-5 * largest, name


@pytest.mark.parametrize("options", [{}, dict(posemb="relative")])
def test_weights_are_still_there_when_asked_for(options):
    sizes = dict(
        width=32,
        depth=1,
        mlp_dim=64,
        num_heads=2,
        patch_size=4,
        image_size=32,
        num_classes=5,
        **options,
    )
    image = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    held, logits = {}, {}
    for way in ("einsum", "blockwise", "short", "splash"):
        model = vit_jax.create_model(**sizes, attention=way)
        if way == "einsum":
            params = jax.jit(model.init)(jax.random.key(0), image)["params"]
        logits[way], state = model.apply({"params": params}, image, mutable=["intermediates"])
        block = state["intermediates"]["Transformer"]["encoderblock_0"]
        held[way] = block["MultiHeadDotProductAttention_1"]["weights"][0]
        assert held[way].shape == (2, 2, 65, 65)
        np.testing.assert_array_equal(held[way], held["einsum"])
        np.testing.assert_array_equal(logits[way], logits["einsum"])


def test_what_cannot_run_is_named(tmp_path):
    image = jnp.zeros((1, 16, 16, 3))
    model = vit_jax.create_model("Ti/16", image_size=16, attention="splash")
    with pytest.raises(
        UserError, match="attention=splash runs on TPUs, not on cpu: use auto or blockwise"
    ):
        model.init(jax.random.key(0), image)
    x = jax.ShapeDtypeStruct((8, 785, 16, 64), jnp.bfloat16)
    with pytest.raises(
        UserError,
        match="attention=short holds the scores on the chip, which 785 queries and 785 keys of 16 "
        "heads of 64 channels in bfloat16 exceed: use auto or splash",
    ):
        attention.choose("short", x, x, "tpu")
    model = vit_jax.create_model("Ti/16", image_size=16, attention="cudnn", dtype="bfloat16")
    with pytest.raises(
        UserError,
        match="attention=cudnn runs on NVIDIA GPUs from Ampere on, not on cpu: use auto or",
    ):
        model.init(jax.random.key(0), image)
    with pytest.raises(
        UserError, match="attention=cudnn does not compute in float32: use dtype=bfloat16"
    ):
        vit_jax.create_model("Ti/16", attention="cudnn")
    with pytest.raises(
        UserError,
        match="at most 128 channels, a multiple of 8, and these have 100: use attention=auto",
    ):
        vit_jax.create_model("Ti/16", width=400, num_heads=4, attention="cudnn", dtype="bfloat16")
    with pytest.raises(
        UserError,
        match="attention 'flash' is unknown: use one of auto, einsum, short, splash, cudnn",
    ):
        vit_jax.create_model("Ti/16", attention="flash")
    path = tmp_path / "config.py"
    path.write_text("def get_config():\n    return {'model': {'attention': 'cudnn'}}\n")
    with pytest.raises(
        UserError, match=r"attention=cudnn does not compute in float32: set model\.dtype=bfloat16"
    ):
        configs.load(str(path))
    assert configs.load(str(path), ["--config.model.dtype=bfloat16"]).model.attention == "cudnn"
    with pytest.raises(
        UserError,
        match=r"model\.attention='flash' is not one of auto, einsum, short, splash, cudnn, blockwise",
    ):
        configs.load(str(path), ["--config.model.attention=flash"])
