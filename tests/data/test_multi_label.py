"""Images with several labels: as a CSV lists them, as TFDS holds them (ImageNet ReaL), in training
and evaluation.
"""

import jax.numpy as jnp
import ml_collections
import mocked_tfds
import numpy as np
import pytest
import tensorflow_datasets as tfds
from conftest import ROOT, last_error, metric_lines
from PIL import Image

from vit_jax import config as configs
from vit_jax.data import pipeline
from vit_jax.data.sources import open as sources
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluate import classification, suite
from vit_jax.models import losses
from vit_jax.train import __main__ as train
from vit_jax.train import experiment

LINES = [
    "a.png,cat;dog,train",
    "b.png,dog,train",
    "c.png,,train",
    "d.png, bird ;cat,train",
    "e.png,dog;bird,val",
]


@pytest.fixture
def listed(tmp_path) -> str:
    """A CSV of five images with two, one, no, two and two labels."""
    rng = np.random.default_rng(0)
    for name in "abcde":
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / f"{name}.png")
    (tmp_path / "list.csv").write_text("\n".join(["path,labels,split", *LINES]) + "\n")
    return f"csv:{tmp_path}/list.csv"


def batch_of(source, count: int):
    how = ml_collections.ConfigDict(dict(crop="resize", method=""))
    host = pipeline.eval_pipeline(how, source, np.arange(count), count, 8, "error")
    return next(iter(host.batches()))


def test_a_csv_lists_any_number_of_labels(listed):
    source = sources.open_source(listed, "train")
    assert (source.num_classes, tuple(source.class_names), source.set_size) == (
        3,
        ("bird", "cat", "dog"),
        2,
    )
    np.testing.assert_array_equal(batch_of(source, 4)["label"], [[1, 2], [2, -1], [-1, -1], [0, 1]])
    np.testing.assert_array_equal(
        batch_of(sources.open_source(listed, "val"), 1)["label"], [[2, 0]]
    )


def test_targets_are_all_labels():
    found = losses.targets(jnp.array([[1, 2], [2, -1], [-1, -1]]), 4)
    np.testing.assert_array_equal(found, [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(losses.targets(jnp.array([3, 0]), 4), np.eye(4)[[3, 0]])


def test_any_label_is_correct_and_none_does_not_count():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])
    step = classification.make_eval_step(lambda params, image: logits, "sigmoid_xent", 3)
    label = np.array([[2, 1], [2, -1], [-1, -1], [0, -1]])
    batch = dict(image=np.zeros((4, 2, 2, 3), np.uint8), label=label, mask=np.ones(4, np.float32))
    found = classification.evaluate(step, None, [batch])
    assert found["count"] == 3 and found["top1"] == pytest.approx(2 / 3)
    among = classification.evaluate(step, None, [batch | dict(among=np.array([False, True, True]))])
    assert among["top1"] == pytest.approx(2 / 3)  # the second is right now, and the last can't be
    among = classification.evaluate(
        step, None, [batch | dict(among=np.array([True, False, False]))]
    )
    assert among["top1"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_several_labels_train_and_are_evaluated(listed, tiny, tmp_path):
    arguments = [f"--config={tiny}", f"--config.data.name={listed}", "--config.data.batch_size=8"]
    arguments += ["--config.total_steps=30", "--config.loss=sigmoid_xent", "--config.optim.lr=0.01"]
    arguments += ["--config.evals.val.data.split=train", "--config.evals.val.every=0"]
    arguments += ["--config.checkpoint.every=0"]
    assert train.main([*arguments, f"--workdir={tmp_path}/run"]) == 0
    last = metric_lines(tmp_path / "run")[-1]
    assert last["eval/val/count"] == 3 and last["eval/val/top1"] >= 2 / 3
    assert last["train/loss"] < metric_lines(tmp_path / "run")[0]["train/loss"]


def test_several_labels_are_not_for_softmax_or_frozen_features(listed, tiny, tmp_path, capsys):
    arguments = [f"--config={tiny}", f"--config.data.name={listed}", f"--workdir={tmp_path}/run"]
    arguments += ["--config.data.batch_size=8", "--config.evals.val.data.split=train"]
    assert train.main(arguments) == 2
    assert "have several labels each, but loss=softmax_xent takes one" in last_error(capsys)
    assert (
        train.main([*arguments, "--config.loss=sigmoid_xent", "--config.evals.val.type=knn"]) == 2
    )
    assert "evals.val learns from features, for which an image must have one label" in last_error(
        capsys
    )


def test_labels_of_other_numbers_do_not_mix(listed, tmp_path):
    (tmp_path / "single.csv").write_text("path,label\na.png,cat\nb.png,dog\n")
    parts = ((listed, 1.0), (f"csv:{tmp_path}/single.csv", 1.0))
    data = dict(name="mixture", split="train", data_dir="", subset="", mixture=parts)
    with pytest.raises(
        UserError, match=r"one label in one part of data\.mixture and several in another"
    ):
        sources.open_training(ml_collections.ConfigDict(data))


def test_a_column_of_labels_needs_some(tmp_path, tiny, capsys):
    (tmp_path / "list.csv").write_text("path,labels\ntiny.py,\n")
    arguments = [
        f"--config={tiny}",
        f"--config.data.name=csv:{tmp_path}/list.csv",
        f"--workdir={tmp_path}/run",
    ]
    assert train.main(arguments) == 2
    assert "has no label in its column labels" in last_error(capsys)


def test_imagenet_real_has_sets_of_labels(tmp_path):
    features = tfds.builder("imagenet2012_real", data_dir="/nowhere").info.features
    sets, rng = [[3, 999], [], [7]], np.random.default_rng(0)
    records = []
    for labels in sets:
        example = mocked_tfds.value("", features, rng) | dict(real_label=labels)
        records.append(features.serialize_example(features.encode_example(example)))
    mocked_tfds.write(
        "imagenet2012_real:1.0.0", str(tmp_path), dict(validation=3), dict(validation=records)
    )
    source = sources.open_source("imagenet2012_real", "validation", str(tmp_path))
    assert source.num_classes == 1_000 and source.class_names[0] == "n01440764"
    label = batch_of(source, 3)["label"]
    assert [row[row >= 0].tolist() for row in label] == sets


def test_the_test_sets_of_imagenet_are_evaluated_as_published():
    for name, split, among in (
        ("imagenet2012_real", "validation", "all"),
        ("imagenet_a", "test", "present"),
    ):
        entry = configs.load(f"{ROOT}/configs/evaluate.py:{name}").evals.test
        assert (entry.data.split, entry.among) == (split, among)


def always_a(params, image):
    return jnp.tile(jnp.array([2.0, 1.0]), (len(image), 1))


def test_a_choice_between_the_classes_that_occur(tiny, tmp_path):
    """As for ImageNet-A and -R, whose 200 classes are a part of ImageNet's."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / f"data/train/{name}").mkdir(parents=True)
        (tmp_path / f"data/test/{name}").mkdir(parents=True)
        for part in ("train", "test"):
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(
                tmp_path / f"data/{part}/{name}/x.png"
            )
    (tmp_path / "data/test/a/x.png").unlink()
    (tmp_path / "data/test/a").rmdir()
    for among, wanted in (("all", 0.0), ("present", 1.0)):
        data = f"--config.data.name=folder:{tmp_path}/data"
        config = configs.load(
            tiny, [data, "--config.evals.val.data.split=test", f"--config.evals.val.among={among}"]
        )
        opened = suite.open_all(config, meshes.make_mesh(config.mesh), ("a", "b"), 2)

        step = classification.make_eval_step(always_a, "softmax_xent", 2)
        steps = suite.Steps(experiment.make_model(config, 2), step, None)
        found = suite.run(opened, steps, None, lambda name: True)
        assert found["eval/val/top1"] == wanted and found["eval/val/count"] == 1
