"""Weights of masked autoencoders: both names of transformers, the encoder alone, conversions, and
runs that start from them.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from conftest import GOLDEN, build_experiment, golden_folder, last_error
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax import config as configs
from vit_jax import convert
from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.models.mae import MaskedAutoencoder
from vit_jax.train import state as states
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats import huggingface
from vit_jax.weights.formats.weights import Weights
from vit_jax.weights.scan_layout import flatten

CASE = "mae_public"
# The hub's names -> those that transformers 5 has in memory.
IN_MEMORY = [
    (r"\.(?:encoder\.layer|decoder_encoder\.layer)\.(\d+)\.", r".layers.\1."),
    (r"attention\.attention\.(.)\w+\.", r"attention.\1_proj."),
    (r"attention\.output\.dense", "attention.o_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(layers\.\d+)\.output\.dense", r"\1.mlp.fc2"),
    (r"^decoder\.layers", "decoder.decoder_layers"),
]


def in_memory(name: str) -> str:
    for pattern, replacement in IN_MEMORY:
        name = re.sub(pattern, replacement, name)
    return name


def of_transformers_4(name: str) -> str:
    return name.replace("decoder_encoder.layer", "decoder_layers")


def changed(tmp_path, rename=lambda name: name, drop="nothing", **config):
    """The golden folder with other names, without some arrays, with another config.json."""
    folder = golden_folder(tmp_path, CASE)
    arrays = load_file(folder / "model.safetensors")
    arrays = {rename(name): x for name, x in arrays.items() if not re.search(drop, name)}
    save_file(arrays, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def assert_same(found: dict, wanted: dict) -> None:
    found, wanted = flatten(found), flatten(wanted)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("rename", [in_memory, of_transformers_4])
def test_all_names_of_transformers_are_read(rename, tmp_path):
    model, params = vit_jax.from_pretrained(GOLDEN / CASE, objective="mae")
    folder = changed(tmp_path, rename)
    assert set(load_file(folder / "model.safetensors")) != set(
        load_file(GOLDEN / CASE / "model.safetensors")
    )
    other, same = vit_jax.from_pretrained(folder, objective="mae")
    assert other == model
    assert_same(same, params)


def test_the_encoder_alone_is_a_model_without_a_head(tmp_path):
    _, params = vit_jax.from_pretrained(GOLDEN / CASE, objective="mae")
    del params["decoder"]
    model, alone = vit_jax.from_pretrained(GOLDEN / CASE)
    assert (model.pool, model.num_classes) == ("tok", 0)
    assert_same(alone, params)
    # ViTMAEModel has no prefix and no decoder.
    folder = changed(tmp_path, lambda name: name.removeprefix("vit."), drop=r"^decoder")
    assert_same(vit_jax.from_pretrained(folder)[1], params)


def test_the_class_token_stays_when_the_mean_is_read():
    """As in the fine-tuning of the published code."""
    model, params = vit_jax.from_pretrained(GOLDEN / CASE, num_classes=3, pool="gap")
    assert model.pool == "gap" and "cls" in params and params["head"]["kernel"].shape == (40, 3)


def test_settings_and_image_size_may_be_others():
    options = dict(mask_ratio=0.5, norm_pixels=False, image_size=36)
    model, params = vit_jax.from_pretrained(GOLDEN / CASE, objective="mae", **options)
    assert (model.mask_ratio, model.norm_pixels, model.vit.grid) == (0.5, False, (6, 6))
    rows = params["decoder"]["Transformer"]["posembed_input"]["pos_embedding"]
    assert rows.shape == (1, 37, 24)


DAMAGED = {
    "missing": (
        dict(drop="decoder_pred.bias"),
        "lack decoder/head/bias.*decoder.decoder_pred.bias",
    ),
    "block": (
        dict(drop=r"layer\.1\.layernorm_after.weight"),
        "lack .*encoderblock_1/LayerNorm_2/scale",
    ),
    "last block": (
        dict(drop=r"decoder_encoder\.layer\.1\."),
        "decoder_num_hidden_layers=2, but the file has 1",
    ),
    "heads": (dict(decoder_num_attention_heads=5), "does not fit a heads weight of 5 heads"),
    "ratio": (dict(mask_ratio=1.5), "mask_ratio=1.5 of 16 patches must hide some"),
    "type": (dict(mask_ratio="most"), "config.json of .* is damaged"),
    "no decoder": (dict(drop="^decoder"), "has no decoder of a masked autoencoder"),
    "another": (
        dict(rename=lambda name: name.replace("decoder_pred.weight", "decoder_other.weight")),
        "lack decoder/head/kernel .*nearest name is decoder.decoder_other.weight",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_damaged_or_missing_is_a_user_error(case, tmp_path):
    changes, message = DAMAGED[case]
    folder = changed(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(folder, objective="mae")


def test_a_decoder_that_does_not_fit_is_no_reason_to_allow_anything(tmp_path):
    folder = changed(tmp_path, drop="decoder_pred.bias")
    with pytest.raises(UserError, match="; fetch the file again, or load the encoder alone"):
        vit_jax.from_pretrained(folder, objective="mae")


def test_a_lone_file_does_not_show_the_heads_of_an_unusual_decoder(tmp_path):
    folder = changed(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="how many heads its decoder of width 24 has: put its conf"):
        vit_jax.from_pretrained(folder / "model.safetensors", num_heads=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(objective="dino"), "objective='dino' has no weights of its own"),
        (dict(objective="mae", num_classes=3), "leave num_classes= and allow= out"),
        (dict(objective="mae", patch_size=4), r"predicts patches of \(6, 6\), not of \(4, 4\)"),
        (dict(objective="mae", pool="map"), "attention pooling"),
        (dict(mask_ratio=0.5), "unknown model field 'mask_ratio'"),
    ],
)
def test_arguments_that_do_not_fit_are_user_errors(options, message):
    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(GOLDEN / CASE, **options)
    with pytest.raises(UserError, match="has no decoder"):
        vit_jax.from_pretrained(GOLDEN / "hf_vit", objective="mae")


@pytest.mark.slow
def test_there_and_back_keeps_every_bit(tmp_path, capsys):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert convert.main([str(GOLDEN / CASE), str(ours)]) == 0
    assert convert.main([str(ours), str(back), "--format=hf"]) == 0
    model, params = vit_jax.from_pretrained(GOLDEN / CASE, objective="mae")
    for folder in (ours, back):
        other, same = vit_jax.from_pretrained(folder, objective="mae")
        assert dataclasses.replace(other, vit=model.vit) == model
        assert_same(same, params)
    wanted = load_file(GOLDEN / CASE / "model.safetensors")
    found = load_file(back / "model.safetensors")
    assert found.keys() == {of_transformers_4(name) for name in wanted}
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[of_transformers_4(name)], value)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / CASE, back)
    )
    for key in ("architectures", "model_type", "mask_ratio", "norm_pix_loss", *after):
        if key.startswith("decoder_") or key in ("architectures", "mask_ratio", "norm_pix_loss"):
            assert after[key] == before[key], key


def test_formats_without_a_place_for_the_decoder_say_so(tmp_path, capsys):
    arguments = [str(GOLDEN / CASE), str(tmp_path / "timm"), "--format=timm"]
    assert convert.main([*arguments, f"--json={tmp_path}/result.json"]) == 0
    assert "timm has no place for decoder: left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["left_out"] == ["decoder"]
    assert not pretrained.read(tmp_path / "timm").extra
    assert convert.main([str(GOLDEN / CASE), str(tmp_path / "x.npz")]) == 2
    assert "exact (erf) GELU" in last_error(capsys)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, None),
        (dict(image_size=(24, 36)), "not square"),
        (dict(image_size=26), "a border"),
        (dict(layer_scale=1e-4), "LayerScale"),
        (dict(pool="gap"), "mean pooling"),
        (dict(registers=2), "register tokens"),
    ],
)
def test_what_transformers_has_no_autoencoder_for(fields, obstacle):
    weights = pretrained.read(GOLDEN / CASE)
    fields = weights.fields | fields
    weights = dataclasses.replace(weights, fields=fields)
    found = huggingface.obstacles(weights, create.create(**fields))
    assert len(found) == bool(obstacle) and all(obstacle in name for name in found)


PLAIN = """
def get_config():
    data = dict(name="digits", batch_size=8)
    mae = dict(decoder_width=16, decoder_depth=1, decoder_heads=2)
    return dict(total_steps=1, objective="mae", image_size=16, data=data, mae=mae)
"""
SIZES = dict(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=4, image_size=16)


def autoencoder_folder(tmp_path):
    """A folder of transformers with a new autoencoder of ours, whose positions are moved."""
    vit = create.create(None, 0, **SIZES)
    decoder = dict(width=16, depth=1, mlp_dim=64, num_heads=2)
    model = MaskedAutoencoder.build(vit, decoder, norm_pixels=False)
    flat = flatten(jax.device_get(jax.jit(model.init)(jax.random.key(7))))
    flat = {name: value + np.float32(0.01) for name, value in flat.items()}
    extra = {name: flat.pop(name) for name in list(flat) if name.startswith("decoder/")}
    settings = dict(mask_ratio=0.75, norm_pixels=False)
    weights = Weights(flat, create.fields(vit), objective="mae", settings=settings, extra=extra)
    convert.write(weights, vit, tmp_path / "weights", "hf")
    return tmp_path / "weights", flat | extra


def start(tmp_path, weights, *settings: str):
    """(experiment, parameters before the first step) of a run that starts from weights."""
    (tmp_path / "plain.py").write_text(PLAIN)
    flags = [f"--config.{setting}" for setting in (f"init_from={weights}", *settings)]
    config = configs.load(str(tmp_path / "plain.py"), flags)
    fields, weights = states.find_start(config, tmp_path / "no_run")
    experiment = build_experiment(config, start=fields)
    return experiment, flatten(states.pretrained_state(experiment, weights).params)


def test_a_run_continues_with_encoder_and_decoder(tmp_path, caplog):
    folder, wanted = autoencoder_folder(tmp_path)
    with caplog.at_level("INFO"):
        experiment, found = start(tmp_path, folder)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    frozen = [name for name in found if re.fullmatch(experiment.config.optim.frozen, name)]
    assert len(frozen) == 2 and all("posembed_input" in name for name in frozen)
    assert "decoder: that of the weights" in caplog.text
    assert "learned with mae.norm_pixels=False, not True" in caplog.text


def test_a_decoder_of_other_sizes_names_the_keys(tmp_path):
    folder, _ = autoencoder_folder(tmp_path)
    settings = ("mae.decoder_width=32", "mae.decoder_depth=3")
    flags = "--config.mae.decoder_width=16 --config.mae.decoder_depth=1"
    with pytest.raises(UserError, match=f"decoder_width, decoder_depth: add {flags}"):
        start(tmp_path, folder, *settings)
    settings = ("image_size=24", "mae.decoder_width=24", "mae.decoder_depth=2")
    with pytest.raises(UserError, match="has an MLP of 48, not of 4"):
        start(tmp_path, GOLDEN / CASE, *settings, "mae.decoder_heads=3")


def test_a_run_from_an_encoder_has_a_new_decoder(tmp_path, caplog):
    weights = pretrained.read(GOLDEN / "hf_vit")
    size = weights.fields["image_size"][0]
    with caplog.at_level("INFO"):
        experiment, found = start(tmp_path, GOLDEN / "hf_vit", f"image_size={size}")
    assert "decoder: fresh" in caplog.text
    fresh = flatten(jax.jit(lambda: experiment.objective.init(0))())
    for name, value in found.items():
        source = fresh if name.startswith("decoder/") else weights.params
        np.testing.assert_allclose(value, source[name], atol=1e-6, err_msg=name)
