"""Updates that are not finite: left out, counted, told; after enough of them in a row the run ends
with their ids.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import metric_lines
from test_step import with_loss
from test_train import final_params, last_error, run

from vit_jax.errors import NegativeResult
from vit_jax.models import losses
from vit_jax.train import loop, nonfinite, step


def poisoned(monkeypatch, steps: set[int]) -> None:
    """Makes the loss of some updates, counted from 1, infinite, as a broken kernel would."""
    make = step.make_train_step

    def make_train_step(*arguments, **more):
        inner = make(*arguments, **more)

        def train_step(state, batch):
            bad = jnp.isin(state.step + 1, jnp.array(sorted(steps)))
            mask = jnp.where(bad, jnp.nan, batch["mask"])
            return inner(state, batch | dict(mask=mask))

        return train_step

    monkeypatch.setattr(loop.step, "make_train_step", make_train_step)


@pytest.mark.slow
def test_a_few_are_left_out_counted_and_told(tiny, tmp_path, monkeypatch):
    poisoned(monkeypatch, {5, 6, 9})
    assert run(tiny, tmp_path / "run", "--config.max_skipped=3") == 0
    lines = metric_lines(tmp_path / "run")
    assert [line["train/skipped_steps"] for line in lines] == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [line["train/skipped_in_row"] for line in lines] == [0, 0, 0, 0, 1, 2, 0, 0, 1, 0, 0, 0]
    log = (tmp_path / "run/log.txt").read_text()
    assert "3 updates up to step 9 were skipped" in log and log.count("were skipped") == 3
    assert all(np.isfinite(value).all() for value in final_params(tmp_path / "run").values())


@pytest.mark.slow
def test_so_many_in_a_row_end_the_run_with_their_ids(tiny, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, {5, 7, 8, 9})
    assert run(tiny, tmp_path / "run", "--config.max_skipped=3", "--config.log_every=5") == 1
    line = last_error(capsys)
    assert "not finite in 3 updates in a row, from step 7 on" in line and "nonfinite.json" in line
    found = json.loads((tmp_path / "run/nonfinite.json").read_text())["example_ids"]
    shown = tmp_path / "shown.json"
    from vit_jax.data import __main__ as data

    assert data.main(["show", f"--config={tiny}", "--step=6", f"--json={shown}"]) == 0
    assert list(found) == ["7", "8", "9"] and found["7"] == json.loads(shown.read_text())["ids"]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["4", "8"]


@pytest.mark.slow
def test_a_run_that_ends_with_them_has_failed_but_saved(tiny, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, {12})
    assert run(tiny, tmp_path / "run", "--config.log_every=100") == 1
    assert "in 1 updates in a row, from step 12 on" in last_error(capsys)
    assert (tmp_path / "run/checkpoints/12").is_dir()


def test_after_the_limit_nothing_changes_any_more():
    """Until the host looks, sound batches do not hide where it began."""

    def loss(params, batch, key, step):
        return losses.softmax_xent(batch["image"] * params["w"], batch["label"]), {}

    tx = optax.sgd(0.1)
    train_step = step.make_train_step(
        with_loss(loss), tx, lambda s: 0.1,
        preprocess=lambda batch, key: batch, seed=0, max_skipped=2,
    )  # fmt: skip
    state = step.create_state({"w": jnp.ones(3)}, tx, 0.0)
    batch = dict(image=jnp.eye(3), label=jnp.eye(3)[::-1], mask=jnp.ones(3))
    bad = batch | dict(image=jnp.full((3, 3), jnp.inf))
    counts = []
    for one in (batch, bad, batch, bad, bad, batch, batch):
        state, metrics = jax.jit(train_step)(state, one)
        counts.append((int(metrics["train/skipped_steps"]), int(metrics["train/skipped_in_row"])))
        if len(counts) == 3:
            before = state.params["w"]
    assert counts == [(0, 0), (1, 1), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    np.testing.assert_array_equal(before, state.params["w"])


def test_the_report_names_where_it_began(tmp_path):
    watched = nonfinite.SkippedUpdates(
        2, tmp_path, lambda update: [10 * update + i for i in range(9)]
    )
    sound = {"train/skipped_steps": 0, "train/skipped_in_row": 0, "train/loss": 1.0}
    watched.check(4, sound, False)
    bad = sound | {"train/skipped_steps": 6, "train/skipped_in_row": 6, "train/loss": float("nan")}
    with pytest.raises(
        NegativeResult, match=r"2 updates in a row, from step 5 on .*step 5: 50, 51, .* 57, \.\.\.;"
    ):
        watched.check(10, bad, False)
    assert list(json.loads((tmp_path / "nonfinite.json").read_text())["example_ids"]) == ["5", "6"]


def test_a_state_that_is_not_finite_is_not_saved(tiny, tmp_path, monkeypatch, capsys):
    """Finite gradients may still lead to parameters that are not."""
    make = step.make_train_step

    def make_train_step(*arguments, **more):
        inner = make(*arguments, **more)

        def train_step(state, batch):
            state, metrics = inner(state, batch)
            huge = jnp.where(state.step >= 7, jnp.inf, 1.0)
            return step.TrainState(
                **(vars(state) | dict(params=jax.tree.map(lambda x: x * huge, state.params)))
            ), metrics

        return train_step

    monkeypatch.setattr(loop.step, "make_train_step", make_train_step)
    assert (
        run(tiny, tmp_path / "run", "--config.max_skipped=100", "--config.evals.val.every=0") == 1
    )
    assert "the state after step 8 is not finite" in last_error(capsys)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["4"]


@pytest.mark.slow
def test_the_learning_rate_that_is_told_is_the_one_that_was_used(tiny, tmp_path, monkeypatch):
    """An update that is left out is none of the optimizer's: the schedule waits for it."""
    assert run(tiny, tmp_path / "straight", "--config.evals.val.every=0") == 0
    poisoned(monkeypatch, {5})
    assert run(tiny, tmp_path / "run", "--config.evals.val.every=0") == 0
    straight, found = (
        [line["train/lr"] for line in metric_lines(tmp_path / name)] for name in ("straight", "run")
    )
    assert found == straight[:5] + straight[4:-1]
