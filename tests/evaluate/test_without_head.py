"""Evaluations while a run trains without labels, and of weights that have no head."""

import json

import numpy as np
import pytest
from conftest import TINY, golden_file, last_error, metric_lines
from sklearn import datasets

import vit_jax
from vit_jax import config as configs
from vit_jax import predict
from vit_jax.config import own_parts
from vit_jax.data.sources import digits
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.evaluate import suite
from vit_jax.train import __main__ as train

DATA = 'data=dict(name="digits", split="val", train_split="train[:300]")'
EVALS = f"""dict(
        near=dict(type="knn", every=6, {DATA}),
        line=dict(type="linear_probe", {DATA}),
        few=dict(type="fewshot", shots=(5,), seeds=1, {DATA}),
    )"""
SMALL = "mae.decoder_width=16 mae.decoder_depth=1 mae.decoder_heads=2"


def loaded(**values):
    return configs.load_in_python(dict(objective="mae", total_steps=4) | values, {})


def test_training_without_labels_is_evaluated_by_its_features():
    knn = dict(near=dict(type="knn", data=dict(name="digits", split="val")))
    checkpoint = dict(every=2, keep_best="eval/near/knn")
    assert loaded(evals=knn, checkpoint=checkpoint, early_stopping=2).early_stopping == 2
    with pytest.raises(UserError, match=r"evals.val.type=classification needs a head, .* knn"):
        loaded(evals=dict(val={}))
    rest = dict(near=dict(type="knn", data=dict(rest=True)))
    with pytest.raises(UserError, match=r"evals.near.data.rest=True needs the labels .* slices"):
        loaded(evals=rest, data=dict(subset="90%"))
    with pytest.raises(UserError, match=r"possible are eval/near/knn$"):
        loaded(evals=knn, checkpoint=dict(every=2, keep_best="eval/near/top1"))


def test_labels_that_training_data_do_not_have_are_asked_for(tmp_path):
    (tmp_path / "a.png").write_bytes(digits.png(np.zeros((8, 8), np.uint8)))
    data = dict(name=f"folder:{tmp_path}")
    config = loaded(image_size=8, data=data, evals=dict(near=dict(type="knn")))
    with pytest.raises(UserError, match=r"^evals.near needs labels, .*: set evals.near.data.name"):
        suite.open_all(config, meshes.make_mesh(config.mesh), (), 0)


def of_logits(logits):
    return dict(mean=float(np.mean(logits)))


def of_batches(batches, num_classes):
    return dict(images=float(sum(batch["mask"].sum() for batch in batches)), classes=num_classes)


def test_an_evaluation_of_the_users_own_without_a_head():
    """What needs no logits has the classes of its data."""
    data = dict(name="digits", split="val", batch_size=40)
    config = loaded(image_size=8, evals=dict(own=dict(type=f"{__name__}:of_logits", data=data)))
    own_parts.check(config)
    mesh = meshes.make_mesh(config.mesh)
    with pytest.raises(UserError, match=r"evals.own.type=.*of_logits needs classes, but the model"):
        suite.open_all(config, mesh, (), 0)
    config = loaded(image_size=8, evals=dict(own=dict(type=f"{__name__}:of_batches", data=data)))
    opened = suite.open_all(config, mesh, (), 0)
    model = vit_jax.create_model("Ti/4", 0, 8, width=16, depth=1, mlp_dim=16, num_heads=2)
    steps = suite.make_steps(config, model)
    assert suite.run(opened, steps, {}, lambda name: True) == {
        "eval/own/images": 360.0,
        "eval/own/classes": 10.0,
    }


def test_weights_without_a_head_give_features(tmp_path, capsys):
    def without_head(flat):
        return {name: leaf for name, leaf in flat.items() if not name.startswith("head")}

    weights = golden_file(tmp_path, "vit_token_norep", change=without_head)
    image = tmp_path / "china.png"
    image.write_bytes(digits.png(datasets.load_sample_images().images[0][:40, :40]))
    given = [f"--init_from={weights}", str(image)]
    assert predict.main([*given, f"--out={tmp_path}/found.npz"]) == 0
    assert (
        "has no head and so no classes, as after training without labels" in capsys.readouterr().err
    )
    found = np.load(tmp_path / "found.npz")
    assert set(found) == {"features", "path", "names"} and len(found["names"]) == 0
    assert predict.main([*given, "--top_k=0", f"--out={tmp_path}/asked.npz"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "asked.npz")["features"], found["features"])
    assert predict.main([*given, "--top_k=3"]) == 2
    assert "has no head and so no classes: use --top_k=0" in last_error(capsys)
    flags = ["--config=configs/evaluate.py:digits,val", f"--init_from={weights}"]
    assert evaluate.main(flags) == 2
    assert "evals.test.type=classification needs classes, but the model has no head" in last_error(
        capsys
    )


@pytest.mark.slow
def test_a_run_without_labels_is_watched_and_measured_afterwards(tmp_path):
    """Classes are those of the evaluations' data; early stopping goes by the nearest neighbours."""
    text = TINY.replace('dict(val=dict(every=6, data=dict(split="val")))', EVALS)
    text = text.replace("dict(every=4)", 'dict(every=6, keep_best="eval/near/knn")')
    (tmp_path / "watched.py").write_text(text)
    flags = [f"--config.{setting}" for setting in f"objective=mae {SMALL} early_stopping=1".split()]
    arguments = [f"--config={tmp_path}/watched.py", f"--workdir={tmp_path}/run"]
    assert train.main([*arguments, *flags]) == 0
    lines = metric_lines(tmp_path / "run")
    best = max(
        (line for line in lines if "eval/near/knn" in line), key=lambda x: x["eval/near/knn"]
    )
    after = f"def get_config():\n    return dict(image_size=0, evals={EVALS})\n"
    (tmp_path / "after.py").write_text(after)
    given = [f"--config={tmp_path}/after.py", f"--init_from={tmp_path}/run"]
    assert evaluate.main([*given, f"--json={tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    names = ["few/fewshot_5", "line/l2", "line/linear_probe", "near/knn"]
    assert sorted(found) == [f"eval/{name}" for name in names]
    assert found["eval/near/knn"] == pytest.approx(best["eval/near/knn"], abs=1e-6)
    assert found["eval/line/linear_probe"] == lines[-1]["eval/line/linear_probe"]
    assert vit_jax.score(tmp_path / "after.py", {"init_from": str(tmp_path / "run")}) == found
