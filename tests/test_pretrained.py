"""Foreign weights: position embeddings, adaptation, and what a damaged or foreign file says."""

import zipfile

import numpy as np
import pytest
from conftest import below, golden

import vit_jax
from vit_jax import layout, pretrained
from vit_jax.errors import UserError
from vit_jax.formats.published import LINEN_NAMES
from vit_jax.formats.weights import POSEMB


@pytest.mark.parametrize("case", golden("posemb_resize")[1]["cases"], ids=lambda case: case["name"])
def test_resampling_equals_the_published_one(case):
    arrays, _ = golden("posemb_resize")
    prefix = int(case.get("has_class_token", False))
    grid = (case["gs_new"],) * 2
    out = pretrained.resample_posemb(arrays[f"{case['name']}/in"], grid, num_prefix=prefix)
    np.testing.assert_allclose(out, arrays[f"{case['name']}/out"], atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [((2, 8), (4, 4)), ((4, 6), (7, 3)), ((3, 5), (6, 5)), ((1, 4), (1, 7))])
def test_resampling_off_the_square_is_linear_along_each_axis(old, new):
    """A linear ramp stays that ramp, corners included, and prefix rows are untouched."""
    rng = np.random.default_rng(0)
    prefix = rng.normal(size=(2, 3)).astype(np.float32)

    def ramp(grid):
        y, x = np.meshgrid(np.linspace(0, 1, grid[0]), np.linspace(0, 1, grid[1]), indexing="ij")
        return np.stack([y, x, 2 * y - x], -1).reshape(-1, 3).astype(np.float32)

    def expected(grid):
        """One row only: the ramp along that axis is its start."""
        return ramp(grid)

    posemb = np.concatenate([prefix, ramp(old)])
    out = pretrained.resample_posemb(posemb, new, old, num_prefix=2)
    np.testing.assert_array_equal(out[:2], prefix)
    np.testing.assert_allclose(out[2:], expected(new), atol=1e-6)
    batched = pretrained.resample_posemb(posemb[None], new, old, num_prefix=2)
    np.testing.assert_array_equal(batched[0], out)


def test_a_grid_that_does_not_fit_is_an_error():
    with pytest.raises(UserError, match="does not fill a grid of 3 x 3"):
        pretrained.resample_posemb(np.zeros((13, 4)), (4, 4), num_prefix=1)


@pytest.mark.parametrize("name", ["load_drophead_token_4to6", "load_gap_4to6", "load_hybrid_gn4d_nostage"])
def test_a_new_head_at_another_resolution_equals_the_published_loader(name, tmp_path):
    arrays, config = golden(name)
    np.savez(tmp_path / "w.npz", **below(arrays, "pretrained"))
    size = arrays["inputs"].shape[1:3]
    model, params = vit_jax.from_pretrained(tmp_path / "w.npz", num_classes=3, image_size=size)
    flat = layout.flatten(params)
    assert not flat["head/kernel"].any() and not flat["head/bias"].any() and model.pre_logits == 0
    assert len(flat) == len(config["result_shapes"])
    np.testing.assert_allclose(flat[POSEMB], arrays[f"result/{POSEMB}"], atol=1e-6)
    features = vit_jax.features(model, params, arrays["inputs"])
    assert np.abs(features - arrays["pre_logits_after_load"]).max() <= 2e-5


def published(tmp_path, change=lambda flat: flat):
    arrays, _ = golden("vit_token_rep")
    np.savez(tmp_path / "w.npz", **change(below(arrays, "params")))
    return tmp_path / "w.npz"


def test_scan_layout_round_trips(tmp_path):
    _, params = vit_jax.from_pretrained(published(tmp_path))
    stacked = layout.stack_blocks(params)
    assert stacked["Transformer"]["encoderblock"]["LayerNorm_0"]["scale"].shape[0] == 2
    back = layout.flatten(layout.unstack_blocks(stacked))
    for key, value in layout.flatten(params).items():
        np.testing.assert_array_equal(back[key], value)


def test_linen_names_are_read_like_published_ones(tmp_path):
    back = {new: old for old, new in LINEN_NAMES.items()}

    def rename(flat):
        return {"/".join(back.get(part, part) for part in key.split("/")): value for key, value in flat.items()}

    _, plain = vit_jax.from_pretrained(published(tmp_path))
    _, linen = vit_jax.from_pretrained(published(tmp_path, rename))
    for key, value in layout.flatten(plain).items():
        np.testing.assert_array_equal(layout.flatten(linen)[key], value)


def test_pre_logits_are_kept_or_dropped_as_asked(tmp_path):
    path = published(tmp_path)
    assert vit_jax.from_pretrained(path)[0].pre_logits == 40
    assert vit_jax.from_pretrained(path, num_classes=5)[0].pre_logits == 0
    model, params = vit_jax.from_pretrained(path, num_classes=5, pre_logits=True)
    assert model.pre_logits == 40 and params["head"]["kernel"].shape == (40, 5)


def test_token_and_mean_pooling_are_exchanged(tmp_path):
    model, params = vit_jax.from_pretrained(published(tmp_path), pool="gap", num_classes=5)
    posemb = params["Transformer"]["posembed_input"]["pos_embedding"]
    arrays, _ = golden("vit_token_rep")
    np.testing.assert_array_equal(posemb, arrays[f"params/{POSEMB}"][:, 1:])
    assert "cls" not in params
    model.apply({"params": params}, np.zeros((1, 32, 32, 3)))


def without(name):
    return lambda flat: {key: value for key, value in flat.items() if key != name}


def renamed(old, new):
    return lambda flat: {new if key == old else key: value for key, value in flat.items()}


QUERY = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("Transformer/encoder_norm/scale"), "lack Transformer/encoder_norm/scale"),
        (without("embedding/kernel"), "has no embedding/kernel"),
        (renamed(QUERY, QUERY.replace("query", "querry")), f"lack {QUERY} .* nearest name is .*querry"),
        (lambda flat: flat | {"extra/kernel": np.zeros(3)}, "have extra/kernel, which the model has not"),
        (lambda flat: flat | {QUERY: np.zeros((48, 4, 11))}, r"is \(48, 4, 11\), but the model has \(48, 4, 12\)"),
        (lambda flat: {k: v for k, v in flat.items() if "encoderblock_0" not in k}, r"blocks \[1\]: some are missing"),
        (lambda flat: dict(a=np.zeros(3)), "has no embedding/kernel .* not the weights of a ViT"),
    ],
)
def test_foreign_parameters_are_named(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(published(tmp_path, change))


def test_a_grid_that_the_file_cannot_tell_is_asked_for(tmp_path):
    arrays, _ = golden("vit_token_p8_nonsquare")
    np.savez(tmp_path / "w.npz", **below(arrays, "params"))
    with pytest.raises(UserError, match=r"24 patch tokens, no square: give grid=\(h, w\)"):
        vit_jax.from_pretrained(tmp_path / "w.npz")
    model, _ = vit_jax.from_pretrained(tmp_path / "w.npz", grid=(4, 6))
    assert model.image_size == (32, 48)
    model, params = vit_jax.from_pretrained(tmp_path / "w.npz", grid=(4, 6), image_size=(48, 32))
    assert model.grid == (6, 4) and params["Transformer"]["posembed_input"]["pos_embedding"].shape[1] == 25


def damaged(kind: str, good: bytes) -> bytes:
    if kind == "pickle":
        import io

        buffer = io.BytesIO()
        np.savez(buffer, a=np.array([{}], object))
        return buffer.getvalue()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    return {"empty": b"", "text": b"not weights", "truncated": good[: len(good) // 2], "flipped": bytes(flipped)}[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "flipped", "pickle"])
def test_damaged_files_end_in_one_line(kind, tmp_path):
    path = published(tmp_path)
    path.write_bytes(damaged(kind, path.read_bytes()))
    with pytest.raises(UserError, match=r"w\.npz can't be read as \.npz") as error:
        vit_jax.from_pretrained(path)
    assert "\n" not in str(error.value)


def test_a_zip_without_arrays_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError):
        vit_jax.from_pretrained(tmp_path / "w.npz")


def test_a_new_head_is_zero_whatever_the_old_one_started_from(tmp_path):
    path = published(tmp_path)
    weights = pretrained.read(path)
    biased = pretrained.Weights(weights.params, weights.fields | dict(head_bias=-10.0))
    _, params = pretrained.build(biased, num_classes=5)
    assert not params["head"]["bias"].any() and not params["head"]["kernel"].any()


@pytest.mark.parametrize("name", ["head/bias", "head/kernel", "pre_logits/bias", "pre_logits/kernel"])
def test_half_a_layer_is_an_error(name, tmp_path):
    with pytest.raises(UserError, match=f"lack {name}"):
        vit_jax.from_pretrained(published(tmp_path, without(name)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda flat: flat | {"embedding/kernel": np.zeros((8, 8, 3, 48), np.int32)}, "embedding/kernel of type int32"),
        (lambda flat: flat | {"head/bias": np.float32(1)}, r"head/bias of type float32, shape \(\)"),
        (lambda flat: flat | {"embedding/kernel": np.zeros(48, np.float32)}, r"embedding/kernel of shape \(48,\)"),
        (lambda flat: flat | {POSEMB: np.zeros((1, 1, 48), np.float32)}, "it has no patch rows"),
        (lambda flat: flat | {"cls": np.array(["text"])}, "cls of type <U4"),
    ],
)
def test_arrays_that_are_no_weights_are_named(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        vit_jax.from_pretrained(published(tmp_path, change))


def test_bfloat16_and_float64_files_are_read_as_float32(tmp_path):
    import ml_dtypes

    _, plain = vit_jax.from_pretrained(published(tmp_path))
    _, double = vit_jax.from_pretrained(published(tmp_path, lambda f: {k: v.astype(np.float64) for k, v in f.items()}))
    _, half = vit_jax.from_pretrained(
        published(tmp_path, lambda f: {k: v.astype(ml_dtypes.bfloat16) for k, v in f.items()})
    )
    for key, value in layout.flatten(plain).items():
        np.testing.assert_array_equal(layout.flatten(double)[key], value)
        found = layout.flatten(half)[key]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, value.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_single_array_is_refused(tmp_path):
    np.save(tmp_path / "w.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"can't be read as \.npz"):
        vit_jax.from_pretrained(tmp_path / "w.npy")


@pytest.mark.parametrize("size", [16.5, "a", (1, 2, 3)])
def test_odd_sizes_are_named(size):
    with pytest.raises(UserError, match="neither a whole number nor a pair"):
        vit_jax.create_model("Ti/16", image_size=size)
