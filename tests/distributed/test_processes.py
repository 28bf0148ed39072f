"""Real processes: kills, SIGTERM, and the same data on 1, 2 and 4 of them."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, TINY, metric_lines
from test_listings import make_folder, make_tar, wds, write_manifest
from test_sources import prepare_cifar10
from test_spikes import PARTS, READ, make_config, trained_on
from test_train import final_params, same_bits

from vit_jax.data.left_out import LeftOut

pytestmark = pytest.mark.slow

LONGER = ["--config.total_steps=60", "--config.checkpoint.every=6", "--config.evals.val.every=0"]


def environment() -> dict[str, str]:
    """One CPU device, whatever conftest set."""
    flags = "--xla_backend_optimization_level=0"
    return os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(ROOT))


def start(config, workdir, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "vit_jax.train", f"--config={config}", f"--workdir={workdir}"]
    command += arguments
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)


def finish(job: subprocess.Popen) -> tuple[int, str]:
    _, err = job.communicate(timeout=600)
    return job.returncode, err


def launcher(count: int, devices: int, *command: str) -> list[str]:
    flags = [f"--num_processes={count}", f"--devices={devices}"]
    return [sys.executable, "-m", "launch.local", *flags, "--", sys.executable, *command]


def wait_for_step(workdir: pathlib.Path, step: int, job: subprocess.Popen) -> None:
    """Returns when the run has logged `step`, or has ended."""
    path = workdir / "metrics.jsonl"
    while job.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(config, workdir) of an undisturbed run of 60 steps."""
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


def test_sigterm_saves_exits_75_and_the_same_command_continues(straight, tmp_path):
    config, workdir = straight
    job = start(config, tmp_path / "run", *LONGER)
    wait_for_step(tmp_path / "run", 10, job)
    job.send_signal(signal.SIGTERM)
    code, err = finish(job)
    assert code == 75, err
    stopped = metric_lines(tmp_path / "run")[-1]["step"]
    assert f"stopped by SIGTERM at step {stopped}: saved" in err
    assert (tmp_path / "run/checkpoints" / str(stopped)).is_dir()
    code, err = finish(start(config, tmp_path / "run", *LONGER))
    assert code == 0 and f"training from step {stopped}" in err
    assert_same_run(workdir, tmp_path / "run")


def test_a_full_disk_ends_in_one_line(tmp_path):
    """A limit on the size of files stands in for a full disk: both are an OSError in a write.
    tests/faults/ has disks that are full for a while.
    """
    config = tmp_path / "tiny.py"
    config.write_text(TINY)
    limit = "import resource, runpy, sys; sys.argv = ['train', *sys.argv[1:]];"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
    limit += "runpy.run_module('vit_jax.train', run_name='__main__')"
    # An array that does not fit, into whatever files the arrays are gathered.
    large = ["--config.model.width=128", "--config.model.mlp_dim=1024"]
    words = [sys.executable, "-c", limit, f"--config={config}", f"--workdir={tmp_path}/run"]
    words += [*LONGER, *large]
    job = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
    code, err = finish(job)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: "), err
    assert "earlier checkpoints are intact" in last
    assert "Traceback" not in err


IDS = """
import json, sys
import jax, numpy as np
from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes, processes, sharding
from vit_jax.train import run_data
processes.start()
found = {}
for name, overrides in json.load(open(sys.argv[2])).items():
    config = configs.load(sys.argv[1], overrides + sys.argv[4:])
    mesh = meshes.make_mesh(config.mesh)
    source = run_data.open_training_data(config)
    from vit_jax.data import pipeline, to_device
    size = config.data.batch_size
    rows = sharding.local_rows(mesh, size)
    everywhere = sharding.replicated(mesh)
    sums = jax.jit(lambda x: x.astype("int32").sum((1, 2, 3)), out_shardings=everywhere)
    found[name] = []
    for start, stop in ((0, 50), (17, 50), (10**6, 10**6 + 2)):
        host = pipeline.train_pipeline(config, source, rows, stop)
        for batch in host.batches(start):
            placed = to_device.global_batch(batch, mesh, rows, size)
            values = {name: batch[name].tolist() for name in ("id", "seed", "label")}
            pixels = np.asarray(sums(placed["image"])).tolist()
            found[name].append(dict(rows=rows.tolist(), **values, pixels=pixels))
open(f"{sys.argv[3]}.{jax.process_index()}", "w").write(json.dumps(found))
"""


def make_sources(root: pathlib.Path) -> dict[str, list[str]]:
    """Small data sets of every kind, as overrides of a config."""
    for form in ("tfrecord", "array_record"):
        prepare_cifar10(root / form, form)
    make_folder(root / "folder", {"owl": 30, "jay": 25})
    for shard in range(3):
        make_tar(root / f"tars/birds-train-{shard:03}.tar", wds(range(20 * shard, 20 * shard + 20)))
    rows = [(f"{i:02}.png", ("owl", "jay")[i % 2]) for i in range(50)]
    manifest = write_manifest(root / "csv", rows)
    mixture = ((f"folder:{root}/folder", 2.0), (f"csv:{manifest}", 1.0))
    names = dict(
        tars=f"tars:{root}/tars",
        csv=f"csv:{manifest}",
        folder=f"folder:{root}/folder",
        mixture="mixture",
    )
    found = {kind: [f"--config.data.name={name}"] for kind, name in names.items()}
    found["mixture"] += [f"--config.data.mixture={mixture}", "--config.evals.val.data.name=digits"]
    for form in ("tfrecord", "array_record"):
        found[form] = ["--config.data.name=cifar10", f"--config.data.data_dir={root}/{form}"]
    return {kind: [*overrides, "--config.data.batch_size=16"] for kind, overrides in found.items()}


def global_batch(parts: list[dict], size: int) -> list:
    """One global batch, put together from all processes; rows that several feed must agree."""
    rows = [None] * size
    for part in parts:
        columns = [part[name] for name in ("rows", "id", "seed", "label")]
        for row, *example in zip(*columns, strict=True):
            assert rows[row] in (None, example)
            rows[row] = example
    assert all(rows)
    assert all(part["pixels"] == parts[0]["pixels"] for part in parts)
    return [rows, parts[0]["pixels"]]


def test_one_and_four_processes_read_the_same_global_batches(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "ids.py").write_text(IDS)
    (tmp_path / "sources.json").write_text(json.dumps(make_sources(tmp_path)))
    layouts = {
        "1": (1, 4, []),
        "4, tensor across processes": (4, 1, ["--config.mesh.tensor=2"]),
    }
    batches = {}
    for name, (count, devices, arguments) in layouts.items():
        files = [str(tmp_path / file) for file in ("ids.py", "tiny.py", "sources.json", "out")]
        command = launcher(count, devices, *files, *arguments)
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(count)]
        batches[name] = {
            kind: [global_batch([process[kind][i] for process in found], 16) for i in range(85)]
            for kind in found[0]
        }
    assert len(batches["1"]) == 6
    for name, by_kind in batches.items():
        for kind, found in by_kind.items():
            assert found == batches["1"][kind], (name, kind)
            assert found[17:50] == found[50:83]  # stopped at step 17 and resumed


STOPPED = ["--config.total_steps=40", "--config.checkpoint.every=6", "--config.evals.val.every=20"]


def command(folder: pathlib.Path, name: str, *arguments: str) -> list[str]:
    flags = [f"--config={folder}/tiny.py", f"--workdir={folder}/{name}"]
    return ["-m", "vit_jax.train", *flags, *arguments]


def run_on(folder: pathlib.Path, name: str, count: int, devices: int, *arguments: str) -> str:
    """The stderr of a run that ends with 0."""
    words = launcher(count, devices, *command(folder, name, *arguments))
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def losses(workdir: pathlib.Path) -> list[float]:
    lines = metric_lines(workdir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["train/loss"] for line in lines]


def start_four(folder: pathlib.Path) -> subprocess.Popen:
    words = launcher(4, 1, *command(folder, "four", *STOPPED))
    return subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)


def test_four_processes_survive_the_loss_of_one_and_sigterm_and_continue_on_other_devices(tmp_path):
    """The launcher names the process that was lost and ends the others. SIGTERM stops all at the
    same step with exit code 75. Four processes then continue bit by bit; other numbers of devices
    round sums differently.
    """
    (tmp_path / "tiny.py").write_text(TINY)
    job = start_four(tmp_path)
    wait_for_step(tmp_path / "four", 13, job)  # the save of step 12 has waited for that of step 6
    children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    code, err = finish(job)
    assert code not in (0, 75) and "process 1 ended first, with exit code 137" in err
    names = [path.name for path in (tmp_path / "four/checkpoints").iterdir()]
    saved = max(int(name) for name in names if name.isdigit())
    assert saved >= 6

    job = start_four(tmp_path)
    wait_for_step(tmp_path / "four", 24, job)
    job.send_signal(signal.SIGTERM)
    code, err = finish(job)
    assert code == 75 and f"training from step {saved}" in err, err
    stopped = metric_lines(tmp_path / "four")[-1]["step"]
    assert stopped < 40 and (tmp_path / "four/checkpoints" / str(stopped)).is_dir()
    log = (tmp_path / "four/log.txt").read_text()
    assert "process 0 of 4, coordinator at 127.0.0.1:" in log and "1 local devices of 4" in log
    assert f"stopped by SIGTERM at step {stopped}: saved" in log and "images/s" in log
    for i in (1, 2, 3):
        log = (tmp_path / f"four/logs/process_{i}.txt").read_text()
        assert f"stopped by SIGTERM at step {stopped}" in log
    for devices in (1, 2, 8):
        shutil.copytree(tmp_path / "four", tmp_path / f"on_{devices}")

    assert f"training from step {stopped}" in run_on(tmp_path, "four", 4, 1, *STOPPED)
    run_on(tmp_path, "undisturbed", 4, 1, *STOPPED)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "four")
    truth = losses(tmp_path / "undisturbed")
    for devices in (1, 2, 8):
        err = run_on(tmp_path, f"on_{devices}", 1, devices, *STOPPED)
        assert f"training from step {stopped}" in err
        # The first loss after the resume is that of the restored state, except for rounding.
        found = losses(tmp_path / f"on_{devices}")
        assert found[:stopped] == truth[:stopped]
        assert found[stopped] == pytest.approx(truth[stopped], rel=1e-6)
        np.testing.assert_allclose(found, truth, rtol=1e-3)
        largest = max(abs(np.subtract(found, truth)))
        print(f"{devices} devices: largest difference of the loss {largest:.1e}")
        evals = [
            metric_lines(tmp_path / name)[-1]["eval/val/loss"]
            for name in (f"on_{devices}", "undisturbed")
        ]
        assert evals[0] == pytest.approx(evals[1], rel=1e-3)


MESHES = {
    "data": dict(data=4),
    "fsdp": dict(data=1, fsdp=4),
    "tensor": dict(data=1, tensor=4),
    "fsdp and tensor": dict(data=1, fsdp=2, tensor=2),
}

# On one host, the profiles of two processes would have the same name.
SEVERAL_RUNS = """
import json, sys
import jax
from vit_jax.train.__main__ import main
start_trace = jax.profiler.start_trace
jax.profiler.start_trace = lambda folder, **options: start_trace(
    f"{folder}/{jax.process_index()}", **options
)
for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(code)
"""


def test_one_two_and_four_processes_train_the_same(tmp_path):
    """On every mesh of four devices, over 10 steps, against one device; Adam's first steps amplify
    rounding. A profile is taken on all processes, since one alone would hang a pod.
    """
    (tmp_path / "tiny.py").write_text(TINY)
    common = [f"--config={tmp_path}/tiny.py"]
    common += ["--config.total_steps=10", "--config.evals.val.every=0"]
    common += ["--config.checkpoint.every=0"]
    # Large enough that fsdp splits it.
    common += ["--config.model.width=64", "--config.model.mlp_dim=256"]

    def train(name: str, count: int, devices: int, meshes: dict) -> None:
        runs = []
        for mesh, sizes in meshes.items():
            flags = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
            if mesh == "data":
                flags += ["--config.profile.first_step=5", "--config.profile.num_steps=2"]
            runs.append([*common, f"--workdir={tmp_path}/{name}/{mesh}", *flags])
        command = launcher(count, devices, "-c", SEVERAL_RUNS, json.dumps(runs))
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

    train("truth", 1, 1, {"one": {}})
    truth, params = losses(tmp_path / "truth/one"), final_params(tmp_path / "truth/one")
    assert len(truth) == 10
    mixed = {name: MESHES[name] for name in ("data", "fsdp and tensor")}
    for count, devices, meshes in ((2, 2, mixed), (4, 1, MESHES)):
        train(str(count), count, devices, meshes)
        profiled = tmp_path / str(count) / "data/profile"
        traces = {path.relative_to(profiled).parts[0] for path in profiled.rglob("*.xplane.pb")}
        assert traces == {str(index) for index in range(count)}
        for mesh in meshes:
            workdir = tmp_path / str(count) / mesh
            np.testing.assert_allclose(
                losses(workdir), truth, rtol=1e-5, err_msg=f"{count} processes, {mesh}"
            )
            for key, value in final_params(workdir).items():
                # The bias of a key has no gradient except rounding: hence the 1e-2.
                largest = max(np.abs(params[key]).max(), 1e-2)
                np.testing.assert_allclose(
                    value, params[key], atol=1e-3 * largest, err_msg=f"{count}, {mesh}: {key}"
                )


KILLED_AFTER_A_SPIKE = """
import os, pathlib, signal, sys
import jax
from vit_jax.data.left_out import LeftOut
from vit_jax.train import __main__ as train, metrics

write = metrics.MetricWriter.write

def write_or_die(self, step, scalars):
    write(self, step, scalars)
    workdir = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
    again = step == 27 and len(LeftOut.read(workdir).parts) == 2
    if again and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

metrics.MetricWriter.write = write_or_die
sys.exit(train.main(sys.argv[1:]))
"""


def test_two_processes_go_back_together_after_a_loss_spike_and_survive_a_kill(tmp_path):
    config = make_config(tmp_path)

    def train(*code: str) -> tuple[int, str]:
        words = launcher(2, 1, *code, f"--config={config}", f"--workdir={tmp_path}/run")
        return finish(subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True))

    _, err = train("-c", KILLED_AFTER_A_SPIKE)
    assert "process 1 ended first, with exit code 137" in err, err
    before = losses(tmp_path / "run")
    code, err = train("-m", "vit_jax.train")
    assert code == 0 and "training from step 24" in err, err
    after = losses(tmp_path / "run")
    assert 25 <= len(before) <= 28 and after[: len(before)] == before, "trained again, bit by bit"
    assert LeftOut.read(tmp_path / "run").parts == PARTS
    np.testing.assert_allclose(after, trained_on(config, READ)[0], rtol=1e-2)
