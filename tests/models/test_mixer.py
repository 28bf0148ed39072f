"""The MLP-Mixer against the published implementation's numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import applied, below, features_of, golden, metric_lines

import vit_jax
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.train import __main__ as train
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights.formats import mixer

TRAINED = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.total_steps = 2
    config.image_size = 8
    config.log_every = 1
    config.pictures_every = 1
    config.model = dict(variant="Mixer-S/4", width=32, depth=2, droppath=0.1)
    config.data = dict(name="digits", batch_size=64)
    config.optim = dict(lr=1e-3, warmup_steps=1)
    return config
"""


def load(name, **overrides):
    """A golden case: (arrays, config, model, params)."""
    arrays, config = golden(name)
    flat = below(arrays, "params")
    fields = mixer.infer_fields(flat) | overrides
    model = create.create(**fields, image_size=arrays["inputs"].shape[1:3])
    return arrays, config, model, scan_layout.unflatten(flat)


@pytest.mark.parametrize("name", ["mixer_p8", "grad_mixer"])
def test_logits_equal_the_published_implementation(name):
    arrays, config, model, params = load(name)
    logits = applied(model, params, arrays["inputs"])
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, arrays["logits_f64"], atol=2e-5, rtol=2e-5)
    found = (
        model.width,
        model.depth,
        model.tokens_mlp_dim,
        model.channels_mlp_dim,
        list(model.patch_size),
    )
    wanted = ("hidden_dim", "num_blocks", "tokens_mlp_dim", "channels_mlp_dim")
    assert found == (*(config[key] for key in wanted), config["patches"]["size"])


def test_intermediates_equal_the_published_implementation():
    arrays, _, model, params = load("mixer_p8")
    _, held = applied(model, params, arrays["inputs"], mutable=["intermediates"])
    held = held["intermediates"]
    found = {
        "inter/stem": held["tokens"][0].reshape(3, *model.grid, 48),
        "inter/MixerBlock_0": held["MixerBlock_0"]["output"][0],
        "inter/MixerBlock_1": held["MixerBlock_1"]["output"][0],
        "inter/pre_head_layer_norm": held["encoded"][0],
        "pre_logits": held["pre_logits"][0],
    }
    for key, value in found.items():
        np.testing.assert_allclose(value, arrays[key], atol=2e-5, rtol=2e-5, err_msg=key)
    features = features_of(model, params, arrays["inputs"])
    np.testing.assert_allclose(features, arrays["pre_logits"], atol=2e-5, rtol=2e-5)


def test_gradients_equal_the_published_implementation():
    arrays, config, model, params = load("grad_mixer")

    def loss(params):
        logits = model.apply({"params": params}, arrays["inputs"])
        return optax.softmax_cross_entropy(logits, arrays["labels_onehot"]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(value - arrays["loss"]) <= 1e-5
    grads, truth = scan_layout.flatten(grads), below(arrays, "grads")
    assert grads.keys() == truth.keys()
    for key, wanted in truth.items():
        bound = 1e-5 if key in config["near_zero_grads"] else 1e-4 * np.abs(wanted).max()
        assert np.abs(grads[key] - wanted).max() <= bound, key


def test_bfloat16_compute_keeps_float32_parameters_and_stays_close():
    arrays, _, model, params = load("mixer_p8", dtype="bfloat16")
    logits = applied(model, params, arrays["inputs"])
    fresh = adapt.abstract_params(model)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(fresh))
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa: about 2^-8 relative per operation, a few operations deep.
    assert np.abs(logits - arrays["logits"]).max() <= 0.05 * np.abs(arrays["logits"]).max()


def test_a_mesh_changes_no_number_and_activations_are_constrained():
    arrays, _, model, params = load("mixer_p8")
    image = jnp.tile(arrays["inputs"][:2], (2, 1, 1, 1))
    wanted = applied(model, params, image)
    mesh = meshes.make_mesh(dict(replica=1, data=2, fsdp=2, tensor=2))
    sharding.check_model(model, mesh)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, sharding.param_specs(params, mesh))
        apply = jax.jit(lambda params, image: model.apply({"params": params}, image))
        logits = apply(placed, jax.device_put(image, sharding.batch_sharding(mesh)))
        text = apply.lower(placed, image).as_text()
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    # Image, tokens, and in every block the output and two hidden layers.
    assert text.count("sharding_constraint") == 2 + 3 * model.depth
    spec = scan_layout.flatten(placed)["MixerBlock_0/token_mixing/Dense_0/kernel"].sharding.spec
    assert "tensor" in spec


def test_an_image_that_fills_no_last_patch_is_padded_as_published():
    arrays, _, model, params = load("mixer_p8")
    image = arrays["inputs"][:, 1:31, 2:31]  # SAME pads 30 rows by 1 and 1, 29 columns by 1 and 2
    padded = np.pad(image, ((0, 0), (1, 1), (1, 2), (0, 0)))
    model = model.clone(image_size=(30, 29))
    assert model.grid == (4, 4) and model.cell == (8, 8) and model.num_prefix == 0
    logits = applied(model, params, image)
    np.testing.assert_allclose(logits, applied(model, params, padded), atol=1e-6)


def test_an_image_of_another_number_of_tokens_is_an_error():
    _, _, model, params = load("mixer_p8")
    with pytest.raises(UserError, match=r"gives 6 x 4 patch tokens, .* trained for 16"):
        applied(model, params, np.zeros((1, 48, 32, 3)))


def test_droppath_drops_whole_branches_of_single_examples():
    """At rate 0.5 in the last of two blocks an example has one of four results; without both
    branches, one block's.
    """
    arrays, _, model, params = load("mixer_p8", droppath=0.5)
    image = jnp.tile(arrays["inputs"][:1], (64, 1, 1, 1))
    rngs = {"dropout": jax.random.key(0)}
    noisy = applied(model, params, image, train=True, rngs=rngs)
    shallow = {name: leaf for name, leaf in params.items() if name != "MixerBlock_1"}
    first_block = applied(model.clone(depth=1), shallow, image[:1])
    distinct = np.unique(noisy.round(4), axis=0)
    assert len(distinct) == 4
    dropped = np.abs(noisy - first_block).max(axis=1) <= 1e-5
    assert 4 <= dropped.sum() <= 32  # 16 are expected
    quiet = applied(model, params, image[:1])
    np.testing.assert_array_equal(
        quiet, applied(load("mixer_p8")[2], params, image[:1], train=True)
    )


@pytest.mark.slow
def test_training_by_its_variant_name(tmp_path):
    (tmp_path / "mixer.py").write_text(TRAINED)
    assert train.main([f"--config={tmp_path}/mixer.py", f"--workdir={tmp_path}/run"]) == 0
    lines = [line for line in metric_lines(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in lines] == [1, 2]
    # The head starts at zero: the first loss is that of ten equal classes.
    assert abs(lines[0]["train/loss"] - np.log(10)) <= 1e-5
    assert (
        lines[1]["train/loss"] < lines[0]["train/loss"] + 0.5
        and lines[1]["train/skipped_steps"] == 0
    )
    # It has no attention.
    assert [path.name for path in (tmp_path / "run/pictures").iterdir()] == ["0_inputs.png"]


def test_fields_are_json_and_build_the_same_model():
    model = vit_jax.create_model("Mixer-L/32", image_size=(64, 96), dtype="bfloat16", droppath=0.1)
    fields = json.loads(json.dumps(create.fields(model)))
    assert fields["architecture"] == "mixer" and create.create(**fields) == model


def test_damaged_weights_are_named():
    flat = below(golden("mixer_p8")[0], "params")
    assert mixer.is_mixer(flat) and not mixer.is_mixer({"cls": 0, "embedding/kernel": 0})
    without = {name: value for name, value in flat.items() if name != "stem/kernel"}
    with pytest.raises(UserError, match="no stem/kernel"):
        mixer.infer_fields(without)
    with pytest.raises(UserError, match=r"token_mixing/Dense_0/kernel has shape \(24,\)"):
        mixer.infer_fields(flat | {"MixerBlock_0/token_mixing/Dense_0/kernel": np.zeros(24)})
    gap = {name: value for name, value in flat.items() if not name.startswith("MixerBlock_0/")}
    with pytest.raises(UserError, match=r"blocks \[1\]"):
        mixer.infer_fields(gap)
    headless = {name: value for name, value in flat.items() if not name.startswith("head/")}
    assert mixer.infer_fields(headless)["num_classes"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(variant="Mixer-X/16"), "unknown variant 'Mixer-X/16': known Mixers are Mixer-S"),
        (dict(variant="Mixer-B/0"), "unknown variant 'Mixer-B/0'"),
        (dict(variant="Mixer-B/16", num_heads=3), "unknown model field 'num_heads' of mixer"),
    ],
)
def test_bad_models_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model(**arguments)
