"""What wandb and MLflow are asked, what is read back from wandb's files, and that both hold a run
that was killed and continued as one run without doubled steps.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import types
import zlib

import numpy as np
import pytest
from conftest import ROOT, metric_lines
from etils import epath

from vit_jax import config as configs
from vit_jax.train.trackers import mlflow, wandb, wandb_files

PICTURE = np.zeros((2, 4, 6, 3), np.uint8)


# --- the files of wandb ---


def log_file(contents: list[bytes]) -> bytes:
    """In LevelDB's log format, by its description."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for content in contents:
        begins = True
        while begins or content:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += bytes(left)
                continue
            part, content = content[: left - 7], content[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
            typed = bytes([kind[begins, not content]]) + part
            out += struct.pack("<IH", zlib.crc32(typed), len(part)) + typed
            begins = False
    return bytes(out)


def test_records_of_any_size_are_read_up_to_where_the_file_ends(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [1, 32_754, 3, 5, 32_000, 750, 1, 100_000, *rng.integers(1, 9000, 30)]
    contents = [rng.bytes(size) for size in sizes]
    data = log_file(contents)
    path = tmp_path / "run-a.wandb"
    path.write_bytes(data)
    assert list(wandb_files.records(path)) == contents
    for end in [0, 7, 9, 14, *rng.integers(7, len(data), 20)]:
        path.write_bytes(data[:end])
        found = list(wandb_files.records(path))
        assert found == contents[: len(found)]
        assert len(log_file(contents[: len(found) + 1])) > end
    for damaged in (data[:50_000] + bytes(40_000), b"{" + data):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            list(wandb_files.records(path))


def test_only_files_of_this_run_and_earlier_starts_count(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_files, "steps", lambda path: map(int, path.read_text().split()))
    now = tmp_path / "offline-run-3-a"
    assert wandb_files.last_step(tmp_path, "a", but=now) is None
    for folder, text in {"run-1-a": "1 2", "offline-run-2-a": "3", "run-2-b": "9"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"run-{folder[-1]}.wandb").write_text(text)
    now.mkdir()
    (now / "run-a.wandb").write_text("7")
    (tmp_path / "latest-run").symlink_to(now)
    assert wandb_files.last_step(tmp_path, "a", but=now) == 3
    (tmp_path / "run-1-a/run-a.wandb").write_text("")
    (tmp_path / "offline-run-2-a/run-a.wandb").write_text("")
    assert wandb_files.last_step(tmp_path, "a", but=now) == -1
    (tmp_path / "run-1-a/run-a.wandb").write_text("another format")
    assert wandb_files.last_step(tmp_path, "a", but=now) is None


# --- what the libraries are asked ---


class FakeWandb:
    """Remembers how it was called; `step`: what the server has, plus 1."""

    def __init__(self, mode="online", has_key=True, step=0, **users):
        self.calls = []
        names = dict(project=None, run_name=None, run_id=None, mode=mode) | users
        self.users = types.SimpleNamespace(**names)
        self.login = lambda **given: has_key
        self.Settings = lambda **given: given
        self.Image = lambda picture: picture.shape
        self.run = types.SimpleNamespace(step=step, offline=False, config=self)
        self.run.log = lambda row, **given: self.calls.append((row, given))
        self.run.finish = lambda **given: self.calls.append(given)

    def setup(self, settings):
        return types.SimpleNamespace(settings=self.users)

    def init(self, **given):
        self.calls.append(given)
        return self.run

    def update(self, config, allow_val_change):
        assert config["total_steps"] == 12 and allow_val_change


def start_wandb(monkeypatch, tiny, workdir, run_id=None, **users):
    fake = FakeWandb(**users)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    tracker = wandb.Wandb(configs.load(tiny), epath.Path(workdir))
    return tracker, tracker.start(run_id), fake.calls


def test_wandb_gets_rows_with_pictures_and_defaults_where_the_user_says_nothing(tiny, monkeypatch):
    tracker, run_id, calls = start_wandb(monkeypatch, tiny, "/runs/first")
    tracker.pictures(3, "seen", PICTURE)
    tracker.write(3, {"a": 1.0})
    tracker.finish(75)
    settings = calls[0].pop("settings")
    assert calls == [
        dict(id=run_id, project="vit_jax", name="first", dir="/runs/first"),
        ({"pictures/seen": [(4, 6, 3)] * 2}, dict(step=3, commit=False)),
        ({"a": 1.0}, dict(step=3, commit=True)),
        dict(exit_code=75),
    ]
    assert settings["resume"] == "allow" and settings["silent"] and settings["console"] == "off"
    users = dict(project="p", run_name="n", step=8)
    tracker, again, calls = start_wandb(monkeypatch, tiny, "gs://b/first", run_id, **users)
    del calls[0]["settings"]
    assert again == run_id and tracker.last_step() == 7
    assert calls == [dict(id=run_id, project="p")]


def test_wandb_without_a_key_says_what_to_do(tiny, monkeypatch):
    with pytest.raises(RuntimeError, match="no API key: run `wandb login`, or set WANDB_MODE=off"):
        start_wandb(monkeypatch, tiny, "/runs/first", has_key=False)
    start_wandb(monkeypatch, tiny, "/runs/first", has_key=False, mode="offline")


class FakeMLflow:
    """A store with one run, {metric: {step: value}}, and its parameters."""

    def __init__(self):
        self.entities = types.SimpleNamespace(
            Metric=lambda key, value, time, step: (key, step, value), Param=lambda *pair: pair
        )
        self.store, self.params, self.status, self.named = {}, {}, "", ()
        self.MlflowClient = lambda: self
        self.create_experiment = lambda name: name
        self.get_experiment_by_name = lambda name: None

    def create_run(self, experiment, run_name):
        self.named = (experiment, run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def get_run(self, run_id):
        return types.SimpleNamespace(
            data=types.SimpleNamespace(metrics=self.store, params=self.params)
        )

    def get_metric_history(self, run_id, name):
        return [types.SimpleNamespace(step=step) for step in self.store[name]]

    def log_batch(self, run_id, metrics=(), params=()):
        for name, step, value in metrics:
            assert step not in self.store.setdefault(name, {}), "doubled"
            self.store[name][step] = value
        for key, value in params:
            assert self.params.setdefault(key, value) == value, "MLflow would refuse this"

    def update_run(self, run_id, status):
        self.status = status

    set_terminated = update_run


def test_mlflow_gets_the_rest_of_a_step_of_which_it_has_a_part(tiny, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for name in ("EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_NAME", "ALLOW_FILE_STORE"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")
        monkeypatch.delenv(f"MLFLOW_{name}")
    tracker = mlflow.MLflow(configs.load(tiny), epath.Path("/runs/first"))
    assert tracker.start(None) == "r" and fake.named == ("vit_jax", "first")
    tracker.write(5, {"a": 1.0, "eval/new, top1": 2.0})
    tracker.write(10, {"a": 3.0})  # killed before the other metrics
    config = configs.load(tiny, ["--config.log_every=7"])
    tracker = mlflow.MLflow(config, epath.Path("/runs/first"))
    assert tracker.start("r") == "r" and fake.status == "RUNNING" and tracker.last_step() == 9
    tracker.write(10, {"a": 3.0, "eval/new, top1": 4.0})
    assert fake.store == {"a": {5: 1.0, 10: 3.0}, "eval/new_ top1": {5: 2.0, 10: 4.0}}
    assert fake.params["log_every"] == "1" and len(fake.params) > 100
    for code, status in {0: "FINISHED", 75: "KILLED", 2: "FAILED"}.items():
        tracker.finish(code)
        assert fake.status == status


# --- the libraries themselves ---

DIES = """
import os, signal, sys, time
from vit_jax.train import __main__ as train, metrics

write = metrics.MetricWriter.write

def write_or_die(self, step, scalars):
    write(self, step, scalars)
    if step == 7:
        while any(tracker.calls.qsize() or tracker.last < 7 for tracker in self.trackers):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

metrics.MetricWriter.write = write_or_die
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_wandb_and_mlflow_have_a_killed_run_as_one_run_without_doubled_steps(tiny, tmp_path):
    """MLflow has the steps after the checkpoint, which come again; wandb has lost all."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    environment = os.environ | dict(
        WANDB_MODE="offline", MLFLOW_TRACKING_URI=f"file:{tmp_path}/mlruns", PYTHONPATH=str(ROOT)
    )
    flags = [
        f"--config={tiny}",
        f"--workdir={tmp_path}/run",
        "--config.trackers=('wandb','mlflow')",
    ]
    for command, code in (["-c", DIES], -signal.SIGKILL), (["-m", "vit_jax.train"], 0):
        words = [sys.executable, *command, *flags]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "tracker" not in done.stderr and "wandb:" not in done.stderr, done.stderr
    lines = metric_lines(tmp_path / "run")
    ids = json.loads((tmp_path / "run/trackers.json").read_text())

    from wandb.proto import wandb_internal_pb2

    rows = []
    files = sorted((tmp_path / "run/wandb").glob(f"offline-run-*-{ids['wandb']}/*.wandb"))
    assert len(files) == 2
    for path in files:
        for content in wandb_files.records(path):
            history = wandb_internal_pb2.Record.FromString(content).history
            row = {"/".join(i.nested_key): json.loads(i.value_json) for i in history.item}
            rows += [row] if row else []
    assert [row["_step"] for row in rows] == [line["step"] for line in lines] == list(range(1, 13))
    assert [row["train/loss"] for row in rows] == [line["train/loss"] for line in lines]

    (run,) = (tmp_path / "mlruns").glob("*/*/metrics/train")
    assert run.parents[1].name == ids["mlflow"]
    for name in ("train/loss", "eval/val/top1"):
        stored = [text.split() for text in (run.parent / name).read_text().splitlines()]
        assert [(int(step), float(value)) for _, value, step in stored] == [
            (line["step"], line[name]) for line in lines if name in line
        ]
    assert (run.parents[1] / "params/optim.lr").read_text() == "0.001"
