"""Real processes: kills, SIGTERM, and the same data on 1, 2 and 4 of them."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import TINY, metric_lines
from test_listings import make_folder, make_tar, wds, write_manifest
from test_sources import prepare_cifar10
from test_train import final_params, same_bits

from launch import local

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.slow

LONGER = ["--config.total_steps=150", "--config.checkpoint.every=6", "--config.evals.val.every=0"]


def environment() -> dict[str, str]:
    """One CPU device, whatever conftest set."""
    return os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(ROOT))


def start(config, workdir, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "vit_jax.train", f"--config={config}", f"--workdir={workdir}", *arguments]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)


def finish(job: subprocess.Popen) -> tuple[int, str]:
    _, err = job.communicate(timeout=300)
    return job.returncode, err


def wait_for_step(workdir: pathlib.Path, step: int, job: subprocess.Popen) -> None:
    """Returns when the run has logged `step`, or has ended."""
    path = workdir / "metrics.jsonl"
    while job.poll() is None:
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(config, workdir) of an undisturbed run of 150 steps."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "tiny.py").write_text(TINY)
    code, err = finish(start(folder / "tiny.py", folder / "run", *LONGER))
    assert code == 0, err
    return folder / "tiny.py", folder / "run"


def assert_same_run(one: pathlib.Path, two: pathlib.Path) -> None:
    lines = [metric_lines(path) for path in (one, two)]
    for key in ("step", "train/loss", "train/grad_norm", "train/lr"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]], key
    assert same_bits(final_params(one), final_params(two))


def test_five_kills_at_random_moments_leave_no_trace(straight, tmp_path):
    config, workdir = straight
    chance = random.Random(0)
    kills = 0
    for step in sorted(chance.sample(range(1, 145), 5)):
        job = start(config, tmp_path / "run", *LONGER)
        wait_for_step(tmp_path / "run", step, job)
        time.sleep(chance.uniform(0, 0.2))
        job.send_signal(signal.SIGKILL)
        code, err = finish(job)
        assert code in (0, -signal.SIGKILL), err
        kills += code == -signal.SIGKILL
    assert kills >= 4
    code, err = finish(start(config, tmp_path / "run", *LONGER))
    assert code == 0, err
    assert_same_run(workdir, tmp_path / "run")


def test_sigterm_saves_exits_75_and_the_same_command_continues(straight, tmp_path):
    config, workdir = straight
    job = start(config, tmp_path / "run", *LONGER)
    wait_for_step(tmp_path / "run", 20, job)
    job.send_signal(signal.SIGTERM)
    code, err = finish(job)
    assert code == 75, err
    stopped = metric_lines(tmp_path / "run")[-1]["step"]
    assert f"stopped by SIGTERM at step {stopped}: saved" in err
    assert (tmp_path / "run/checkpoints" / str(stopped)).is_dir()
    code, err = finish(start(config, tmp_path / "run", *LONGER))
    assert code == 0 and f"training from step {stopped}" in err
    assert_same_run(workdir, tmp_path / "run")


def test_a_full_disk_ends_in_one_line_and_keeps_earlier_checkpoints(straight, tmp_path):
    """A limit on the size of files stands in for a full disk: both are an OSError inside a write."""
    config, _ = straight
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
    limit += "sys.argv = ['train', *sys.argv[1:]]; runpy.run_module('vit_jax.train', run_name='__main__')"
    arguments = [f"--config={config}", f"--workdir={tmp_path}/run", *LONGER, "--config.total_steps=9"]
    small = ["--config.checkpoint.every=3"]
    first = finish(start(config, tmp_path / "run", *LONGER, "--config.total_steps=9", *small))
    assert first[0] == 0
    # Another run of the same workdir, whose state no longer fits.
    job = subprocess.Popen(
        [sys.executable, "-c", limit, *arguments[:1], f"--workdir={tmp_path}/other", *LONGER],
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    code, err = finish(job)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and "earlier checkpoints are intact" in last, err
    assert final_params(tmp_path / "run")


IDS = """
import json, sys
import jax, numpy as np
from vit_jax import config as configs, sharding, train
sharding.start_processes()
found = {}
for name, overrides in json.load(open(sys.argv[2])).items():
    config = configs.load(sys.argv[1], overrides + sys.argv[4:])
    mesh = sharding.make_mesh(config.mesh)
    source, facts = train.open_training_data(config)
    from vit_jax.data import pipeline, to_device
    size = config.data.batch_size
    rows = sharding.local_rows(mesh, size)
    sums = jax.jit(lambda x: x.astype("int32").sum((1, 2, 3)), out_shardings=sharding.replicated(mesh))
    found[name] = []
    for start, stop in ((0, 50), (17, 50), (10**6, 10**6 + 2)):
        host = pipeline.train_pipeline(config, source, rows, stop)
        for batch in host.batches(start):
            placed = to_device.global_batch(batch, mesh, rows, size)
            values = {name: batch[name].tolist() for name in ("id", "seed", "label")}
            found[name].append(dict(rows=rows.tolist(), **values, pixels=np.asarray(sums(placed["image"])).tolist()))
open(f"{sys.argv[3]}.{jax.process_index()}", "w").write(json.dumps(found))
"""


def make_sources(root: pathlib.Path) -> dict[str, list[str]]:
    """Small data sets of every kind, as overrides of a config."""
    for form in ("tfrecord", "array_record"):
        prepare_cifar10(root / form, form)
    make_folder(root / "folder", {"owl": 30, "jay": 25})
    for shard in range(3):
        make_tar(root / f"tars/birds-train-{shard:03}.tar", wds(range(20 * shard, 20 * shard + 20)))
    manifest = write_manifest(root / "csv", [(f"{i:02}.png", ("owl", "jay")[i % 2]) for i in range(50)])
    mixture = (f"folder:{root}/folder", 2.0), (f"csv:{manifest}", 1.0)
    names = dict(tars=f"tars:{root}/tars", csv=f"csv:{manifest}", folder=f"folder:{root}/folder", mixture="mixture")
    found = {kind: [f"--config.data.name={name}"] for kind, name in names.items()}
    found["mixture"] += [f"--config.data.mixture={mixture}", "--config.evals.val.data.name=digits"]
    for form in ("tfrecord", "array_record"):
        found[form] = ["--config.data.name=cifar10", f"--config.data.data_dir={root}/{form}"]
    return {kind: [*overrides, "--config.data.batch_size=16"] for kind, overrides in found.items()}


def global_batch(parts: list[dict], size: int) -> list:
    """One global batch, put together from all processes; rows that several feed must agree."""
    rows = [None] * size
    for part in parts:
        for row, *example in zip(part["rows"], part["id"], part["seed"], part["label"], strict=True):
            assert rows[row] in (None, example)
            rows[row] = example
    assert all(rows)
    assert all(part["pixels"] == parts[0]["pixels"] for part in parts)
    return [rows, parts[0]["pixels"]]


def test_one_two_and_four_processes_read_the_same_global_batches(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "ids.py").write_text(IDS)
    (tmp_path / "sources.json").write_text(json.dumps(make_sources(tmp_path)))
    layouts = {
        "1": (1, 4, []),
        "2": (2, 2, []),
        "4": (4, 1, []),
        "4, tensor across processes": (4, 1, ["--config.mesh.tensor=2"]),
    }
    batches = {}
    for name, (count, devices, arguments) in layouts.items():
        files = [str(tmp_path / file) for file in ("ids.py", "tiny.py", "sources.json", "out")]
        launcher = [sys.executable, "-m", "launch.local", f"--num_processes={count}", f"--devices={devices}", "--"]
        command = [*launcher, sys.executable, *files, *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        found = [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(count)]
        batches[name] = {
            kind: [global_batch([process[kind][i] for process in found], 16) for i in range(85)] for kind in found[0]
        }
    assert len(batches["1"]) == 6
    for name, by_kind in batches.items():
        for kind, found in by_kind.items():
            assert found == batches["1"][kind], (name, kind)
            assert found[17:50] == found[50:83]  # stopped at step 17 and resumed


def test_two_processes_train_stop_on_sigterm_and_continue(tmp_path):
    """Two processes follow the loss of one; SIGTERM to the launcher stops both at one step with exit code 75."""
    (tmp_path / "tiny.py").write_text(TINY)
    arguments = ["--config.total_steps=60", "--config.checkpoint.every=50", "--config.evals.val.every=0"]
    command = [
        sys.executable,
        "-m",
        "vit_jax.train",
        f"--config={tmp_path}/tiny.py",
        f"--workdir={tmp_path}/two",
        *arguments,
    ]
    launcher = [sys.executable, "-m", "launch.local", "--num_processes=2", "--devices=1", "--", *command]
    job = subprocess.Popen(launcher, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "two", 10, job)
    job.send_signal(signal.SIGTERM)
    code, err = finish(job)
    assert code == 75, err
    done = subprocess.run(launcher, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    code, err = finish(start(tmp_path / "tiny.py", tmp_path / "one", *arguments))
    assert code == 0, err
    losses = [[line["train/loss"] for line in metric_lines(tmp_path / name)] for name in ("one", "two")]
    assert len(losses[0]) == len(losses[1]) == 60
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_the_launcher_ends_all_when_one_fails():
    code = "import os, sys, time; time.sleep(0 if os.environ['VIT_JAX_PROCESS_ID'] == '1' else 3); sys.exit(7)"
    started = time.monotonic()
    assert local.main(["--num_processes=2", "--", sys.executable, "-c", code]) == 7
    assert time.monotonic() - started < 60
