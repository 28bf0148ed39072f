"""What trackers get: each step once after stops and loss spikes, under one id, from process 0; and
that what fails or hangs stops no run.
"""

import json
import logging
import sys
import threading
import time
import types

import numpy as np
import pytest
from conftest import last_error
from etils import epath

from vit_jax import config as configs
from vit_jax.cli import spool
from vit_jax.distributed.waits import ongoing
from vit_jax.errors import Preempted, UserError
from vit_jax.train import __main__ as train
from vit_jax.train import metrics
from vit_jax.train.trackers import make, run_ids, sender
from vit_jax.train.trackers.tracker import Tracker

PICTURE = np.zeros((2, 4, 6, 3), np.uint8)


class Kept(Tracker):
    """Keeps what it gets in `store`, which outlives a start."""

    def __init__(self, store: list, knows=True):
        self.store = store
        self.knows = knows

    def start(self, run_id):
        self.store.append(("start", run_id))
        return run_id or "first"

    def last_step(self):
        steps = [call[1] for call in self.store if call[0] == "write"]
        return max(steps, default=-1) if self.knows else None

    def write(self, step, scalars):
        self.store.append(("write", step, scalars))

    def pictures(self, step, name, pictures):
        self.store.append(("pictures", step, name, pictures.shape))

    def finish(self, exit_code):
        self.store.append(("finish", exit_code))


def steps(store: list) -> list[int]:
    return [call[1] for call in store if call[0] == "write"]


def ends(store: list) -> list[tuple]:
    return [call for call in store if call[0] in ("start", "finish")]


@pytest.fixture
def begin(tmp_path, tiny, monkeypatch):
    """begin(tracker, resumed step) -> the writer of a start, without TensorBoard."""
    from clu import metric_writers

    without = types.SimpleNamespace(close=lambda: None)
    for name in ("write_scalars", "write_texts", "write_hparams", "write_images", "flush"):
        setattr(without, name, lambda *arguments: None)
    monkeypatch.setattr(metric_writers, "create_default_writer", lambda *_, **__: without)
    monkeypatch.setattr(ongoing, "was_abandoned", False)
    made = {}
    monkeypatch.setattr(make, "make_own", lambda name, config, files: made[name]())

    def begin(step: int, **trackers) -> metrics.MetricWriter:
        made.clear()
        made.update({f"my:{name}": tracker for name, tracker in trackers.items()})
        config = configs.load(tiny, [f"--config.trackers={tuple(made)}"])
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        return metrics.MetricWriter(spool.LocalFiles(epath.Path(folder)), step, config)

    return begin


def write(writer: metrics.MetricWriter, *numbers: int) -> None:
    for number in numbers:
        writer.write(number, {"train/loss": number / 7})


def kill(writer: metrics.MetricWriter, store: list, after: int) -> None:
    """Ends a start without `finish`, once the tracker has that many steps."""
    while len(steps(store)) < after:
        time.sleep(0.001)
    for one in writer.trackers:
        one.is_off = True
        one.calls.put(("finish", (0,)))  # wakes the thread
        one.thread.join()


def test_a_run_that_is_killed_and_continued_has_one_id_and_each_step_once(begin, tmp_path):
    store = []
    writer = begin(0, kept=lambda: Kept(store))
    write(writer, *range(1, 8))
    kill(writer, store, 7)
    del store[6:]  # a service of its own lost the last ones
    with begin(4, kept=lambda: Kept(store)) as writer:
        write(writer, *range(5, 13))
    with begin(12, kept=lambda: Kept(store)):
        pass
    assert steps(store) == list(range(1, 13))
    assert [call[2] for call in store if call[0] == "write"] == [
        {"train/loss": number / 7} for number in range(1, 13)
    ]
    assert ends(store) == [
        *[("start", None), ("start", "first"), ("finish", 0)],
        *[("start", "first"), ("finish", 0)],
    ]
    ids = json.loads((tmp_path / "run/trackers.json").read_text())
    assert ids == {"my:kept": "first"}


def test_what_a_tracker_lacks_of_earlier_starts_is_sent(begin):
    """It lagged behind the checkpoint, or was chosen later."""
    store = []
    with begin(0) as writer:
        write(writer, *range(1, 8))
    with begin(5, kept=lambda: Kept(store)) as writer:
        write(writer, 6, 7)
    store[:] = store[:3]
    with begin(7, kept=lambda: Kept(store, knows=True)) as writer:
        write(writer, 8)
    assert steps(store) == list(range(1, 9))


def test_a_tracker_that_can_not_say_what_it_has_gets_no_step_twice(begin):
    store = []
    writer = begin(0, kept=lambda: Kept(store, knows=False))
    write(writer, *range(1, 8))
    kill(writer, store, 7)
    with begin(4, kept=lambda: Kept(store, knows=False)) as writer:
        write(writer, *range(5, 10))
    assert steps(store) == list(range(1, 10))


def test_steps_after_a_loss_spike_are_not_sent_twice(begin):
    store = []
    with begin(0, kept=lambda: Kept(store)) as writer:
        write(writer, *range(1, 6))
        writer.rewind(2)
        write(writer, *range(3, 8))
    assert steps(store) == list(range(1, 8))


def test_the_id_is_in_the_workdir_before_the_first_step_is_sent(begin, tmp_path):
    found = []

    class Looks(Tracker):
        def write(self, step, scalars):
            found.append(json.loads((tmp_path / "run/trackers.json").read_text()))

    with begin(0, looks=Looks) as writer:
        write(writer, 1, 2)
    (ids,) = {tuple(ids.items()) for ids in found}
    assert len(found) == 2 and ids[0][0] == "my:looks" and len(ids[0][1]) == 12


@pytest.mark.parametrize("text", ["", "{", "[]", '{"my:kept": 3}', "[" * 100_000, "null"])
def test_damaged_ids_are_set_aside(text, tmp_path, caplog):
    files = spool.LocalFiles(epath.Path(tmp_path))
    (tmp_path / "trackers.json").write_text(text)
    with caplog.at_level(logging.WARNING, "vit_jax"):
        ids = run_ids.RunIds(files)
    assert ids.get("wandb") is None and "trackers begin new runs" in caplog.text
    assert (tmp_path / "damaged_trackers.json").read_text() == text
    ids.set("wandb", "abc")
    assert run_ids.RunIds(files).get("wandb") == "abc"


def test_only_finite_numbers_are_sent_and_pictures_come_with_their_step(begin):
    store = []
    with begin(0, kept=lambda: Kept(store)) as writer:
        writer.write_pictures(1, "seen", PICTURE)
        writer.write(1, {"a": float("nan"), "b": 1.5, "c": float("inf")})
    assert store[1:3] == [("pictures", 1, "seen", PICTURE.shape), ("write", 1, {"b": 1.5})]


def test_the_other_processes_have_no_trackers(begin, monkeypatch):
    monkeypatch.setattr(metrics.jax, "process_index", lambda: 1)
    with begin(0, kept=lambda: 1 / 0) as writer:
        write(writer, 1)
        writer.write_pictures(1, "seen", PICTURE)
    assert writer.trackers == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(Preempted(), 75), (UserError("x: y"), 2), (KeyboardInterrupt(), 1), (OSError(), 1)],
)
def test_a_tracker_learns_how_a_start_ended(error, code, begin):
    store = []
    with pytest.raises(type(error)), begin(0, kept=lambda: Kept(store)):
        raise error
    assert ends(store) == [("start", None), ("finish", code)]


@pytest.mark.parametrize("method", ["start", "last_step", "write", "pictures", "finish"])
@pytest.mark.parametrize("error", [ValueError("no route\nto host"), SystemExit(3)])
def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(method, error, begin, caplog):
    class Failing(Kept):
        pass

    def fail(self, *arguments):
        raise error

    setattr(Failing, method, fail)
    store = []
    with caplog.at_level(logging.WARNING, "vit_jax"):
        trackers = dict(bad=lambda: Failing([]), kept=lambda: Kept(store))
        with begin(0, **trackers) as writer:
            for number in (1, 2, 3):
                writer.write_pictures(number, "seen", PICTURE)
                write(writer, number)
    assert steps(store) == [1, 2, 3] and ends(store)[-1] == ("finish", 0)
    assert [line["step"] for line in metrics.read_lines(writer.path)] == [1, 2, 3]
    (record,) = caplog.records
    assert record.getMessage().startswith("tracker my:bad is off until the next start: test_trac")
    assert type(error).__name__ in record.getMessage()


def test_the_end_waits_for_the_warning_of_a_tracker_that_fails(begin, monkeypatch):
    found = []

    def warn(message, *arguments):
        time.sleep(0.1)
        found.append(message % arguments)

    def fail(self, before):
        raise ValueError("no route")

    monkeypatch.setattr(sender.log, "warning", warn)
    with begin(0, bad=lambda: type("Failing", (Kept,), dict(start=fail))([])) as writer:
        while not writer.trackers[0].is_off:
            time.sleep(0.001)
    assert len(found) == 1 and "no route" in found[0]
    assert not ongoing.was_abandoned


def test_an_id_that_is_not_text_is_not_kept(begin, caplog, tmp_path):
    class WithoutId(Kept):
        def start(self, run_id):
            pass

    trackers = dict(bad=lambda: WithoutId([]), kept=lambda: Kept([]))
    with caplog.at_level(logging.WARNING, "vit_jax"), begin(0, **trackers) as writer:
        write(writer, 1)
    assert "start() must return the id of the run, a str, not None" in caplog.text
    assert json.loads((tmp_path / "run/trackers.json").read_text()) == {"my:kept": "first"}


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(begin, caplog, monkeypatch):
    monkeypatch.setattr(sender, "END_S", 0.05)
    monkeypatch.setattr(make, "END_S", 0.05)
    monkeypatch.setattr(sender, "LONGEST", 3)
    hangs, free = threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, step, scalars):
            hangs.set()
            free.wait()

    store = []
    with caplog.at_level(logging.WARNING, "vit_jax"):
        with begin(0, hangs=lambda: Hanging([])) as writer:
            write(writer, 1)
            hangs.wait()
            write(writer, *range(2, 20))
        assert "it is 3 steps behind" in caplog.text and ongoing.was_abandoned
        free.set()
        ongoing.was_abandoned = False
        free.clear()
        with begin(19, other=lambda: Hanging(store)) as writer:
            write(writer, 20)
        assert "tracker my:other is off until the next start: it did not end" in caplog.text
    assert ongoing.was_abandoned and len(caplog.records) == 2
    free.set()


# --- which trackers there are ---


def test_a_tracker_whose_library_is_missing_is_an_error_at_the_start(tiny, tmp_path, monkeypatch):
    """Also if there is a folder of its name, which is where wandb writes."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    config = configs.load(tiny, ["--config.trackers=('wandb',)"])
    with pytest.raises(UserError, match=r"trackers has wandb, which is not installed: pip install"):
        make.check(config)
    monkeypatch.setattr(make.jax, "process_index", lambda: 1)
    make.check(config)


def test_names_of_trackers_are_checked(tiny, tmp_path, monkeypatch, capsys):
    flags = [f"--config={tiny}", f"--workdir={tmp_path}/run"]
    assert train.main([*flags, "--config.trackers=wandbb"]) == 2
    assert "trackers has 'wandbb', which is not one of wandb, mlflow, or MODULE:F" in last_error(
        capsys
    )
    with pytest.raises(UserError, match=r"trackers has \{\}, which is not one of wandb"):
        configs.load(tiny, ["--config.trackers=({},)"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_tracker.py").write_text("class Table:\n    pass\n")
    with pytest.raises(UserError, match=r"no_tracker:Table is not a subclass of .*\.Tracker"):
        make.check(configs.load(tiny, ["--config.trackers=no_tracker:Table"]))
    config = configs.load(tiny, ["--config.trackers=('wandb','wandb','no_tracker:Table')"])
    files = spool.LocalFiles(epath.Path(tmp_path))
    with pytest.raises(UserError, match=r"Table gives a Table, but it must give a subclass of"):
        make.make_own("no_tracker:Table", config, files)
    monkeypatch.setattr(make, "Sender", lambda name, *_: name)
    assert make.start(config, files, None) == ["wandb", "no_tracker:Table"]
