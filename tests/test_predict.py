"""Classes and features of images against the model applied by hand, the files that are written, and
what is refused.
"""

import csv
import errno
import io
import os
import shutil

import numpy as np
import pytest
from conftest import GOLDEN, applied, golden_file, last_error
from etils import epath
from PIL import Image

import vit_jax
from vit_jax import predict
from vit_jax.train import __main__ as train
from vit_jax.weights import load as pretrained


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four images at three depths."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("a.png", "deep/b.png", "deep/er/c.PNG", "deep/er/d.png"):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(
            folder / name, format="png"
        )
    (folder / "notes.txt").write_text("no image")
    return folder


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return golden_file(tmp_path_factory.mktemp("weights"), "vit_token_rep")


def test_classes_are_those_of_the_model(photos, weights, tmp_path, capsys):
    out = tmp_path / "found.csv"
    assert predict.main([f"--checkpoint={weights}", str(photos), "--top_k=3", f"--out={out}"]) == 0
    rows = list(csv.reader(out.read_text().splitlines()))
    assert rows[0] == [
        "path",
        "class_1",
        "probability_1",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
    ]
    names = ["a.png", "deep/b.png", "deep/er/c.PNG", "deep/er/d.png"]
    assert [row[0] for row in rows[1:]] == [str(photos / name) for name in names]
    model, params = vit_jax.from_pretrained(weights)
    images = np.stack([pixels(photos / name) for name in names])
    assert model.image_size == (32, 32)
    logits = np.asarray(applied(model, params, model.normalize(images)), np.float64)
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    for row, own in zip(rows[1:], likely, strict=True):
        best = np.argsort(-own)[:3]
        assert row[1::2] == [f"class {i}" for i in best]
        np.testing.assert_allclose(np.asarray(row[2::2], float), own[best], rtol=1e-3)


def test_features_are_what_the_head_reads(photos, weights, tmp_path):
    out = tmp_path / "found.npz"
    one = [str(photos / "deep/b.png"), str(photos / "a.png")]
    assert predict.main([f"--checkpoint={weights}", *one, "--top_k=2", f"--out={out}"]) == 0
    both = np.load(out)
    assert both["label"].shape == both["probability"].shape == (2, 2)
    assert predict.main([f"--checkpoint={weights}", *one, "--top_k=0", f"--out={out}"]) == 0
    found = np.load(out)
    np.testing.assert_allclose(found["features"], both["features"], atol=1e-5)
    assert found["path"].tolist() == one
    model, params = vit_jax.from_pretrained(weights)
    images = np.stack([pixels(path) for path in one])
    wanted = pretrained.features(model, params, model.normalize(images))
    np.testing.assert_allclose(found["features"], wanted, atol=2e-5)


def test_weights_for_images_that_are_not_square(photos, tmp_path):
    """32 x 48 of a model of timm, whose config has timm's defaults for the rest."""
    out = tmp_path / "found.npz"
    weights = str(GOLDEN / "timm_nonsquare")
    image = str(photos / "a.png")
    assert predict.main([f"--checkpoint={weights}", image, "--top_k=0", f"--out={out}"]) == 0
    model, params = vit_jax.from_pretrained(weights)
    # floor(48 / 0.875) = 54 is the shorter side after resizing; then the centre.
    resized = Image.open(image).resize((54, 54), Image.Resampling.BICUBIC)
    prepared = np.asarray(resized.crop((3, 11, 51, 43)))
    wanted = pretrained.features(model, params, model.normalize(prepared[None]))
    np.testing.assert_allclose(np.load(out)["features"], wanted, atol=2e-5)


@pytest.mark.slow
def test_class_names_and_the_kind_of_loss_come_from_the_checkpoint(tiny, photos, tmp_path, capsys):
    arguments = [f"--config={tiny}", "--config.total_steps=2", "--config.loss=sigmoid_xent"]
    assert train.main([*arguments, f"--workdir={tmp_path}/run"]) == 0
    capsys.readouterr()
    assert (
        predict.main(
            [
                f"--checkpoint={tmp_path}/run",
                str(photos),
                "--top_k=10",
                f"--out={tmp_path}/found.csv",
            ]
        )
        == 0
    )
    rows = list(csv.reader((tmp_path / "found.csv").read_text().splitlines()))[1:]
    assert sorted(rows[0][1::2]) == [str(digit) for digit in range(10)]
    total = sum(map(float, rows[0][2::2]))
    assert abs(total - 1) > 0.1  # of independent classes they do not add up to one
    assert predict.main([f"--checkpoint={tmp_path}/run", str(photos / "a.png")]) == 0
    assert capsys.readouterr().out.startswith(f"{photos}/a.png: ")


def test_an_image_that_can_not_be_read_is_told_and_the_others_are_predicted(
    photos, weights, tmp_path, capsys
):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"nothing")
    out = tmp_path / "found.csv"
    assert (
        predict.main([f"--checkpoint={weights}", str(photos / "a.png"), str(bad), f"--out={out}"])
        == 1
    )
    assert f"1 of the images can't be read, the first is {bad}" in last_error(capsys)
    assert [row[0] for row in csv.reader(out.read_text().splitlines())][1:] == [
        str(photos / "a.png")
    ]


def test_names_are_written_and_shown_escaped(photos, weights, tmp_path, capfd):
    """One that is not UTF-8, one that would clear a terminal, and one that is a formula."""
    names = [b"caf\xe9.png", b"\x1b[2J.png", b"=1+2.png"]
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in names:
        shutil.copy(photos / "a.png", os.path.join(os.fsencode(folder), name))
    out = tmp_path / "found.csv"
    assert predict.main([f"--checkpoint={weights}", str(folder), f"--out={out}"]) == 0
    with out.open(newline="", encoding="utf-8") as file:
        paths = [row[0] for row in csv.reader(file)][1:]
    escaped = [r"\x1b[2J.png", "=1+2.png", r"caf\xe9.png"]
    assert paths == [f"{folder}/{name}" for name in escaped]
    assert predict.main([f"--checkpoint={weights}", str(folder)]) == 0
    shown = capfd.readouterr().out
    assert r"caf\xe9.png: " in shown and r"\x1b[2J.png: " in shown and "\x1b" not in shown
    assert predict.cell("=1+2") == "'=1+2"


def test_a_line_break_in_a_name_begins_no_row():
    names = ["a\r=1+1", "b\n=1+1", "c,=1+1"]
    one = np.ones((3, 1))
    result = dict(path=names, label=one.astype(int), probability=one, names=["x", "owl"])
    text = predict.as_csv(result)
    paths = [row[0] for row in csv.reader(io.StringIO(text, newline=""))]
    assert paths == ["path", r"a\r=1+1", r"b\n=1+1", "c,=1+1"]


def test_a_result_that_can_not_be_written_leaves_the_old_one(
    photos, weights, tmp_path, monkeypatch
):
    out = tmp_path / "found.csv"
    out.write_text("of yesterday")

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", full)
    assert predict.main([f"--checkpoint={weights}", str(photos / "a.png"), f"--out={out}"]) == 2
    assert out.read_text() == "of yesterday" and sorted(tmp_path.iterdir()) == [out]


def test_weights_that_are_not_finite_are_named(photos, weights, tmp_path, capsys):
    arrays = dict(np.load(weights))
    arrays["head/kernel"] = np.full_like(arrays["head/kernel"], np.nan)
    np.savez(tmp_path / "nan.npz", **arrays)
    assert predict.main([f"--checkpoint={tmp_path}/nan.npz", str(photos / "a.png")]) == 1
    text = last_error(capsys)
    assert "nan.npz gives results that are not finite for 1 of 1 images, such as" in text


MISTAKES = {
    "does not exist: correct the path": ["/no/such/image.png"],
    "has no images": ["{empty}"],
    "must end in .csv or .npz": ["{photos}", "--out=found.txt"],
    "can't be negative": ["{photos}", "--top_k=-1"],
    "the folder of --out=/no/such/folder/found.csv does not exist": [
        "{photos}",
        "--out=/no/such/folder/found.csv",
    ],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_line(photos, weights, tmp_path, capsys, message):
    arguments = [argument.format(photos=photos, empty=tmp_path) for argument in MISTAKES[message]]
    assert predict.main([f"--checkpoint={weights}", *arguments]) == 2
    assert message in last_error(capsys)


@pytest.mark.parametrize("top_k", [0, 2])
def test_no_readable_image_is_one_line(weights, tmp_path, capsys, top_k):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    words = [f"--checkpoint={weights}", str(tmp_path / "bad.png"), f"--top_k={top_k}"]
    assert predict.main(words) == 1
    assert "1 of the images can't be read" in last_error(capsys)


def test_predictions_have_no_limit_of_unreadable_images(photos, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("vit_jax.data.skipped.RECENT", 1)
    (tmp_path / "bad.png").write_bytes(b"nothing")
    assert predict.main([f"--checkpoint={weights}", str(tmp_path / "bad.png")]) == 1
