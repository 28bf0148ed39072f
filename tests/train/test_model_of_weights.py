"""With `init_from`, a run has the model of its weights, but for what its config sets."""

import pathlib

import numpy as np
import pytest
from conftest import build_experiment, golden_file, golden_folder

from vit_jax import config as configs
from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.train import experiment
from vit_jax.train import state as states
from vit_jax.train.experiment import Experiment
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights import load as pretrained

PLAIN = """
def get_config():
    return dict(total_steps=1, data=dict(name="digits", batch_size=8))
"""


def load(tmp_path, weights, *flags):
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return configs.load(str(path), [f"--config.init_from={weights}", *flags])


def weights_of(tmp_path, name: str) -> pathlib.Path:
    if name.startswith(("timm", "hf")):
        return golden_folder(tmp_path, name)
    return golden_file(tmp_path, name)


def start(tmp_path, name, *flags):
    """(config, weights, model, parameters) of a run, without a flag for its model."""
    tmp_path.mkdir(exist_ok=True)
    path = weights_of(tmp_path, name)
    side = pretrained.read(path).fields["image_size"]
    size = create.pair(side)[0]
    config = load(tmp_path, path, f"--config.image_size={size}", *flags)
    fields, weights = states.find_start(config, tmp_path / "no_run")
    experiment = build_experiment(config, start=fields)
    params = states.pretrained_state(experiment, weights).params
    return experiment.config, weights, experiment.model, scan_layout.flatten(params)


KINDS = (
    *("timm_token", "timm_gap", "timm_map", "timm_layer_scale", "timm_deit_distilled"),
    *(
        "timm_nonsquare",
        "timm_dinov2",
        "hf_dinov2",
        "hf_vit",
        "hf_deit",
        "vit_token_rep",
        "vit_gap_norep",
        "bv_map_rep",
    ),
    *("bv_gap_sincos2d_rep", "hybrid_r50like_122", "mixer_p8", "bit_r14like"),
)
HEAD = ("head", "head_dist", "pre_logits", "head_bias", "num_classes", "image_size")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_weights_is_trained_without_a_word_about_its_model(name, tmp_path):
    config, weights, model, params = start(tmp_path, name)
    for name, value in weights.params.items():
        is_same = not name.startswith(("head", "pre_logits")) and "pos_embedding" not in name
        if is_same:
            np.testing.assert_array_equal(params[name], value, err_msg=name)
    theirs = create.fields(create.create(**weights.fields))
    ours = create.fields(model)
    same = [name for name in theirs if name not in HEAD and name not in configs.MODEL]
    same += [name for name in ours if name in configs.MODEL and configs.MODEL[name].of_weights]
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    # The completed config says the same, and makes the same model if the run is continued.
    assert None not in [v for key, v in config.model.items() if key != "variant"]
    assert experiment.make_model(config, 10, ours) == model
    for key, value in config.model.items():
        assert value == ours.get(key, value) or value in (0, "")


def test_what_the_config_sets_holds(tmp_path):
    sizes = [f"--config.model.{size}" for size in ("depth=2", "width=48", "mlp_dim=192")]
    sizes += ["--config.model.num_heads=3", "--config.model.variant=Ti/4"]
    _, _, model, _ = start(tmp_path, "timm_token", "--config.model.pool=gap", *sizes)
    assert model.pool == "gap" and model.class_token and model.gelu == "erf"
    assert model.patch_size == (4, 4)
    _, _, model, _ = start(tmp_path / "b", "vit_token_rep", "--config.model.pool=gap")
    assert not model.class_token and model.pool == "gap"


def test_a_flag_that_contradicts_the_weights_is_the_error(tmp_path):
    with pytest.raises(UserError, match=r"differ in gelu: add --config.model.gelu=erf \(or leave"):
        start(tmp_path, "timm_token", "--config.model.gelu=tanh")
    config = load(tmp_path, weights_of(tmp_path / "b", "timm_token"), "--config.model.gelu=tanh")
    with pytest.raises(
        UserError, match=r"model\.gelu=tanh contradicts the weights, which have erf"
    ):
        adapt.check_given(config.model, pretrained.read(config.init_from).fields)


def test_a_plan_reads_the_weights_only_if_the_config_has_no_variant(tmp_path):
    missing = tmp_path / "no.npz"
    declared = Experiment.declared(load(tmp_path, missing, "--config.model.variant=S/32"))
    assert declared.model.width == 384
    with pytest.raises(UserError, match="does not exist"):
        Experiment.declared(load(tmp_path, missing))
    path = weights_of(tmp_path, "vit_token_rep")
    assert Experiment.declared(load(tmp_path, path)).model.width == 48


@pytest.mark.parametrize(
    "name", ["B/16", "L/14", "giant2/14", "R50+B/16", "R+Ti/16", "Mixer-S/8", "R101x3"]
)
def test_a_variant_is_found_by_its_sizes(name):
    assert variants.name_of(create.fields(create.create(name, 10, 224))) == name


def test_sizes_without_a_name_have_that_of_a_near_one_or_none():
    def name_of(variant, **fields):
        return variants.name_of(create.fields(create.create(variant, 10, 224, **fields)))

    assert name_of("Ti/8", width=64, num_heads=2) == "Ti/8"
    assert name_of("B/16", depth=3) == "B/16"
    assert name_of("B/16", patch_size=(16, 8)) is None
    assert name_of("R50+B/16", stem_units=(1, 2)) is None
    assert name_of("Mixer-B/16", depth=2) is None


def test_unset_keys_are_defaults_without_weights(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    model = configs.load(str(path)).model
    default = configs.defaults().model
    assert all(value == default[name] for name, value in model.items())
