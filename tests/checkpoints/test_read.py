"""Saves that fail, and which checkpoints are kept."""

import gc
import json
import resource
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import ml_collections
import pytest
from conftest import metric_lines

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.checkpoints.manager import Checkpointer
from vit_jax.cli import spool
from vit_jax.distributed.waits import ongoing
from vit_jax.errors import UserError
from vit_jax.train import metrics

EVAL = "eval/val/top1"


@pytest.fixture(autouse=True)
def runs_in_this_process_end_as_usual(monkeypatch):
    """A failed save would let them end this process at once."""
    monkeypatch.setattr(ongoing, "was_abandoned", False)


def settings(**more):
    return ml_collections.ConfigDict(
        dict(keep_last=1, keep_every=0, keep_best="", max_failures=3) | more
    )


def state(step: int) -> dict:
    return dict(step=jnp.int32(step), w=jnp.full((4, 8), float(step)))


def restored(checkpointer) -> tuple[int, float]:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in state(0).items()
    }
    step, found = checkpointer.restore(lambda meta: shapes)
    return step, float(found["w"][0, 0])


def steps_in(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_the_best_by_a_metric_is_kept_also_by_another_one_after_a_restart(tmp_path):
    accuracies = [0.1, 0.9, 0.5, 0.4, 0.3, 0.2]
    losses = [0.5, 0.6, 0.1, 0.7, 0.8, 0.9]
    with Checkpointer(tmp_path, settings(keep_best=EVAL, keep_last=3)) as checkpointer:
        for step in range(1, 5):
            scores = {EVAL: accuracies[step - 1], "eval/val/loss": losses[step - 1]}
            checkpointer.save(step, state(step), {}, scores)
    assert steps_in(tmp_path) == [2, 3, 4]
    with Checkpointer(tmp_path, settings(keep_best="eval/val/loss")) as checkpointer:
        assert restored(checkpointer) == (4, 4.0)
        for step in (5, 6):
            checkpointer.save(
                step,
                state(step),
                {},
                {EVAL: accuracies[step - 1], "eval/val/loss": losses[step - 1]},
            )
    assert steps_in(tmp_path) == [3, 6]


def test_a_save_that_fails_is_logged_counted_and_followed_by_others(tmp_path, caplog):
    """The folder turns into a file, and is there again later."""
    home, away = tmp_path / "checkpoints", tmp_path / "away"
    with Checkpointer(home, settings()) as checkpointer:
        checkpointer.save(1, state(1), {}, {})
        assert checkpointer.wait() and checkpointer.failures == 0
        home.rename(away)
        home.write_text("")
        for step in (2, 3):
            checkpointer.save(step, state(step), {}, {})
            checkpointer.wait()
        assert checkpointer.failures == checkpointer.saves.failures_in_row == 2
        assert caplog.text.count("training goes on") == 2
        home.unlink()
        away.rename(home)
        checkpointer.save(4, state(4), {}, {})
        assert checkpointer.wait()
        assert (checkpointer.failures, checkpointer.saves.failures_in_row) == (2, 0)
        assert restored(checkpointer) == (4, 4.0)


def test_what_orbax_has_still_under_way_prints_nothing_and_everything_else_does(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    checkpoint.silence_late_io()
    checkpoint.silence_late_io()

    async def late():
        pass

    ours = late()
    ours.close()
    theirs = types.SimpleNamespace(
        cr_code=types.SimpleNamespace(co_filename="/lib/orbax/checkpoint/serialization.py")
    )
    reports = [
        types.SimpleNamespace(object=thing, exc_value=OSError("broken"))
        for thing in (theirs, ours, None)
    ]
    closed = RuntimeError("Event loop is closed")
    reports.append(types.SimpleNamespace(object=None, exc_value=closed))
    for unraisable in reports:
        sys.unraisablehook(unraisable)
    assert shown == reports[1:3]


def test_so_many_failures_in_a_row_are_an_error_and_the_last_checkpoint_stays(tmp_path):
    home, away = tmp_path / "checkpoints", tmp_path / "away"
    with Checkpointer(home, settings(max_failures=2)) as checkpointer:
        checkpointer.save(1, state(1), {}, {})
        checkpointer.wait()
        home.rename(away)
        home.write_text("")
        with pytest.raises(
            UserError,
            match=r"checkpoint 3 in .* failure 2 in a row: earlier checkpoints are intact",
        ):
            for step in (2, 3):
                checkpointer.save(step, state(step), {}, {})
                checkpointer.wait()
    home.unlink()
    away.rename(home)
    with Checkpointer(home, settings()) as checkpointer:
        assert restored(checkpointer) == (1, 1.0)


def test_a_last_save_that_could_not_even_begin_is_not_taken_for_done(tmp_path):
    home, away = tmp_path / "checkpoints", tmp_path / "away"
    with Checkpointer(home, settings(max_failures=9)) as checkpointer:
        checkpointer.save(1, state(1), {}, {})
        assert checkpointer.wait()
        home.rename(away)
        home.write_text("")
        for step in (2, 3):
            checkpointer.save(step, state(step), {}, {})
            assert not checkpointer.wait()
        home.unlink()
        away.rename(home)
        assert not checkpointer.wait()  # so that the caller repeats it
        checkpointer.save(3, state(3), {}, {})
        assert checkpointer.wait()
    assert steps_in(home) == [3]


def test_more_than_the_memory_is_not_restored(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, settings()) as checkpointer:
        checkpointer.save(1, dict(params=state(1)), {}, {})
    monkeypatch.setattr("vit_jax.distributed.runtime.free_memory", lambda: 10)
    with pytest.raises(UserError, match=r"1/state declares 0\.0 GiB of arrays, more than"):
        checkpoint.read_params(tmp_path / "1")


def test_lines_of_metrics_wait_while_the_disk_is_full(tmp_path, tiny):
    """A limit on the size of files, in the middle of a line, stands in for a full disk."""
    files = spool.LocalFiles(checkpoint.absolute(tmp_path))
    with metrics.MetricWriter(files, 0, configs.load(tiny)) as writer:
        writer.write(1, {"a": 0.1})
        writer.tensorboard.flush()
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps(dict(step=1, a=0.1, filler="x" * 100_000)) + "\n"
        )
        size = (tmp_path / "metrics.jsonl").stat().st_size
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, unlimited[1]))
        try:
            writer.write(2, {"a": 0.2})
            writer.write(3, {"a": 0.3})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        writer.write(4, {"a": 0.4})
    assert [(line["step"], line["a"]) for line in metric_lines(tmp_path)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]


def test_a_write_that_is_given_up_prints_nothing():
    """Orbax leaves coroutines behind when a save fails; Python would report them at its end."""

    def async_serialize_from_host():
        async def write_fragment():
            pass

        return write_fragment()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.silence_late_io()
        async_serialize_from_host()
        gc.collect()
    assert not caught
