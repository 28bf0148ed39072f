"""Evaluations on frozen features, inside of training and afterwards, and what they are made of."""

import json
import os
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import pytest
from conftest import ROOT, last_error, metric_lines

from vit_jax import config as configs
from vit_jax.data.sources import open as sources
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate import features, fewshot, suite
from vit_jax.train import __main__ as train
from vit_jax.train import experiment
from vit_jax.weights import load as pretrained

EVALS = """
DATA = dict(split="val", train_split="train[:300]")
EVALS = dict(
    few=dict(type="fewshot", shots=(2, 5), seeds=2, every=6, data=DATA),
    near=dict(type="knn", neighbours=7, data=DATA),
    line=dict(type="linear_probe", data=DATA),
    val=dict(data=dict(split="val")),
)
"""
TRAINING = (
    EVALS
    + """
import importlib.util

def get_config(arg=""):
    spec = importlib.util.spec_from_file_location("tiny", {tiny!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.evals = EVALS
    return config
"""
)
AFTERWARDS = (
    EVALS
    + """
def get_config():
    return dict(image_size=0, data=dict(name="digits", batch_size=56), evals=EVALS)
"""
)


@pytest.fixture
def training(tiny, tmp_path) -> str:
    (tmp_path / "training.py").write_text(TRAINING.format(tiny=tiny))
    return str(tmp_path / "training.py")


@pytest.mark.slow
def test_all_kinds_run_in_training_and_give_the_same_afterwards_and_on_one_device(
    training, tmp_path
):
    assert train.main([f"--config={training}", f"--workdir={tmp_path}/run"]) == 0
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines if "eval/few/fewshot_2" in line] == [6, 12]
    last = {key: value for key, value in lines[-1].items() if key.startswith("eval/")}
    wanted = ["few/fewshot_2", "few/fewshot_5", "near/knn", "line/linear_probe", "line/l2"]
    wanted += ["val/top1", "val/loss", "val/count"]
    assert sorted(last) == sorted(f"eval/{key}" for key in wanted)
    (tmp_path / "later.py").write_text(AFTERWARDS)
    arguments = [
        f"--config={tmp_path}/later.py",
        f"--config.init_from={tmp_path}/run",
        f"--json={tmp_path}/found.json",
    ]
    assert evaluate.main(arguments) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == last.keys()
    for key, value in found.items():
        assert value == pytest.approx(last[key], rel=1e-5), key
    one_device = dict(XLA_FLAGS="--xla_backend_optimization_level=0", PYTHONPATH=str(ROOT))
    arguments = [*arguments[:2], f"--json={tmp_path}/alone.json", "--config.data.batch_size=17"]
    command = [sys.executable, "-m", "vit_jax.evaluate", *arguments]
    done = subprocess.run(
        command, env=os.environ | one_device, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    alone = json.loads((tmp_path / "alone.json").read_text())
    for key in (
        "few/fewshot_2",
        "few/fewshot_5",
        "near/knn",
        "line/linear_probe",
        "line/l2",
        "val/top1",
    ):
        assert alone[f"eval/{key}"] == found[f"eval/{key}"], key


def test_features_are_what_the_head_reads_in_the_order_of_the_data(training, tmp_path):
    config = configs.load(training)
    model = experiment.make_model(config, 10)
    mesh = meshes.make_mesh(config.mesh)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((8, 8, 8, 3)))["params"]
    opened = suite.open_all(config, mesh, (), 10)
    assert (
        opened["few"].test is opened["near"].test and opened["few"].test is not opened["val"].test
    )
    with jax.set_mesh(mesh):
        steps = suite.make_steps(config, model)
        found = features.collect(steps.features, params, opened["few"].test.batches(model))
    source = sources.open_source("digits", "val")
    np.testing.assert_array_equal(found.label, source.labels())
    assert found.x.shape == (360, 32)
    batch = next(iter(opened["few"].test.batches(model)))
    wanted = pretrained.features(model, params, model.normalize(np.asarray(batch["image"][:5])))
    np.testing.assert_allclose(found.x[:5], wanted, atol=1e-5)


def test_few_shot_averages_over_choices_of_the_examples():
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(4, 6))
    label = np.arange(80, dtype=np.int32) % 4
    train_set = features.Features(centre[label] + rng.normal(size=(80, 6)), label)
    test_set = features.Features(centre[label] + rng.normal(size=(80, 6)), label)
    settings = ml_collections.ConfigDict(dict(shots=(1, 3), seeds=2, l2=1.0))
    found = fewshot.evaluate(train_set, test_set, 4, settings)
    for shots in (1, 3):
        accuracies = []
        for seed in (0, 1):
            chosen = fewshot.few_shot_indices(label, shots, 4, seed)
            scores = fewshot.least_squares(train_set.x[chosen], label[chosen], test_set.x, 4, 1.0)
            accuracies.append((scores.argmax(1) == label).mean())
        assert found[f"fewshot_{shots}"] == pytest.approx(np.mean(accuracies))
    assert found["fewshot_3"] > found["fewshot_1"] > 0.25


def test_the_rest_of_a_subset_is_what_training_does_not_see(tiny):
    given = ["--config.data.subset=80%", "--config.evals.val.data.rest=True"]
    config = configs.load(tiny, given)
    part, rest = sources.open_training(config.data), sources.open_rest(config.data)
    assert len(part) + len(rest) == 1_077 and len(rest) == 215
    names = [{source.describe(i) for i in range(len(source))} for source in (part, rest)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 1_077
    share = np.bincount(rest.labels()) / np.bincount(part.labels())
    np.testing.assert_allclose(share, 0.25, atol=0.02)
    opened = suite.open_all(config, meshes.make_mesh(config.mesh), (), 10)
    model = experiment.make_model(config, 10)
    assert sum(float(batch["mask"].sum()) for batch in opened["val"].test.batches(model)) == 215


def test_what_learns_beside_the_rest_learns_from_what_training_sees(tiny):
    flags = ["data.subset=80%", "data.class_balance=0.5"]
    flags += ["evals.val.data.rest=True", "evals.val.type=knn"]
    config = configs.load(tiny, [f"--config.{flag}" for flag in flags])
    found = suite.open_all(config, meshes.make_mesh(config.mesh), (), 10)["val"]
    parts = (found.train.source, found.test.source)
    names = [{source.describe(i) for i in range(len(source))} for source in parts]
    assert (len(names[0]), len(names[1])) == (862, 215) and not names[0] & names[1]


MISTAKES = {
    "evals.val.data.name=cifar10 has no effect": [
        "--config.data.subset=80%",
        "--config.evals.val.data.rest=True",
        "--config.evals.val.data.name=cifar10",
    ],
    "data.rest=True, but data.subset=''": ["--config.evals.val.data.rest=True"],
    "evals.val.shots": ["--config.evals.val.shots=(5,)"],
    "evals.val.neighbours": ["--config.evals.val.neighbours=5"],
    "has 0, not a number (int) from 1": [
        "--config.evals.val.type=fewshot",
        "--config.evals.val.shots=(0,)",
    ],
    "not one of classification, fewshot": ["--config.evals.val.type=few"],
    "neighbours=5000 has only 1077": [
        "--config.evals.val.type=knn",
        "--config.evals.val.neighbours=5000",
    ],
}


def test_features_that_are_not_finite_have_no_accuracy():
    batch = dict(x=np.array([[1.0], [np.nan]]), label=np.zeros(2, np.int32), mask=np.ones(2))
    with pytest.raises(NegativeResult, match="features of 1 of 2 images are not finite"):
        features.collect(
            lambda params, batch: (batch["x"], batch["label"], batch["mask"]), None, [batch]
        )


def test_a_split_of_which_no_image_can_be_read_has_no_accuracy():
    batch = (np.zeros((2, 1)), np.zeros(2), np.zeros(2))
    with pytest.raises(NegativeResult, match="none of the images"):
        features.collect(lambda params, batch: batch, None, [batch])


def test_checkpoints_are_ranked_by_what_an_evaluation_measures(tiny):
    kind = ["--config.evals.val.type=fewshot", "--config.evals.val.shots=(2, 5)"]
    configs.load(tiny, [*kind, "--config.checkpoint.keep_best=eval/val/fewshot_5"])
    with pytest.raises(UserError, match="possible are eval/val/fewshot_2, eval/val/fewshot_5"):
        configs.load(tiny, [*kind, "--config.checkpoint.keep_best=eval/val/top1"])


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_are_one_line(tiny, tmp_path, capsys, says):
    assert train.main([f"--config={tiny}", f"--workdir={tmp_path}/run", *MISTAKES[says]]) == 2
    assert says in last_error(capsys)
    assert not (tmp_path / "run/metrics.jsonl").exists()  # before anything is trained
