"""Classes and features from Python equal those of `vit_jax.predict`, and the model by hand."""

import csv
import dataclasses

import numpy as np
import pytest
from conftest import GOLDEN, golden_file
from PIL import Image

import vit_jax
from vit_jax import predict
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import predictions
from vit_jax.weights import load
from vit_jax.weights.pretrained import Pretrained

NAMES = ("cat", "dog", "a long\x1b name")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return golden_file(tmp_path_factory.mktemp("weights"), "vit_token_rep")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    paths = [str(folder / f"{i}.png") for i in range(11)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (40, 30, 3), np.uint8)).save(path)
    return paths


def test_classes_equal_those_of_the_command(weights, photos, tmp_path):
    out = tmp_path / "found.csv"
    assert predict.main([f"--checkpoint={weights}", *photos, "--top_k=3", f"--out={out}"]) == 0
    rows = list(csv.reader(out.read_text().splitlines()))[1:]
    found = vit_jax.classify(vit_jax.from_pretrained(weights), photos, top_k=3)
    assert [row[0] for row in rows] == photos and len(found) == 11
    for row, best in zip(rows, found, strict=True):
        assert row[1::2] == [prediction.name for prediction in best]
        assert [f"class {prediction.label}" for prediction in best] == row[1::2]
        probabilities = [prediction.probability for prediction in best]
        np.testing.assert_allclose(probabilities, np.float64(row[2::2]), rtol=1e-5)


def test_features_equal_those_of_the_command_in_batches_of_any_size(weights, photos, capfd):
    pretrained = vit_jax.from_pretrained(weights)
    wanted = predict.predict(load.read(weights), photos, 0, None)["features"]
    capfd.readouterr()
    whole = vit_jax.embed(pretrained, photos)
    assert "images" not in capfd.readouterr().err  # one batch needs no progress bar
    np.testing.assert_allclose(whole, wanted, atol=1e-5)
    parts = vit_jax.embed(tuple(pretrained), photos, batch_size=1)  # eight, on eight devices
    assert "11/11" in capfd.readouterr().err
    np.testing.assert_allclose(parts, wanted, atol=1e-5)
    model, params = pretrained
    by_hand = vit_jax.features(model, params, vit_jax.preprocess(model, photos))
    np.testing.assert_allclose(whole, by_hand, atol=1e-5)


def test_a_second_call_compiles_nothing(weights, photos):
    vit_jax.classify(vit_jax.from_pretrained(weights), photos[:8], top_k=2)
    pretrained = vit_jax.from_pretrained(weights)
    step = predictions.make_step(pretrained.model, 2, False)
    compiled = step._cache_size()
    vit_jax.classify(pretrained, photos[3:], top_k=2)
    assert compiled == step._cache_size() > 0


def test_names_and_the_kind_of_probability_are_those_of_the_weights(weights, photos):
    read = load.read(weights)
    count = read.fields["num_classes"]
    read = dataclasses.replace(read, class_names=NAMES, loss="sigmoid_xent")
    pretrained = load.build(read)
    assert pretrained.class_names == (*NAMES, *(f"class {i}" for i in range(3, count)))
    (best,) = vit_jax.classify(pretrained, photos[0], top_k=99)
    assert sorted(p.name for p in best) == sorted(pretrained.class_names)
    image = vit_jax.preprocess(pretrained.model, photos[0])
    logits = np.float64(pretrained.model.apply({"params": pretrained.params}, image))[0]
    for name, probability, label in best:
        assert pretrained.class_names[label] == name
        assert abs(probability - 1 / (1 + np.exp(-logits[label]))) < 1e-5


def test_what_is_refused(weights, photos, tmp_path):
    pretrained = vit_jax.from_pretrained(weights)
    with pytest.raises(
        UserError, match=r"top_k=0 must be at least 1: correct it, or use vit_jax.e"
    ):
        vit_jax.classify(pretrained, photos, top_k=0)
    for top_k in (2.5, "a"):
        with pytest.raises(UserError, match=f"top_k={top_k!r} must be a whole number"):
            vit_jax.classify(pretrained, photos, top_k=top_k)
    with pytest.raises(UserError, match="batch_size=0 must be at least 1"):
        vit_jax.embed(pretrained, photos, batch_size=0)
    headless = vit_jax.from_pretrained(weights, num_classes=0)
    with pytest.raises(
        UserError, match=r"rep.npz has no head and so no classes: use vit_jax.embed"
    ):
        vit_jax.classify(headless, photos)
    unpooled = vit_jax.from_pretrained(golden_file(tmp_path, "vit_unpooled"), pool="unpooled")
    with pytest.raises(UserError, match="has logits for every token, not for an image"):
        vit_jax.classify(unpooled, photos)
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(UserError, match=r"bad.png can't be read as an image"):
        vit_jax.embed(pretrained, [*photos, tmp_path / "bad.png"], batch_size=8)
    params = dict(pretrained.params)
    params["head"] = {name: np.full_like(leaf, np.nan) for name, leaf in params["head"].items()}
    with pytest.raises(NegativeResult, match=r"the model gives results .* for 1 of 1 images"):
        vit_jax.classify((pretrained.model, params), np.zeros((1, 9, 9, 3), np.uint8))


def test_weights_of_timm_are_applied_without_tensorflow(photos, monkeypatch):
    pretrained = vit_jax.from_pretrained(GOLDEN / "timm_token")
    assert isinstance(pretrained, Pretrained)
    wanted = predict.predict(load.read(GOLDEN / "timm_token"), photos[:2], 0, None)["features"]
    monkeypatch.setattr("vit_jax.data.images.eval_image", None)
    np.testing.assert_allclose(vit_jax.embed(pretrained, photos[:2]), wanted, atol=1e-5)
