"""DINO on digits: it learns without collapsing, and features of the teacher are worth more."""

import numpy as np
import pytest
from conftest import ROOT, metric_lines
from test_train import run

DEMO = str(ROOT / "configs/demo_dino.py")


@pytest.mark.slow
def test_it_learns_without_collapsing(tmp_path):
    workdir = tmp_path / "run"
    assert run(DEMO, workdir, "--config.total_steps=200", "--config.log_every=10") == 0
    lines = metric_lines(workdir)
    losses = [line["train/dino"] for line in lines]
    assert np.mean(losses[-3:]) < losses[3] - 0.2
    last = lines[-1]
    assert last["train/teacher_mean_entropy"] - last["train/teacher_entropy"] > 0.1
    assert last["train/teacher_std"] > 0.8
    fresh = tmp_path / "fresh"
    no_warmup = "--config.optim.warmup_steps=0"
    assert run(DEMO, fresh, "--config.total_steps=1", "--config.optim.lr=1e-12", no_warmup) == 0
    assert last["eval/knn/knn"] > metric_lines(fresh)[-1]["eval/knn/knn"] + 0.05
