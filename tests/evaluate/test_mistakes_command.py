"""`vit_jax.evaluate --out`, beside logits that are computed apart."""

import csv
import io
import json
import pathlib

import jax
import numpy as np
import pytest
from conftest import last_error
from PIL import Image
from sklearn import metrics

import vit_jax
from vit_jax.data.sources import open as sources
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate.mistakes import contact_sheets
from vit_jax.weights import scan_layout

FILES = ["calibration.png", "classes.csv", "confusion.png", "images.jsonl", "least_sure.jpg"]
FILES += ["mistakes.jpg", "summary.json"]
DIGITS = """
def get_config():
    data = dict(name="digits", batch_size=56)
    return dict(image_size=0, data=data, evals=dict(val=dict(data=dict(split="val"))))
"""


def write_weights(path, *variant, **fields) -> str:
    """Random weights with a random head, as a published .npz."""
    model = vit_jax.create_model(*variant, image_size=8, **fields)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]
    flat = scan_layout.flatten(params)
    rng = np.random.default_rng(0)
    flat["head/kernel"] = rng.normal(size=flat["head/kernel"].shape).astype(np.float32)
    np.savez(path, **flat)
    return str(path)


SIZES = dict(patch_size=(4, 4), width=16, depth=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "vit.npz"
    return write_weights(path, "Ti/16", num_classes=10, num_heads=2, mlp_dim=16, **SIZES)


@pytest.fixture
def digits(tmp_path) -> str:
    (tmp_path / "digits.py").write_text(DIGITS)
    return str(tmp_path / "digits.py")


def lines_of(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]


def test_records_are_those_of_logits_computed_apart(weights, digits, tmp_path):
    """360 images in batches of 56 on 8 devices: each is counted once, in the order of the data."""
    arguments = [f"--config={digits}", f"--init_from={weights}", f"--json={tmp_path}/found.json"]
    assert evaluate.main([*arguments, f"--out={tmp_path}/out"]) == 0
    folder = tmp_path / "out/val"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    source = sources.open_source("digits", "val")
    model, params = vit_jax.from_pretrained(weights)
    encoded = [source.example(i)[0] for i in range(len(source))]
    images = [np.asarray(Image.open(io.BytesIO(x)).convert("RGB")) for x in encoded]
    logits = np.asarray(model.apply({"params": params}, model.normalize(np.stack(images))))
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    label = source.labels()

    lines = lines_of(folder)
    assert [line["id"] for line in lines] == list(range(360))
    assert [line["label"] for line in lines] == label.tolist()
    assert [line["path"] for line in lines] == [source.describe(i) for i in range(360)]
    top = np.array([line["top5"] for line in lines])
    order = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(top[..., 0], order)
    np.testing.assert_allclose(top[..., 1], np.take_along_axis(probability, order, 1), rtol=1e-3)
    loss = -np.log(probability[np.arange(360), label])
    np.testing.assert_allclose([line["loss"] for line in lines], loss, rtol=1e-3, atol=1e-4)

    summary = json.loads((folder / "summary.json").read_text())
    printed = json.loads((tmp_path / "found.json").read_text())
    assert {f"eval/val/{key}": summary[key] for key in ("top1", "loss", "count")} == printed
    assert summary["top1"] == pytest.approx(np.mean(logits.argmax(1) == label))
    assert summary["top5"] == pytest.approx(metrics.top_k_accuracy_score(label, logits, k=5))
    f1 = metrics.f1_score(label, logits.argmax(1), average="macro")
    assert summary["macro_f1"] == pytest.approx(f1)
    assert summary["mean_average_precision"] is None and summary["step"] is None
    assert summary["name"] == "val" and summary["weights"] == weights
    assert summary["class_names"] == [str(i) for i in range(10)]
    matrix = metrics.confusion_matrix(label, logits.argmax(1))
    true, taken, count = summary["pairs"][0]
    assert count == matrix[true, taken] == (matrix - np.diag(matrix.diagonal())).max()
    assert sum(bin["count"] for bin in summary["calibration"]) == 360
    rows = list(csv.DictReader((folder / "classes.csv").read_text().splitlines()))
    assert [int(row["correct"]) for row in rows] == matrix.diagonal().tolist()

    assert evaluate.main(arguments) == 0  # without --out
    assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx(printed)


def test_several_labels_have_average_precision_and_no_confusion(tmp_path):
    """A mixer, which has no attention; one image has no label, one can't be read."""
    rng = np.random.default_rng(0)
    labels = ["cat;dog", "dog", "", "cat;=owl", "cat", "dog;cat"]
    rows = [f"{i}.png,{label}" for i, label in enumerate(labels)]
    for i in range(len(labels)):
        pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    (tmp_path / "4.png").write_bytes(b"nothing")
    (tmp_path / "list.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
    mixer = write_weights(
        tmp_path / "mixer.npz",
        "Mixer-B/16",
        num_classes=3,
        tokens_mlp_dim=8,
        channels_mlp_dim=8,
        **SIZES,
    )
    config = dict(
        image_size=0,
        init_from=mixer,
        loss="sigmoid_xent",
        data=dict(name=f"csv:{tmp_path}/list.csv", batch_size=8, on_corrupt="skip"),
        evals=dict(all=dict(data=dict(split="train"))),
    )
    scalars = vit_jax.score(config, out=tmp_path / "out")
    assert scalars["eval/all/count"] == 4
    folder = tmp_path / "out/all"
    lines = lines_of(folder)
    assert [line["id"] for line in lines] == [0, 1, 3, 5]
    assert [line["label"] for line in lines] == [[1, 2], [2], [1, 0], [2, 1]]
    scores = np.zeros((4, 3))
    for row, line in enumerate(lines):
        for label, probability in line["top5"]:
            scores[row, label] = probability
    positive = np.array([[i in line["label"] for i in range(3)] for line in lines])
    wanted = metrics.average_precision_score(positive, scores, average="macro")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mean_average_precision"] == pytest.approx(wanted)
    assert summary["macro_f1"] is None and summary["pairs"] == []
    assert not (folder / "confusion.png").exists()
    table = (folder / "classes.csv").read_text().splitlines()
    assert table[0] == "class,name,count,average_precision"
    assert [row.split(",")[1:3] for row in table[1:]] == [
        ["'=owl", "1"],
        ["cat", "3"],
        ["dog", "3"],
    ]


def test_weights_that_are_not_finite_are_not_described(weights, digits, tmp_path, capsys):
    with np.load(weights, allow_pickle=False) as archive:
        arrays = dict(archive)
    arrays["head/bias"] = np.full(10, np.nan, np.float32)
    np.savez(tmp_path / "nan.npz", **arrays)
    flags = [f"--init_from={tmp_path}/nan.npz", f"--out={tmp_path}/out"]
    assert evaluate.main([f"--config={digits}", *flags]) == 1
    assert "is not finite: check the weights" in last_error(capsys)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_can_not_be_written_is_named_at_once(weights, digits, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied/val").write_text("")
    flags = [f"--config={digits}", f"--init_from={weights}"]
    for out, named in (("file",) * 2, ("file/below",) * 2, ("occupied", "occupied/val")):
        assert evaluate.main([*flags, f"--out={tmp_path}/{out}"]) == 2
        assert f"{named} can't be written" in last_error(capsys)
    assert evaluate.main([*flags, f"--out={tmp_path}/x", "--config.evals.val.type=knn"]) == 2
    assert "describes classifications, but config.evals has none" in last_error(capsys)


def test_long_sequences_have_no_attention_maps(weights, monkeypatch):
    model, _ = vit_jax.from_pretrained(weights)
    assert contact_sheets.attention_bytes(model) == 4 * 1 * 2 * 5**2
    monkeypatch.setattr(contact_sheets, "MOST_ATTENTION", 199)
    batch = dict(image=np.zeros((2, 8, 8, 3), np.uint8))
    image, maps = contact_sheets.make_step(model)({}, batch)
    assert maps is None and image.shape == (2, 8, 8, 3)
