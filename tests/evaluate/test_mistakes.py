"""Numbers and pictures of where a model is wrong, beside scikit-learn and plain loops."""

import io
import math
import warnings

import jax
import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.evaluate import classification
from vit_jax.evaluate.mistakes import (
    calibration,
    charts,
    confusion,
    contact_sheets,
    folder,
    precision,
    records,
)
from vit_jax.evaluate.mistakes.contact_sheets import Look


def random_labels(num_classes: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return rng.integers(0, num_classes, count), rng.integers(0, num_classes, count)


LABELS = {
    "random": random_labels(6, 200),
    "one class": (np.zeros(5, int), np.zeros(5, int)),
    "one image, wrong": (np.array([2]), np.array([4])),
    "classes without images": (np.array([1, 1, 5]), np.array([5, 1, 1])),
    "nothing right": (np.arange(6), np.roll(np.arange(6), 1)),
}


@pytest.mark.parametrize("case", LABELS)
def test_confusion_is_that_of_scikit_learn(case):
    label, predicted = LABELS[case]
    wanted = metrics.confusion_matrix(label, predicted, labels=np.arange(6))
    np.testing.assert_array_equal(confusion.matrix(label, predicted, np.arange(6)), wanted)
    some = np.array([4, 1, 5])
    part = confusion.matrix(label, predicted, some)
    np.testing.assert_array_equal(part, wanted[np.ix_(some, some)])

    found = confusion.by_class(label, predicted, 6)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found["recall"], wanted.diagonal() / wanted.sum(1))
        np.testing.assert_array_equal(found["precision"], wanted.diagonal() / wanted.sum(0))
    np.testing.assert_array_equal(found["count"], wanted.sum(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, about classes without images
        f1 = metrics.f1_score(label, predicted, average=None, labels=np.arange(6))
        mean = metrics.f1_score(label, predicted, average="macro")
    np.testing.assert_allclose(np.nan_to_num(found["f1"]), f1)
    assert confusion.macro_f1(label, predicted) == pytest.approx(mean)

    pairs = confusion.pairs(label, predicted)
    off_diagonal = wanted - np.diag(wanted.diagonal())
    assert pairs[:, 2].sum() == off_diagonal.sum() and len(pairs) == (off_diagonal > 0).sum()
    assert all(off_diagonal[true, taken] == count for true, taken, count in pairs)
    assert (np.diff(pairs[:, 2]) <= 0).all()


def test_21000_classes_need_no_matrix():
    label, predicted = random_labels(21_000, 50_000)
    found = confusion.by_class(label, predicted, 21_000)
    assert found["correct"].sum() == (label == predicted).sum()
    assert confusion.pairs(label, predicted)[:, 2].sum() == (label != predicted).sum()


def error_by_loops(confidence, correct, num_bins: int) -> float:
    """Equation 3 of arXiv 1706.04599, bins (low, high]."""
    total = 0.0
    for i in range(num_bins):
        low, high = np.float32(i / num_bins), np.float32((i + 1) / num_bins)
        inside = [j for j, p in enumerate(confidence) if low < p <= high or (i == 0 and p == 0)]
        if inside:
            gap = np.mean(correct[inside]) - np.mean(confidence[inside], dtype=np.float64)
            total += len(inside) / len(confidence) * abs(gap)
    return total


CONFIDENCES = {
    "random": np.random.default_rng(0).random(300),
    "on the edges": np.arange(16) / 15,
    "exactly 1": np.ones(4),
    "one image": np.array([0.2]),
}


@pytest.mark.parametrize("case", CONFIDENCES)
def test_the_calibration_error_is_that_of_loops(case):
    confidence = CONFIDENCES[case].astype(np.float32)
    correct = np.random.default_rng(1).random(len(confidence)) < confidence
    found = calibration.bins(confidence, correct)
    assert found["count"].sum() == len(confidence) and len(found["low"]) == 15
    wanted = error_by_loops(confidence, correct, 15)
    assert calibration.expected_error(found) == pytest.approx(wanted, abs=1e-12)


def test_a_probability_on_an_edge_belongs_to_the_bin_below_it():
    found = calibration.bins(np.float32([0, 0.2, 0.20001, 1, 1.0000001]), np.ones(5, bool))
    assert found["count"][[0, 2, 3, 14]].tolist() == [1, 1, 1, 2]
    assert found["accuracy"][2] == 1 and np.isnan(found["accuracy"][1])


def test_calibration_without_images_or_with_nan_is_nan():
    assert math.isnan(calibration.expected_error(calibration.bins(np.zeros(0, np.float32), [])))
    found = calibration.bins(np.float32([0.3, np.nan]), np.ones(2, bool))
    assert math.isnan(calibration.expected_error(found))
    assert math.isnan(confusion.macro_f1(np.zeros(0, int), np.zeros(0, int)))


@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_average_precision_is_that_of_scikit_learn(levels):
    """With ties, a class of every image, one of a single image and one of none."""
    rng = np.random.default_rng(levels)
    scores = (rng.integers(0, levels, (60, 5)) / levels).astype(np.float32)
    label = np.stack([np.zeros(60, int), rng.integers(1, 3, 60), np.full(60, -1)], axis=1)
    label[7, 2] = 3
    found = precision.average_precisions(label, scores)
    positive = np.array([[i in row for i in range(5)] for row in label.tolist()])
    for i in range(4):
        wanted = metrics.average_precision_score(positive[:, i], scores[:, i])
        assert found[i] == pytest.approx(wanted)
    assert found[0] == 1 and np.isnan(found[4])


# --- records ---


def recorded(logits, label, mask=None, is_multi_label=False, **more) -> records.Records:
    """Records of given logits, in batches of 8 over 8 devices."""
    num_classes = logits.shape[1]
    loss = "sigmoid_xent" if is_multi_label else "softmax_xent"

    def apply_fn(params, image):
        return image[:, :, 0, 0]

    each = classification.make_example_step(apply_fn, loss, num_classes, lambda image: image)
    step = jax.jit(records.make_step(each, is_multi_label))
    mask = np.ones(len(logits)) if mask is None else mask
    mesh = meshes.make_mesh(dict(replica=1, data=-1, fsdp=1, tensor=1))
    rows = np.arange(-(-len(logits) // 8) * 8)
    take = np.minimum(rows, len(logits) - 1)
    padding = (rows < len(logits)) * mask[take]
    columns = dict(image=logits[take][:, :, None, None], label=label[take], mask=padding)
    with jax.set_mesh(mesh):
        placed = jax.device_put(columns, sharding.batch_sharding(mesh))
        batches = [
            {name: x[i : i + 8] for name, x in placed.items()} | more
            for i in range(0, len(rows), 8)
        ]
        return records.collect(step, None, batches, len(logits))


@pytest.mark.parametrize("num_classes", [1, 3, 12])
def test_records_are_those_of_the_logits(num_classes):
    """In order, without padding and skipped images, with ties as argmax decides them."""
    rng = np.random.default_rng(num_classes)
    logits = rng.integers(-3, 4, (21, num_classes)).astype(np.float32)
    label = rng.integers(0, num_classes, 21).astype(np.int32)
    mask = (np.arange(21) % 5 != 2).astype(np.float32)
    found = recorded(logits, label, mask)

    rows = np.flatnonzero(mask)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-logits, axis=1, kind="stable")[rows, :5]
    np.testing.assert_array_equal(found.id, rows)
    np.testing.assert_array_equal(found.label, label[rows])
    np.testing.assert_array_equal(found.top, order)
    np.testing.assert_allclose(found.probability, probability[rows[:, None], order], rtol=1e-5)
    np.testing.assert_allclose(found.loss, -np.log(probability[rows, label[rows]]), atol=1e-5)
    np.testing.assert_array_equal(found.correct, logits.argmax(1)[rows] == label[rows])
    assert found.scores is None
    wanted = dict(top1=found.correct.mean(), loss=found.loss.mean(), count=17)
    assert found.metrics() == pytest.approx(wanted)
    hits = [a in b for a, b in zip(label[rows].tolist(), order.tolist(), strict=True)]
    assert found.top_accuracy() == np.mean(hits)
    wrong = found.mistakes()
    assert (np.diff(found.loss[wrong]) <= 0).all() and not found.correct[wrong].any()
    assert (np.diff(found.probability[found.least_sure(), 0]) >= 0).all()


def test_records_of_several_labels():
    """Any label is correct, images without one are left out, and all probabilities are there."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, 4)).astype(np.float32)
    label = np.stack([rng.integers(0, 4, 9), np.full(9, -1)], axis=1).astype(np.int32)
    label[2] = -1
    label[3] = [1, 2]
    found = recorded(logits, label, is_multi_label=True)
    rows = np.delete(np.arange(9), 2)
    probability = 1 / (1 + np.exp(-logits[rows]))
    np.testing.assert_array_equal(found.id, rows)
    np.testing.assert_allclose(found.scores, probability, rtol=1e-5)
    np.testing.assert_allclose(found.probability, -np.sort(-probability, axis=1), rtol=1e-5)
    right = [logits[i].argmax() in label[i] for i in rows]
    np.testing.assert_array_equal(found.correct, right)
    assert found.top_accuracy() == 1


def test_classes_that_are_not_predicted_are_not_in_a_record():
    logits = np.float32([[3, 2, 1, 0], [0, 1, 2, 3]])
    among = np.array([False, True, False, True])
    found = recorded(logits, np.int32([1, 1]), among=among)
    np.testing.assert_array_equal(found.top, [[1, 3], [3, 1]])
    high = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(found.probability, [[high, 1 - high]] * 2, rtol=1e-5)
    assert found.correct.tolist() == [True, False]


def test_nothing_can_be_predicted_if_no_image_has_a_label():
    label = np.full((3, 2), -1, np.int32)
    among = np.zeros(4, bool)
    found = recorded(np.eye(3, 4, dtype=np.float32), label, is_multi_label=True, among=among)
    contents = folder.files(folder.About("val", "w", None, "abcd", str), found, {})
    assert len(found) == 0 and '"count": 0' in contents["summary.json"]


def test_probabilities_that_need_too_much_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(records, "MOST_SCORES", 4 * 3 * 2 - 1)
    label = np.int32([[0, 1], [1, -1]])
    found = recorded(np.eye(2, 3, dtype=np.float32), label, is_multi_label=True)
    assert found.scores is None and len(found) == 2
    about = folder.About("val", "w", None, "abc", str)
    contents = folder.files(about, found, looks_of(found))
    assert '"mean_average_precision": null' in contents["summary.json"]


# --- pictures ---


def looks_of(found: records.Records, attention=None) -> dict[int, Look]:
    return {int(i): Look(np.full((6, 9, 3), 7 * i, np.uint8), attention) for i in found.id}


def size(picture: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(picture)).size


HOSTILE = ("$x^2", "\u4e2d\u56fd", "a\nb\x1b[31m", "n" * 300, "\U0010fffd", "=1+1", "\udc80")


@pytest.mark.parametrize("count", [7, 40])
def test_charts_take_any_names_and_numbers_of_classes(count):
    names = (*HOSTILE, *(f"{'long' * 10} {i} name" for i in range(count - 7)))
    label = np.arange(count).repeat(2)
    picture = charts.confusion_chart(label, np.roll(label, 1), names)
    width, height = size(picture)
    assert width > 300 and height > 300
    no_mistakes = charts.confusion_chart(label, label, names)
    assert (no_mistakes is None) == (count > charts.MOST_CLASSES)
    assert charts.confusion_chart(label[:0], label[:0], names) is None


def test_names_that_would_look_the_same_have_their_number():
    names = ["a", f"{'b' * 30}1{'c' * 30}", f"{'b' * 30}2{'c' * 30}"]
    found = charts.short_names(names, np.arange(3))
    assert found[0] == "a" and found[1].startswith("1 bbb") and found[2].startswith("2 bbb")


def test_the_classes_beside_the_list_are_those_of_the_most_frequent_mistakes():
    pairs = np.array([[9, 4, 7], [4, 9, 5], [2, 4, 3], [1, 0, 1]])
    assert charts.classes_of(pairs, 3).tolist() == [2, 4, 9]
    assert charts.classes_of(pairs, 16).tolist() == [0, 1, 2, 4, 9]


def test_contact_sheets_have_the_worst_images_beside_where_the_model_looks():
    logits = np.float32(np.eye(7)[[0, 1, 2, 3, 4, 5, 6]] * 3)
    found = recorded(logits, np.int32([1, 1, 2, 3, 4, 5, 5]))
    drawn = []

    def describe(i: int) -> str:
        drawn.append(i)
        return f"/{'folder/' * 30}{i}.jpg"

    looks = looks_of(found, np.eye(2, 3))
    sheet = contact_sheets.draw(found, found.mistakes(), looks, HOSTILE, describe)
    assert drawn == [0, 6]
    both = 2 * contact_sheets.SIDE + contact_sheets.INNER_GAP
    assert size(sheet)[0] == 2 * (both + contact_sheets.GAP)
    assert size(sheet)[1] > 107  # 160 * 6 / 9 of the image, and lines of text
    alone = contact_sheets.draw(found, found.mistakes(), looks_of(found), HOSTILE, describe)
    assert size(alone)[0] == 2 * (contact_sheets.SIDE + contact_sheets.GAP)
    assert contact_sheets.draw(found, [], looks, HOSTILE, describe) is None


def test_without_images_there_are_only_numbers(tmp_path):
    found = recorded(np.zeros((2, 3), np.float32), np.int32([0, 1]), np.zeros(2))
    contents = folder.files(folder.About("val", "w", 3, "abc", str), found, {})
    assert {name for name, content in contents.items() if content is None} == {
        "confusion.png",
        "calibration.png",
        "mistakes.jpg",
        "least_sure.jpg",
    }
    assert '"count": 0' in contents["summary.json"] and "NaN" not in contents["summary.json"]
    (tmp_path / "mistakes.jpg").write_text("of an earlier evaluation")
    folder.write(tmp_path, contents)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "classes.csv",
        "images.jsonl",
        "summary.json",
    ]


def test_a_summary_describes_the_files_beside_it(tmp_path):
    """If writing ends in the middle, there is none, rather than one of an earlier evaluation."""
    folder.write(tmp_path, {"images.jsonl": "old", "summary.json": "old"})
    (tmp_path / "images.jsonl.tmp").mkdir()  # so that the file can't be replaced
    with pytest.raises(OSError, match="directory"):
        folder.write(tmp_path, {"images.jsonl": "new", "summary.json": "new"})
    assert not (tmp_path / "summary.json").exists()
