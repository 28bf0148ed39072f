"""The ResNets of BiT against the numbers of big_vision and of the code that the published weights
come from.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import below, golden

import vit_jax
from vit_jax import config as configs
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import create, losses
from vit_jax.train import step
from vit_jax.train.objectives import classify
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights.formats import bit

# The two implementations differ in what the max-pool of the root reads outside of the image.
TRUTHS = {"lowest": "logits_f64", "zeros": "logits_original"}


def load(name, **overrides):
    """A golden case: (arrays, model, params)."""
    arrays, _ = golden(name)
    flat = bit.read(below(arrays, "params"))
    model = create.create(
        **bit.infer_fields(flat) | overrides, image_size=arrays["inputs"].shape[1:3]
    )
    return arrays, model, scan_layout.unflatten(flat)


def apply(model, params, image):
    """Logits; compiled as a whole, which is faster than one operation after another."""
    return jax.jit(lambda params, image: model.apply({"params": params}, image))(params, image)


@pytest.mark.parametrize(("pool_padding", "key"), TRUTHS.items())
@pytest.mark.parametrize("name", ["bit_r14like", "bit_grad"])
def test_logits_equal_the_published_implementations(name, pool_padding, key):
    arrays, model, params = load(name, pool_padding=pool_padding)
    logits = apply(model, params, arrays["inputs"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, arrays[key], atol=1e-5, rtol=1e-5)
    other = arrays[TRUTHS["zeros" if pool_padding == "lowest" else "lowest"]]
    assert np.abs(logits - other).max() > 1e-3  # the golden data tell them apart


def test_gradients_equal_big_vision():
    arrays, model, params = load("bit_grad", pool_padding="lowest")

    def loss(params):
        logits = model.apply({"params": params}, arrays["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, arrays["labels"]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(value - arrays["loss"]) <= 1e-5
    grads, truth = bit.write(scan_layout.flatten(grads)), below(arrays, "grads")
    assert grads.keys() == truth.keys()
    for key, wanted in truth.items():
        assert grads[key].shape == wanted.shape
        assert np.abs(grads[key] - wanted).max() <= 1e-4 * np.abs(wanted).max(), key


def test_the_grid_and_intermediates_at_an_odd_image_size():
    arrays, model, params = load("bit_r14like")
    held = jax.jit(lambda p, x: model.apply({"params": p}, x, mutable=["intermediates"])[1])(
        params, arrays["inputs"]
    )
    held = held["intermediates"]
    assert model.image_size == (45, 64) and model.cell == (16, 16) and model.num_prefix == 0
    assert held["stem"][0].shape == (2, 12, 16, 32)
    assert held["block2"]["output"][0].shape == (2, 6, 8, 256)
    assert held["encoded"][0].shape == (2, *model.grid, model.width) == (2, 3, 4, 512)
    features = apply(model.clone(num_classes=0), params, arrays["inputs"])
    np.testing.assert_allclose(features, held["pre_logits"][0], atol=1e-6)
    np.testing.assert_allclose(features, held["encoded"][0].mean(axis=(1, 2)), atol=1e-6)


def test_named_models_have_cells_of_32_pixels():
    model = vit_jax.create_model("R101x3", image_size=(224, 200))
    assert (model.cell, model.grid, model.width, model.units) == (
        (32, 32),
        (7, 7),
        6144,
        (3, 4, 23, 3),
    )


def test_bfloat16_compute_keeps_float32_parameters_and_stays_close():
    arrays, model, params = load("bit_r14like", dtype="bfloat16")
    logits = apply(model, params, arrays["inputs"])
    fresh = adapt.abstract_params(model)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(fresh))
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa: about 2^-8 relative per operation, some twenty operations deep.
    assert (
        np.abs(logits - arrays["logits_original"]).max()
        <= 0.1 * np.abs(arrays["logits_original"]).max()
    )


def test_training_steps_reach_every_parameter():
    model = create.create(
        architecture="bit", units=(1, 1), width_factor=0.5, num_classes=10, image_size=16
    )
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    assert not np.any(params["head"]["kernel"])
    tx = optax.sgd(0.1)

    objective = classify.Classify(model, losses.softmax_xent)
    options = dict(preprocess=make_preprocess(configs.defaults(), model.normalize, 10), seed=0)
    train_step = jax.jit(step.make_train_step(objective, tx, lambda _: 0.1, **options))
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (8, 16, 16, 3), np.uint8)
    batch = dict(image=image, label=np.arange(8, dtype=np.int32), mask=np.ones(8, np.float32))
    batch["seed"] = np.zeros((8, 2), np.int32)
    state, found = step.create_state(params, tx, 0.0), []
    for _ in range(3):
        state, metrics = train_step(state, batch)
        found.append(float(metrics["train/loss"]))
    assert abs(found[0] - np.log(10)) <= 1e-5 and found[2] < found[1] < found[0]
    after = scan_layout.flatten(state.params)
    for name, before in scan_layout.flatten(params).items():
        assert np.abs(after[name] - before).max() > 0, name


def test_a_mesh_changes_no_number():
    arrays, model, params = load("bit_grad")
    image = jnp.tile(arrays["inputs"][:2], (2, 1, 1, 1))
    wanted = apply(model, params, image)
    mesh = meshes.make_mesh(dict(replica=1, data=2, fsdp=2, tensor=2))
    sharding.check_model(model, mesh)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.param_specs(params, mesh))
        compiled = jax.jit(lambda params, image: model.apply({"params": params}, image))
        logits = compiled(placed, jax.device_put(image, sharding.batch_sharding(mesh)))
        text = compiled.lower(placed, image).as_text()
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    assert text.count("sharding_constraint") == 1 + sum(model.units)


def test_published_names_go_both_ways():
    published = below(golden("bit_r14like")[0], "params")
    assert bit.is_bit(published)
    params = bit.read(published)
    assert bit.is_bit(params) and not bit.is_bit({"conv_root/kernel": 0, "cls": 0})
    assert (
        params["head/kernel"].shape == (512, 10)
        and published["resnet/head/conv2d/kernel"].ndim == 4
    )
    back = bit.write(params)
    assert back.keys() == published.keys()
    for name, value in published.items():
        np.testing.assert_array_equal(back[name], value)
    assert bit.infer_fields(params) == dict(
        architecture="bit", units=(1, 2, 1), width_factor=0.5, num_classes=10
    )


def test_numbered_convolutions_and_big_visions_names_are_read():
    published = below(golden("bit_grad")[0], "params")
    wanted = bit.read(published)
    numbered = {
        name.replace("/c/standardized_conv2d/", "/c/standardized_conv2d_7/"): published[name]
        for name in published
    }
    big_vision = {
        f"params/{name}": value.reshape(1, 1, 1, -1)
        if name.endswith(("scale", "bias")) and "head/" not in name
        else value
        for name, value in wanted.items()
    }
    assert "params/norm-pre-head/scale" in big_vision
    for held in (numbered, big_vision, wanted):
        assert bit.is_bit(held)
        found = bit.read(held)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)


def test_every_parameter_of_a_named_model_has_its_published_name():
    flat = scan_layout.flatten(
        adapt.abstract_params(vit_jax.create_model("R50x1", num_classes=21843))
    )
    held = bit.write(
        {name: np.broadcast_to(np.float32(0), leaf.shape) for name, leaf in flat.items()}
    )
    # 16 units of 9 arrays, 4 projections, root, last GroupNorm, head.
    assert len(held) == 16 * 9 + 4 + 1 + 2 + 2
    assert held["resnet/block4/unit03/b/standardized_conv2d/kernel"].shape == (3, 3, 512, 512)
    assert held["resnet/block1/unit01/a/proj/standardized_conv2d/kernel"].shape == (1, 1, 64, 256)
    assert held["resnet/head/conv2d/kernel"].shape == (1, 1, 2048, 21843)
    fields = bit.infer_fields(bit.read(held))
    assert fields == dict(architecture="bit", units=(3, 4, 6, 3), width_factor=1, num_classes=21843)


def test_damaged_weights_are_named():
    held = below(golden("bit_grad")[0], "params")
    params = bit.read(held)
    kernel = "resnet/block1/unit01/a/standardized_conv2d/kernel"
    with pytest.raises(UserError, match=r"resnet/block1/unit01/d/kernel is not a parameter"):
        bit.read(held | {"resnet/block1/unit01/d/kernel": np.zeros(1)})
    with pytest.raises(UserError, match=r"kernel has shape \(3,\)"):
        bit.read(held | {kernel: np.zeros(3)})
    with pytest.raises(UserError, match=r"gamma has shape \(2, 32\)"):
        bit.read(held | {"resnet/group_norm/gamma": np.zeros((2, 32))})
    with pytest.raises(UserError, match="conv2d_1/kernel comes twice"):
        bit.read(held | {kernel.replace("conv2d/", "conv2d_1/"): held[kernel]})
    with pytest.raises(UserError, match="cls is not a parameter"):
        bit.write(params | {"cls": np.zeros(1)})

    def without(prefix):
        return {name: value for name, value in params.items() if not name.startswith(prefix)}

    with pytest.raises(UserError, match="no root_block/conv_root/kernel"):
        bit.infer_fields(without("root_block"))
    with pytest.raises(UserError, match=r"root_block/conv_root/kernel has shape \(3,\)"):
        bit.infer_fields(params | {"root_block/conv_root/kernel": np.zeros(3)})
    with pytest.raises(UserError, match=r"stages \[2\]"):
        bit.infer_fields(without("block1"))
    with pytest.raises(UserError, match=r"block1 has the units \[2\]"):
        bit.infer_fields(without("block1") | {"block1/unit02/gn1/scale": np.zeros(32)})
    assert bit.infer_fields(without("head"))["num_classes"] == 0


def test_fields_are_json_and_build_the_same_model():
    model = vit_jax.create_model(
        "R152x2", image_size=(64, 96), dtype="bfloat16", pool_padding="lowest"
    )
    fields = json.loads(json.dumps(create.fields(model)))
    assert fields["architecture"] == "bit" and create.create(**fields) == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(variant="R34x1"), "unknown variant 'R34x1': known ResNets are R50x"),
        (dict(variant="R50x0"), "unknown variant 'R50x0'"),
        (dict(variant="R50x1", units=()), "one or more stages"),
        (dict(variant="R50x1", units=(3, 0)), "at least 1 bottleneck"),
        (
            dict(variant="R50x1", width_factor=0.6),
            "38 features, .* 32 groups: use a multiple of 0.5",
        ),
        (dict(variant="R50x1", width_factor=0), "0 features"),
        (dict(variant="R50x1", pool_padding="same"), "pool_padding 'same' is unknown"),
        (dict(variant="R50x1", droppath=0.1), "unknown model field 'droppath' of bit"),
    ],
)
def test_bad_models_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model(**arguments)
