"""Fitting weights to another model: as the published loaders if they can load them, else correct or
one clear error.
"""

import dataclasses
import logging
import re

import jax
import numpy as np
import pytest
from conftest import (
    GOLDEN,
    applied,
    below,
    build_experiment,
    features_of,
    golden,
    golden_file,
    golden_folder,
)

import vit_jax
from vit_jax import config as configs
from vit_jax import convert
from vit_jax.errors import UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate import suite
from vit_jax.models import create
from vit_jax.train import state as states
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats.vision_transformer import published_name
from vit_jax.weights.formats.weights import POSEMB

LOADS = sorted(path.stem for path in GOLDEN.glob("load_*.npz"))
BIG_VISION_LOADS = sorted(path.stem for path in GOLDEN.glob("bvload_*.npz"))
SIZES = dict(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=8, image_size=32, num_classes=5)


def bilinear(rows: np.ndarray, old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    """Rows of a grid, linear along each axis, corners aligned: [1, h * w, embed], by numpy."""
    grid = rows.reshape(*old, -1).astype(np.float64)
    for axis in (0, 1):
        place = np.linspace(0, old[axis] - 1, new[axis])
        grid = np.apply_along_axis(
            lambda line, place=place: np.interp(place, np.arange(len(line)), line), axis, grid
        )
    return grid.reshape(1, new[0] * new[1], -1)


@pytest.mark.parametrize("case", golden("posemb_resize")[1]["cases"], ids=lambda case: case["name"])
def test_resampling_equals_the_published_one(case):
    arrays, _ = golden("posemb_resize")
    prefix = int(case.get("has_class_token", False))
    grid = (case["gs_new"],) * 2
    out = pretrained.resample_posemb(arrays[f"{case['name']}/in"], grid, num_prefix=prefix)
    np.testing.assert_allclose(out, arrays[f"{case['name']}/out"], atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"), [((2, 8), (4, 4)), ((4, 6), (7, 3)), ((3, 5), (6, 5)), ((1, 4), (1, 7))]
)
def test_resampling_off_the_square_is_linear_along_each_axis(old, new):
    posemb = np.random.default_rng(0).normal(size=(2 + old[0] * old[1], 3)).astype(np.float32)
    out = pretrained.resample_posemb(posemb, new, old, num_prefix=2)
    np.testing.assert_array_equal(out[:2], posemb[:2])
    np.testing.assert_allclose(out[None, 2:], bilinear(posemb[2:], old, new), atol=1e-6)
    batched = pretrained.resample_posemb(posemb[None], new, old, num_prefix=2)
    np.testing.assert_array_equal(batched[0], out)


def test_a_grid_that_does_not_fit_is_an_error():
    with pytest.raises(UserError, match="does not fill a grid of 3 x 3"):
        pretrained.resample_posemb(np.zeros((13, 4)), (4, 4), num_prefix=1)


def load(tmp_path, name, **more):
    """(arrays, config, model, params) of a golden loading case, through from_pretrained."""
    arrays, config = golden(name)
    path = golden_file(tmp_path, name, "pretrained")
    target = config["target_config"]
    wanted = dict(
        num_classes=3,
        image_size=tuple(target["image_size"]),
        pool={"token": "tok"}.get(target["classifier"]),
    )
    wanted["pool"] = wanted["pool"] or target["classifier"]
    wanted |= dict(
        pre_logits=target["representation_size"] or 0, depth=target["transformer"]["num_layers"]
    )
    return arrays, config, *vit_jax.from_pretrained(path, **(wanted | more))


def expected(arrays: dict, config: dict) -> dict:
    """The peer's result by published names, without what it did not take from the file or left
    behind.
    """
    found = {}
    for name, source in config["result_source"].items():
        kind, _, key = source.partition(":")
        if kind == "init" or name in config.get("extra_in_result_vs_init", ()):
            continue
        value = arrays[f"result/{name}" if kind == "array" else f"pretrained/{key}"]
        if kind == "pretrained_reshaped":
            value = value.reshape(-1)
        found[published_name(name)] = value
    return found


def assert_equal_to_the_peer(params: dict, arrays: dict, config: dict) -> None:
    found, wanted = scan_layout.flatten(params), expected(arrays, config)
    assert (
        found.keys() - wanted.keys() == {"head/kernel", "head/bias"}
        and wanted.keys() <= found.keys()
    )
    for name, value in wanted.items():
        np.testing.assert_allclose(
            found[name], value, atol=1e-6 if name == POSEMB else 0, err_msg=name
        )


def with_their_head(params: dict, arrays: dict) -> dict:
    """The peers draw the new head; ours is zero."""
    assert not params["head"]["kernel"].any() and not params["head"]["bias"].any()
    return params | {"head": {leaf: arrays[f"init/head/{leaf}"] for leaf in ("kernel", "bias")}}


@pytest.mark.parametrize("name", [name for name in LOADS if "logits_after_load" in golden(name)[0]])
def test_loading_equals_the_published_loader(name, tmp_path):
    arrays, config, model, params = load(
        tmp_path, name, allow="encoderblock_1" if "deeper" in name else ""
    )
    assert_equal_to_the_peer(params, arrays, config)
    logits = applied(model, with_their_head(params, arrays), arrays["inputs"])
    assert np.abs(logits - arrays["logits_after_load"]).max() <= 2e-5
    features = features_of(model, params, arrays["inputs"])
    assert np.abs(features - arrays["pre_logits_after_load"]).max() <= 2e-5


def test_what_nothing_would_use_is_named(tmp_path):
    """The peer keeps the second block of a checkpoint that is too deep, and nothing reads it."""
    with pytest.raises(
        UserError,
        match=r"npz: the weights have \S+/encoderblock_1/\S+, which the model does not have",
    ):
        load(tmp_path, "load_deeper_ckpt_extra_block")


def test_a_layer_that_the_weights_lack_is_named_or_drawn(tmp_path):
    """The peer returns parameters that its model then can't run with."""
    with pytest.raises(UserError, match="npz: the weights lack pre_logits/bias"):
        load(tmp_path, "load_norep_to_rep")
    arrays, _, model, params = load(tmp_path, "load_norep_to_rep", allow="^pre_logits/")
    assert (
        params["pre_logits"]["kernel"].shape == (32, 24)
        and params["pre_logits"]["kernel"].std() > 0.1
    )
    assert not applied(model, params, arrays["inputs"]).any()
    np.testing.assert_array_equal(params["cls"], arrays["pretrained/cls"])


@pytest.mark.parametrize("name", [name for name in LOADS if "load_error" in golden(name)[1]])
def test_what_the_published_loader_cannot_load(name, tmp_path):
    """Another pooling, or a grid that is not square: the rows of patches are resampled linearly."""
    arrays, config, model, params = load(tmp_path, name)
    found = scan_layout.flatten(params)
    saved = below(arrays, "pretrained")
    old = (config["pretrained_config"]["image_size"][0] // 8,) * 2
    had, has = (
        config[key]["classifier"] == "token" for key in ("pretrained_config", "target_config")
    )
    wanted = bilinear(saved[POSEMB][:, int(had) :], old, model.grid)
    np.testing.assert_allclose(found[POSEMB][:, int(has) :], wanted, atol=1e-6)
    if has:
        row = cls = np.zeros((1, 1, 32))
        if had:
            row = saved[POSEMB][:, :1]
            cls = saved["cls"]
        np.testing.assert_array_equal(found[POSEMB][:, :1], row)
        np.testing.assert_array_equal(found["cls"], cls)
    same = found.keys() & saved.keys() - {POSEMB, "cls", "head/kernel", "head/bias"}
    assert len(same) >= 20 and all(np.array_equal(found[key], saved[key]) for key in same)
    assert applied(model, params, np.zeros((1, *model.image_size, 3))).shape == (1, 3)


@pytest.mark.parametrize("name", BIG_VISION_LOADS)
def test_loading_equals_big_vision(name, tmp_path):
    arrays, config = golden(name)
    path, target = golden_file(tmp_path, name, "pretrained"), config["target_config"]
    new_head = dict(num_classes=target["num_classes"]) if config["dont_load"] else {}
    size = tuple(target["image_size"])
    model, params = vit_jax.from_pretrained(path, image_size=size, scan=target["scan"], **new_head)
    found = scan_layout.flatten(scan_layout.relayout(params, False, np.stack))
    result = {}
    for leaf, source in config["result_source"].items():
        kind, _, key = source.partition(":")
        if not kind.startswith("init"):
            result[leaf] = arrays[f"result/{leaf}" if kind == "array" else f"pretrained/{key}"]
    wanted = scan_layout.flatten(scan_layout.unstack_blocks(scan_layout.unflatten(result)))
    wanted = {published_name(name): value for name, value in wanted.items()}
    positions = found.pop(POSEMB)
    if "cls" in wanted:
        np.testing.assert_allclose(
            found.pop("cls") + positions[:, :1], wanted.pop("cls"), atol=1e-6
        )
    np.testing.assert_allclose(
        positions[:, model.num_prefix :], wanted.pop("pos_embedding"), atol=1e-6
    )
    assert found.keys() - wanted.keys() == ({"head/kernel", "head/bias"} if new_head else set())
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    params = with_their_head(params, arrays) if new_head else params
    assert (
        np.abs(applied(model, params, arrays["inputs"]) - arrays["logits_after_load"]).max() <= 2e-5
    )


@pytest.mark.parametrize("case", golden("patch_resize")[1]["cases"], ids=lambda case: case["name"])
def test_patches_are_resampled_as_flexivit_does(case):
    arrays, _ = golden("patch_resize")
    truth = arrays[f"{case['name']}/out"]
    found = adapt.resample_patches(arrays[f"{case['name']}/in"], tuple(case["new"]))
    assert found.dtype == np.float32 and found.shape == truth.shape
    assert np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max()  # the peer inverts in float32


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((4, 4), (7, 5)), ((3, 4), (6, 4))])
def test_an_enlarged_patch_of_an_enlarged_image_gives_the_same_embedding(old, new):
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(*old, 3, 6)), rng.normal(size=(*old, 3))
    large = jax.image.resize(patch.astype(np.float32), (*new, 3), "bilinear", antialias=False)
    before = np.einsum("hwc,hwce->e", patch, kernel)
    after = np.einsum("hwc,hwce->e", large, adapt.resample_patches(kernel, new))
    np.testing.assert_allclose(after, before, atol=2e-5)


def test_patches_that_grow_and_shrink_have_the_least_error():
    """Larger one way and smaller the other: the pseudo-inverse of both resizings together, in
    float64.
    """
    kernel = np.random.default_rng(0).normal(size=(4, 4, 1, 2))
    resize = np.kron(adapt.resize_matrix(4, 5), adapt.resize_matrix(4, 3))
    wanted = np.linalg.pinv(resize.T, rcond=1e-10) @ kernel.reshape(16, 2)
    np.testing.assert_allclose(
        adapt.resample_patches(kernel, (5, 3)).reshape(15, 2), wanted, atol=1e-9
    )


def test_another_patch_size_is_an_argument(tmp_path):
    path = golden_file(tmp_path, "vit_token_norep")
    _, plain = vit_jax.from_pretrained(path)
    model, params = vit_jax.from_pretrained(path, patch_size=16, image_size=64)
    assert model.patch_size == (16, 16) and model.grid == (4, 4)
    wanted = adapt.resample_patches(plain["embedding"]["kernel"], (16, 16))
    np.testing.assert_array_equal(params["embedding"]["kernel"], wanted)
    np.testing.assert_array_equal(*(scan_layout.flatten(tree)[POSEMB] for tree in (params, plain)))
    model, params = vit_jax.from_pretrained(
        path, patch_size=(16, 4)
    )  # another grid on the same image
    assert model.grid == (2, 8) and params["embedding"]["kernel"].shape == (16, 4, 3, 48)
    rows = scan_layout.flatten(plain)[POSEMB][:, 1:]
    np.testing.assert_allclose(
        scan_layout.flatten(params)[POSEMB][:, 1:], bilinear(rows, (4, 4), (2, 8)), atol=1e-6
    )


def test_pre_logits_are_kept_or_dropped_as_asked(tmp_path):
    path = golden_file(tmp_path, "vit_token_rep")
    assert vit_jax.from_pretrained(path)[0].pre_logits == 40
    model, params = vit_jax.from_pretrained(path, num_classes=5)
    assert (
        model.pre_logits == 0
        and "pre_logits" not in params
        and params["head"]["kernel"].shape == (48, 5)
    )
    model, params = vit_jax.from_pretrained(path, num_classes=5, pre_logits=True)
    assert model.pre_logits == 40 and params["head"]["kernel"].shape == (40, 5)
    with pytest.raises(UserError, match="lack pre_logits/bias"):
        vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_norep"), pre_logits=True)


def test_a_new_head_is_zero_whatever_the_old_one_started_from(tmp_path):
    weights = pretrained.read(golden_file(tmp_path, "vit_token_rep"))
    biased = dataclasses.replace(weights, fields=weights.fields | dict(head_bias=-10.0))
    _, params = pretrained.build(biased, num_classes=5)
    assert not params["head"]["bias"].any() and not params["head"]["kernel"].any()


def test_no_head_is_asked_for_with_no_classes(tmp_path):
    path = golden_file(tmp_path, "vit_token_norep")
    model, params = vit_jax.from_pretrained(path, num_classes=0)
    arrays, _ = golden("vit_token_norep")
    assert "head" not in params
    assert np.abs(applied(model, params, arrays["inputs"]) - arrays["pre_logits"]).max() <= 2e-5


def test_token_and_mean_pooling_are_exchanged(tmp_path):
    arrays, _ = golden("vit_token_rep")
    path = golden_file(tmp_path, "vit_token_rep")
    model, params = vit_jax.from_pretrained(path, pool="gap", num_classes=5)
    np.testing.assert_array_equal(
        scan_layout.flatten(params)[POSEMB], arrays[f"params/{POSEMB}"][:, 1:]
    )
    assert "cls" not in params and applied(model, params, arrays["inputs"]).shape == (3, 5)
    _, params = vit_jax.from_pretrained(path, pool="gap", class_token=True, num_classes=5)
    np.testing.assert_array_equal(scan_layout.flatten(params)[POSEMB], arrays[f"params/{POSEMB}"])
    _, params = vit_jax.from_pretrained(
        golden_file(tmp_path, "vit_gap_rep"), pool="tok", num_classes=5
    )
    assert not params["cls"].any() and not scan_layout.flatten(params)[POSEMB][:, 0].any()


def test_registers_and_the_distillation_token_come_and_go(tmp_path):
    path = golden_file(tmp_path, "vit_token_norep")
    saved = below(golden("vit_token_norep")[0], "params")[POSEMB]
    _, params = vit_jax.from_pretrained(path, registers=2, distilled=True, num_classes=5)
    rows = scan_layout.flatten(params)[POSEMB]
    assert (
        params["dist"].shape == (1, 1, 48)
        and params["reg"].shape == (1, 2, 48)
        and "head_dist" in params
    )
    np.testing.assert_array_equal(rows[:, [0, *range(4, 20)]], saved)
    assert not rows[:, 1:4].any() and not params["reg"].any()
    with pytest.raises(UserError, match="lack head_dist/bias"):
        vit_jax.from_pretrained(path, distilled=True)
    model, params = vit_jax.from_pretrained(
        GOLDEN / "timm_deit_distilled", distilled=False, num_classes=5
    )
    assert (
        "dist" not in params
        and "head_dist" not in params
        and scan_layout.flatten(params)[POSEMB].shape == (1, 17, 48)
    )
    assert applied(model, params, np.zeros((1, 32, 32, 3))).shape == (1, 5)


def test_layers_are_stacked_and_unstacked_bit_for_bit(tmp_path):
    path = golden_file(tmp_path, "vit_token_rep")
    _, loop = vit_jax.from_pretrained(path)
    model, stacked = vit_jax.from_pretrained(path, scan=True)
    assert model.scan and stacked["Transformer"]["encoderblock"]["LayerNorm_0"]["scale"].shape == (
        2,
        48,
    )
    back = scan_layout.flatten(scan_layout.unstack_blocks(stacked))
    for key, value in scan_layout.flatten(loop).items():
        np.testing.assert_array_equal(back[key], value)


def test_another_dtype_computes_and_does_not_store(tmp_path):
    arrays, _ = golden("vit_token_norep")
    model, params = vit_jax.from_pretrained(
        golden_file(tmp_path, "vit_token_norep"), dtype="bfloat16"
    )
    assert model.dtype == "bfloat16" and all(
        leaf.dtype == np.float32 for leaf in jax.tree.leaves(params)
    )
    for key, value in scan_layout.flatten(params).items():
        np.testing.assert_array_equal(value, arrays[f"params/{key}"])


@pytest.mark.parametrize("size", [16.5, "a", (1, 2, 3)])
def test_odd_sizes_are_named(size, tmp_path):
    with pytest.raises(UserError, match="neither a whole number nor a pair"):
        vit_jax.create_model("Ti/16", image_size=size)
    with pytest.raises(UserError, match="neither a whole number nor a pair"):
        vit_jax.from_pretrained(golden_file(tmp_path, "vit_gap_rep"), image_size=size)


def test_another_architecture_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"npz: the weights are of MlpMixer, but the model is VisionTransformer"
    ):
        adapt.adapt(
            pretrained.read(golden_file(tmp_path, "mixer_p8")), vit_jax.create_model(**SIZES), False
        )
    with pytest.raises(UserError, match="is not a valid regular expression"):
        vit_jax.from_pretrained(golden_file(tmp_path, "vit_gap_rep"), allow="(")


def drawn(**fields) -> pretrained.Weights:
    """Weights of a model, every leaf drawn."""
    model = vit_jax.create_model(**(SIZES | fields))
    rng = np.random.default_rng(0)
    shapes = scan_layout.flatten(adapt.abstract_params(model.with_scan(False)))
    params = {
        name: rng.normal(0, 0.1, leaf.shape).astype(np.float32) for name, leaf in shapes.items()
    }
    return pretrained.Weights(params, create.fields(model))


@pytest.mark.parametrize("place", ["stem", "every", "shared"])
def test_learned_positions_are_resampled_wherever_they_stand(place):
    weights = drawn(posemb_at=place)
    model, params = pretrained.build(weights, image_size=(48, 40))
    found = {
        name: value
        for name, value in scan_layout.flatten(params).items()
        if "posembed_input" in name
    }
    assert len(found) == (2 if place == "every" else 1)
    for name, value in found.items():
        wanted = bilinear(weights.params[name][:, 1:], (4, 4), (6, 5))
        np.testing.assert_allclose(value[:, 1:], wanted, atol=1e-6)
        np.testing.assert_array_equal(value[:, :1], weights.params[name][:, :1])
    assert applied(model, params, np.zeros((1, 48, 40, 3))).shape == (1, 5)


def test_positions_by_row_and_column_are_resampled_along_their_axis():
    weights = drawn(posemb="learn2d")
    _, params = pretrained.build(weights, image_size=(48, 24))
    found = params["Transformer"]["posembed_input"]
    for axis, old, new in (("y", (4, 1), (6, 1)), ("x", (1, 4), (1, 3))):
        saved = weights.params[f"Transformer/posembed_input/pos_embedding_{axis}"]
        value = found[f"pos_embedding_{axis}"]
        assert value.shape == (1, *new, 16)
        np.testing.assert_allclose(
            value.reshape(1, -1, 16), bilinear(saved[0], old, new), atol=1e-6
        )
    prefix = "Transformer/posembed_input/pos_embedding_prefix"
    np.testing.assert_array_equal(found["pos_embedding_prefix"], weights.params[prefix])


def test_positions_by_row_and_column_follow_the_prefix_tokens():
    name = "Transformer/posembed_input/pos_embedding_prefix"
    _, params = pretrained.build(drawn(posemb="learn2d"), pool="gap")
    assert name not in scan_layout.flatten(params)
    model, params = pretrained.build(drawn(posemb="learn2d", pool="gap"), pool="tok", registers=1)
    assert (
        scan_layout.flatten(params)[name].shape == (1, 2, 32)
        and not scan_layout.flatten(params)[name].any()
    )
    assert applied(model, params, np.zeros((1, 32, 32, 3))).shape == (1, 5)


def test_relative_positions_keep_their_grid():
    weights = drawn(posemb="relative")
    _, params = pretrained.build(weights)
    assert scan_layout.flatten(params).keys() == weights.params.keys()
    with pytest.raises(
        UserError,
        match=r"relative position embeddings of 4 x 4 tokens do not fit 6 x 6: use the image",
    ):
        pretrained.build(weights, image_size=48)


@pytest.mark.parametrize("kind", ["sincos2d", "none"])
def test_positions_without_parameters_take_any_size(kind):
    weights = drawn(posemb=kind)
    model, params = pretrained.build(weights, image_size=(48, 24))
    assert model.grid == (6, 3) and applied(model, params, np.zeros((1, 48, 24, 3))).shape == (1, 5)
    for name, value in scan_layout.flatten(params).items():
        np.testing.assert_array_equal(value, weights.params[name])


def test_another_kind_of_positions_is_no_adaptation():
    with pytest.raises(UserError, match=f"have {POSEMB}, which the model does not have"):
        pretrained.build(drawn(), posemb="sincos2d")
    with pytest.raises(UserError, match="lack Transformer/posembed_input/pos_embedding_prefix"):
        pretrained.build(drawn(), posemb="learn2d")


FLAGS = [
    "--config.model.variant=Ti/8",
    "--config.model.pool=tok",
    "--config.model.width=32",
    "--config.image_size=48",
]


def trained_from(tiny, path, *flags):
    """The parameters that training would start from."""
    config = configs.load(tiny, [*FLAGS, f"--config.init_from={path}", *flags])
    weights = pretrained.read(path, image_size=config.image_size)
    return states.pretrained_state(build_experiment(config), weights).params


def evaluated_from(tiny, path, monkeypatch):
    """The parameters that an evaluation would use."""
    seen = []
    monkeypatch.setattr(
        suite, "run", lambda evals, step, params, *_, **__: seen.append(params) or {}
    )
    config = configs.load(
        str(GOLDEN.parents[1] / "configs/evaluate.py:digits"), [f"--config.init_from={path}"]
    )
    config.image_size = 48
    evaluate.evaluate(config)
    return seen[0]


def test_every_entry_point_adapts_alike(tiny, tmp_path, monkeypatch):
    path = golden_file(tmp_path, "load_drophead_token_4to6", "pretrained")
    _, wanted = vit_jax.from_pretrained(path, num_classes=10, image_size=48)
    wanted = scan_layout.flatten(wanted)
    convert.convert(str(path), str(tmp_path / "ours"), "ours")
    _, converted = vit_jax.from_pretrained(tmp_path / "ours", num_classes=10, image_size=48)
    found = {
        "train": trained_from(tiny, path),
        "train, scanned": scan_layout.relayout(
            trained_from(tiny, path, "--config.model.scan=True"), False, np.stack
        ),
        "convert": converted,
    }
    for entry, params in found.items():
        assert scan_layout.flatten(params).keys() == wanted.keys(), entry
        for name, value in scan_layout.flatten(params).items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=f"{entry} {name}")
    _, wanted = vit_jax.from_pretrained(path, image_size=48)
    monkeypatch.setattr(suite, "open_all", lambda *arguments: {})
    evaluated = scan_layout.flatten(evaluated_from(tiny, path, monkeypatch))
    assert evaluated.keys() == scan_layout.flatten(wanted).keys()
    for name, value in scan_layout.flatten(wanted).items():
        np.testing.assert_array_equal(evaluated[name], value, err_msg=name)


def test_the_report_shows_what_happened_to_every_parameter(tmp_path, caplog):
    path = golden_file(
        tmp_path, "vit_token_rep", change=lambda flat: flat | {"extra/kernel": np.zeros((3, 3))}
    )
    with caplog.at_level(logging.INFO, "vit_jax.weights.adapt"):
        vit_jax.from_pretrained(path, num_classes=5, image_size=48, registers=1, allow="^extra/")
    report = caplog.messages[-1]
    lines = [re.split(r"  +", line) for line in report.splitlines()[1:]]
    assert ["resampled", POSEMB, "(1, 18, 48) -> (1, 38, 48)"] in lines
    assert ["dropped", "pre_logits/kernel", "the model has no pre_logits"] in lines
    assert ["new", "head/kernel", "0, (48, 5)"] in lines
    assert ["new", "reg", "zero, (1, 1, 48)"] in lines
    assert ["unused", "extra/kernel", "(3, 3)"] in lines
    number = len(below(golden("vit_token_rep")[0], "params")) - len(
        ["head"] * 2 + ["pre_logits"] * 2 + ["posemb"]
    )
    assert lines[0] == ["loaded", f"{number} parameters", "unchanged"]


def test_a_config_that_says_otherwise_than_the_weights_gets_the_flags_to_add(tiny, tmp_path):
    folder = golden_folder(tmp_path, "hf_vit")
    processor = '{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}'
    (folder / "preprocessor_config.json").write_text(processor)
    sizes = [
        f"--config.model.{key}={value}"
        for key, value in dict(width=48, mlp_dim=192, num_heads=3).items()
    ]
    sizes.append("--config.image_size=32")
    with pytest.raises(UserError, match="differ in gelu, ln_eps, mean, std: add ") as error:
        trained_from(tiny, folder, *sizes)
    flags = re.findall(r"--config\.model\.\S+", str(error.value))
    assert len(flags) == 4
    params = scan_layout.flatten(trained_from(tiny, folder, *sizes, *flags))
    for name, value in pretrained.read(folder).params.items():
        if not name.startswith("head/"):
            np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_naming_the_pooling_that_the_weights_have_changes_nothing(tmp_path):
    folder = golden_folder(tmp_path, "timm_gap")
    expected = np.load(folder / "expected.npz")
    model, params = vit_jax.from_pretrained(folder, pool="gap")
    logits = applied(model, params, expected["image"])
    assert model.class_token and np.abs(logits - expected["logits"]).max() <= 2e-5


def test_the_class_token_stays_where_its_format_keeps_it(tmp_path):
    timm, _ = vit_jax.from_pretrained(golden_folder(tmp_path, "timm_token"), pool="gap")
    published, _ = vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_norep"), pool="gap")
    assert timm.prefix == (("cls", 1),) and published.prefix == ()


def test_a_lone_file_with_rows_for_a_grid_that_is_not_square_asks_for_it(tmp_path):
    """4 x 6 patches and a class token are 25 rows, which could be 5 x 5 without one."""
    lone = golden_folder(tmp_path, "timm_nonsquare") / "model.safetensors"
    (lone.parent / "config.json").unlink()
    with pytest.raises(UserError, match="24 patch tokens, not a square number"):
        vit_jax.from_pretrained(lone, num_heads=3)
    assert vit_jax.from_pretrained(lone, num_heads=3, image_size=(32, 48))[0].grid == (4, 6)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("cls", "is cls missing"),
        ("clsx", "it has clsx, which is not known; the nearest name is cls"),
    ],
)
def test_a_lost_class_token_is_suspected(key, message, tmp_path):
    def change(flat):
        cls = flat.pop("cls")
        return flat | ({key: cls} if key != "cls" else {})

    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(golden_file(tmp_path, "vit_token_rep", change=change))


def test_architectures_are_compared_before_anything_else(tmp_path):
    weights = pretrained.read(golden_file(tmp_path, "mixer_p8"))
    model = vit_jax.create_model("Ti/8", image_size=32)
    with pytest.raises(
        UserError, match="the weights are of MlpMixer, but the model is VisionTransformer"
    ):
        adapt.check_same_function(weights, model)
    with pytest.raises(
        UserError, match="trained for 4 x 4 patches, not 8 x 8, and can't be resampled"
    ):
        pretrained.build(weights, image_size=64)


def test_prefix_tokens_of_the_same_pooling_must_agree_in_training(tmp_path):
    weights = pretrained.read(golden_folder(tmp_path, "timm_gap"))
    fields = weights.fields | dict(class_token=False)
    with pytest.raises(
        UserError, match=r"differ in class_token: add --config.model.class_token=True"
    ):
        adapt.check_same_function(weights, vit_jax.create_model(**fields))
