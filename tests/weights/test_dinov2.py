"""Backbones of DINOv2 in the files of timm and transformers, and what either can hold.

The golden folders were made by timm 1.0.31 (vit_giant_patch14_reg4_dinov2) and transformers 5.24
(Dinov2ForImageClassification, Dinov2WithRegistersModel) with small sizes and random parameters, and
written by their own `save_for_hf` and `save_pretrained`; test_formats.py compares their outputs.
"""

import json

import numpy as np
import pytest
from conftest import GOLDEN, golden_folder
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import config as configs
from vit_jax import convert
from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.train import experiment
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats.dinov2 import MASK_TOKEN
from vit_jax.weights.formats.weights import POSEMB, Weights
from vit_jax.weights.scan_layout import flatten

SIZES = dict(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=8, image_size=32)
OURS = dict(SIZES, num_classes=0, layer_scale=0.1, gelu="erf")
# Of preprocessor_config.json of facebook/dinov2-small.
PROCESSOR = dict(
    image_processor_type="BitImageProcessor",
    size=dict(shortest_edge=256),
    crop_size=dict(height=224, width=224),
    do_center_crop=True,
    do_resize=True,
    do_rescale=True,
    do_normalize=True,
    rescale_factor=1 / 255,
    resample=3,
    image_mean=[0.485, 0.456, 0.406],
    image_std=[0.229, 0.224, 0.225],
)


def arrays_of(folder) -> dict:
    return load_file(folder / "model.safetensors")


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf_dinov2", ("tok_gap", 7, 0, "gelu")),
        ("hf_dinov2_registers", ("tok", 0, 4, "swiglu")),
        ("timm_dinov2", ("tok", 0, 4, "swiglu")),
    ],
)
def test_what_a_file_shows(name, expected):
    fields = pretrained.read(GOLDEN / name).fields
    assert tuple(fields[key] for key in ("pool", "num_classes", "registers", "mlp")) == expected
    assert fields["layer_scale"] > 0


def test_registers_have_no_positions():
    for name in ("hf_dinov2_registers", "timm_dinov2"):
        rows = pretrained.read(GOLDEN / name).params[POSEMB]
        assert rows.shape == (1, 1 + 4 + 16, 32) and not rows[:, 1:5].any() and rows[:, 5:].all()


def in_memory(arrays: dict) -> dict:
    """With the names that transformers 5 has in memory, where SwiGLU's first array is two."""
    renamed = {}
    for name, value in arrays.items():
        for part in ("query", "key", "value"):
            name = name.replace(f"attention.attention.{part}", f"attention.{part[0]}_proj")
        name = name.replace("attention.output.dense", "attention.o_proj")
        name = "dinov2_with_registers." + name.replace("weights_out", "down_proj")
        if "weights_in" in name:
            gate, up = np.split(value, 2)
            renamed[name.replace("weights_in", "gate_proj")] = gate
            renamed[name.replace("weights_in", "up_proj")] = up
        else:
            renamed[name] = value
    return renamed


def test_names_in_memory_are_the_same_parameters(tmp_path):
    folder = golden_folder(tmp_path, "hf_dinov2_registers")
    truth = pretrained.read(folder)
    arrays = in_memory(arrays_of(folder))
    save_file(arrays, folder / "model.safetensors")
    found = pretrained.read(folder)
    assert found.fields == truth.fields and found.params.keys() == truth.params.keys()
    for name, value in truth.params.items():
        np.testing.assert_array_equal(found.params[name], value, err_msg=name)
    lost = "dinov2_with_registers.encoder.layer.0.mlp.gate_proj.weight"
    save_file({k: v for k, v in arrays.items() if k != lost}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"lack .*gate/kernel .{lost} in the file"):
        vit_jax.from_pretrained(folder)


@pytest.mark.parametrize("name", ["hf_dinov2", "hf_dinov2_registers"])
def test_what_is_written_is_what_transformers_wrote(name, tmp_path):
    convert.convert(str(GOLDEN / name), str(tmp_path / "again"), "hf")
    found = arrays_of(tmp_path / "again")
    truth = arrays_of(GOLDEN / name)
    assert found.keys() == truth.keys()
    for key in truth.keys() - {key for key in truth if key.endswith(MASK_TOKEN)}:
        np.testing.assert_array_equal(found[key], truth[key], err_msg=key)
    ours = config_of(tmp_path / "again")
    theirs = config_of(GOLDEN / name)
    assert {key: ours[key] for key in ours.keys() & theirs.keys()} == {
        key: theirs[key] for key in ours.keys() & theirs.keys()
    }
    needed = {"architectures", "model_type", "mlp_ratio", "use_swiglu_ffn", "layerscale_value"}
    needed |= {"num_register_tokens"} & theirs.keys()
    assert needed <= ours.keys() & theirs.keys()


def test_timm_and_transformers_hold_the_same_backbone(tmp_path):
    """timm -> hf -> timm; a conversion compares the features of both."""
    first = str(GOLDEN / "timm_dinov2")
    for target in ("hf", "timm"):
        convert.convert(first, str(tmp_path / target), target)
        first = str(tmp_path / target)
    assert config_of(tmp_path / "hf")["model_type"] == "dinov2_with_registers"
    assert config_of(tmp_path / "timm")["architecture"] == "vit_giant_patch14_dinov2"
    truth = pretrained.read(GOLDEN / "timm_dinov2").params
    found = pretrained.read(first).params
    for name, value in truth.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def write_ours(folder, **fields):
    """A checkpoint of ours with random parameters."""
    model = create.create(**OURS | fields)
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in flatten(create.abstract_params(model)).items()
    }
    convert.write(Weights(params, create.fields(model)), model, folder, "ours")
    return params


def test_positions_that_registers_learned_are_added_to_them(tmp_path):
    params = write_ours(tmp_path / "ours", registers=3)
    convert.convert(str(tmp_path / "ours"), str(tmp_path / "hf"), "hf")
    rows = params[POSEMB]
    found = arrays_of(tmp_path / "hf")
    np.testing.assert_array_equal(found["embeddings.register_tokens"], params["reg"] + rows[:, 1:4])
    np.testing.assert_array_equal(
        found["embeddings.position_embeddings"], np.delete(rows, [1, 2, 3], axis=1)
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (dict(mlp_dim=40), "mlp_dim=40"),
        (dict(mlp="swiglu", width=32), "mlp_dim=32"),  # two thirds of 32 or 64: 24 or 48
        (dict(image_size=(32, 40)), "images that are not square"),
        (dict(pre_logits=16), "pre_logits"),
        (dict(fc_norm=True), "LayerNorm after the pooling"),
        (dict(posemb="relative"), "posemb=relative"),
        (dict(num_classes=3), "LayerScale"),  # of the class token alone
        (dict(pool="tok_gap"), "pool=tok_gap, LayerScale"),
        (dict(pool="tok_gap", num_classes=3, layer_scale=0.0), "pool=tok_gap of"),
        (dict(mlp="swiglu", layer_scale=0.0), "SwiGLU"),
    ],
)
def test_what_transformers_cannot_hold_is_named(fields, problem, tmp_path):
    write_ours(tmp_path / "ours", **fields)
    with pytest.raises(UserError, match=f"hf weights can't represent .*{problem}"):
        convert.convert(str(tmp_path / "ours"), str(tmp_path / "hf"), "hf")


def test_what_the_other_formats_cannot_hold_is_named(tmp_path):
    write_ours(tmp_path / "ours", mlp="swiglu", registers=1, pool="tok_gap", num_classes=3)
    for target, problem in (("published", "SwiGLU"), ("big_vision", "SwiGLU"), ("timm", "tok_gap")):
        name = "there.npz" if target != "timm" else "there"
        with pytest.raises(UserError, match=problem):
            convert.convert(str(tmp_path / "ours"), str(tmp_path / name), target)


def test_registers_that_the_file_lost_are_missed(tmp_path):
    folder = golden_folder(tmp_path, "hf_dinov2_registers")
    arrays = arrays_of(folder)
    del arrays["embeddings.register_tokens"]
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lack reg \(embeddings.register_tokens in the file"):
        vit_jax.from_pretrained(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("layerscale_value", "x"), ("hidden_act", "relu"), ("num_attention_heads", 5)],
)
def test_odd_values_of_the_config_are_refused(key, value, tmp_path):
    folder = golden_folder(tmp_path, "hf_dinov2")
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=folder.name):
        vit_jax.from_pretrained(folder)


def test_images_are_prepared_as_the_files_say(tmp_path):
    timm = pretrained.read(GOLDEN / "timm_dinov2").fields
    folder = golden_folder(tmp_path, "hf_dinov2")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    hf = pretrained.read(folder).fields
    for fields in (timm, hf):
        assert fields["mean"] == (0.485, 0.456, 0.406) and fields["std"] == (0.229, 0.224, 0.225)
        assert (fields["interpolation"], fields["resize"]) == ("bicubic", "shorter")
    assert (timm["crop"], hf["crop"]) == (1.0, 224 / 256)


def test_another_image_size_and_another_head():
    truth = pretrained.read(GOLDEN / "hf_dinov2_registers").params[POSEMB]
    model, params = vit_jax.from_pretrained(
        GOLDEN / "hf_dinov2_registers", image_size=48, num_classes=5
    )
    rows = params["Transformer"]["posembed_input"]["pos_embedding"]
    assert rows.shape == (1, 1 + 4 + 36, 32)
    np.testing.assert_array_equal(rows[:, :5], truth[:, :5])
    assert model.pool == "tok" and params["head"]["kernel"].shape == (32, 5)
    model, params = vit_jax.from_pretrained(GOLDEN / "hf_dinov2", num_classes=5)
    assert model.pool == "tok_gap" and params["head"]["kernel"].shape == (64, 5)
    with pytest.raises(UserError, match=r"head/kernel .*of the weights is \(64, 7\)"):
        vit_jax.from_pretrained(GOLDEN / "hf_dinov2", pool="tok")


def test_a_run_that_starts_from_the_weights_has_their_mlp():
    fields = pretrained.read(GOLDEN / "timm_dinov2").fields
    config = configs.defaults()
    with config.unlocked():
        config.image_size = 32
        config.model.update(dict.fromkeys(config.model))  # open
        config.model.num_classes = 3
    model = experiment.make_model(config, 3, fields)
    assert (model.mlp, model.mlp_dim, model.registers) == ("swiglu", 64, 4)
    full = experiment.completed(config, model)
    assert (full.model.variant, full.model.mlp, full.model.width) == ("giant2/8", "", 32)
    again = experiment.make_model(full, 3)
    assert flatten(create.abstract_params(again)) == flatten(create.abstract_params(model))


def test_the_largest_variant_decides_the_mlp():
    config = configs.defaults()
    config.model.variant = "giant2/14"
    assert config.model.mlp == ""
    assert experiment.make_model(config, 3).mlp == "swiglu"
    config.model.mlp = "gelu"
    model = experiment.make_model(config, 3)
    assert (model.mlp, model.mlp_dim) == ("gelu", 4096)
    assert variants.name_of(create.fields(model)) == "giant2/14"
