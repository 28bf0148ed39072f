"""The studies of arXiv 2010.11929 as configs, and what they cost against the paper's Table 6."""

import pytest
from conftest import ROOT

from vit_jax.study import cost, definition

STUDIES = {"compute": 18, "data_size": 24, "optimizers": 4, "position_embeddings": 8}
STUDIES |= {"heads": 3, "shapes": 19}
# Table 6: exaFLOPs of pretraining by model and epochs.
TABLE6 = {
    "B/32, 7 epochs": 55,
    "B/16, 7 epochs": 224,
    "L/32, 7 epochs": 196,
    "L/16, 7 epochs": 783,
    "L/16, 14 epochs": 1567,
    "H/14, 14 epochs": 4262,
    "R50x1, 7 epochs": 50,
    "R50x2, 7 epochs": 199,
    "R101x1, 7 epochs": 96,
    "R152x1, 7 epochs": 141,
    "R152x2, 7 epochs": 563,
    "R152x2, 14 epochs": 1126,
    "R200x3, 14 epochs": 3306,
    "R50+B/32, 7 epochs": 106,
    "R50+B/16, 7 epochs": 274,
    "R50+L/32, 7 epochs": 246,
    "R50+L/16, 7 epochs": 859,
    "R50+L/16, 14 epochs": 1668,
}


def read(name: str) -> definition.Study:
    return definition.read(f"{ROOT}/configs/studies/{name}.py")


@pytest.mark.parametrize(("name", "count"), STUDIES.items())
def test_every_run_has_a_config(name, count, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = read(name)
    configs = [run.config() for run in found.runs]
    assert len(configs) == count
    texts = {str(config) for config in configs}
    assert len(texts) == count  # none is there twice
    assert found.figure.metric == "eval/few/fewshot_5"


@pytest.mark.slow
def test_table_6(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {run.point["model"]: cost.of_run(run) for run in read("compute").runs}
    assert found.keys() == TABLE6.keys()
    for model, published in TABLE6.items():
        assert found[model].exaflops == pytest.approx(published, rel=0.05), model
        assert found[model].epochs == pytest.approx(int(model.split()[1]), rel=1e-3)
