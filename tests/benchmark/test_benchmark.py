"""The benchmarks: what they report, and what they refuse."""

import io
import json
import math
import os
import subprocess
import sys
import tarfile

import jax
import numpy as np
import pytest
from conftest import last_error, metric_lines
from PIL import Image

from vit_jax import config as configs
from vit_jax.benchmark import __main__ as benchmark
from vit_jax.benchmark import data
from vit_jax.data import pipeline
from vit_jax.data.sources import storage
from vit_jax.distributed import hardware, runtime
from vit_jax.train import experiment
from vit_jax.weights import adapt


@pytest.fixture(autouse=True)
def cache():
    """The step's benchmark turns the compilation cache off; later tests need it."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def test_the_report_has_every_stage(tiny, tmp_path):
    path = tmp_path / "out.json"
    arguments = [
        f"--config={tiny}",
        f"--json={path}",
        "--images=128",
        "--runs=2",
        "--topology=v5e:2x4",
        "--mfu=0.25",
    ]
    assert benchmark.main(["data", *arguments]) == 0
    rows = json.loads(path.read_text())
    assert all(set(row) == {"name", "unit", "median", "runs"} for row in rows)
    found = {(row["name"], row["unit"]): row for row in rows}
    whole = found["host: all", "core-ms/image"]
    assert len(whole["runs"]) == 2 and whole["median"] == sum(whole["runs"]) / 2 > 0
    stages = [
        found[f"host: {name}", "core-ms/image"]["runs"][0]
        for name in ("read and parse", "decode and crop", "resize")
    ]
    # Each is the difference from the one before it.
    assert sum(stages) == pytest.approx(whole["runs"][0])
    # Image, label, mask, seed.
    assert found["transfer to the devices", "bytes/image"]["median"] == 8 * 8 * 3 + 4 + 4 + 8
    speed = found["v5e:2x4 at 25% MFU takes", "images/s"]["median"]
    assert found["cores that feed v5e:2x4", "cores"]["median"] == pytest.approx(
        speed * whole["median"] / 1e3
    )


def test_topologies():
    assert data.chips_of("v5e:16x16") == ("TPU v5e", 256)
    assert data.chips_of("v4:2x2x4") == ("TPU v4", 16)
    assert all(
        kind in hardware.PEAK_FLOPS for kind, _ in map(data.chips_of, ("v5p:1x1", "v6e:4x4"))
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topology=v9:2x2"], "--topology=v9:2x2 is not understood"),
        (["--topology=v5e"], "--topology=v5e is not understood"),
        (["--topology=v5e:0x4"], "--topology=v5e:0x4 is not understood"),
        (["--topology=v5e:\u00b2"], "is not understood"),
        (["--topology=v5e:" + "9" * 5000], "is not understood"),
        (["--mfu=nan"], "--mfu=nan above 0 and at most 1"),
        (["--json=/tmp"], "--json=/tmp is a folder"),
        (["--config.image_size=0"], "image_size=0 is for evaluate only"),
        (["--images=8"], "--images=8 is less than a batch of 64"),
        (["--against=big_vision"], "--peer is missing"),
        (["--against=big_vision", "--peer=x"], "measures inception crops of TFDS data"),
        (["--runs=0"], "--runs=0"),
        (["--threads=1,0"], "--threads=1,0 is not understood"),
        (["--threads=two"], "--threads=two is not understood"),
        (["--latency_ms=nan"], "--latency_ms=nan must be 0 to 10000"),
        (["--latency_ms=30", "--connections=0"], "--connections=0 above 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tiny, capsys):
    assert benchmark.main(["data", f"--config={tiny}", *arguments]) == 2
    assert message in last_error(capsys)


def test_distance_is_simulated_for_shards(tiny, tmp_path, monkeypatch, capsys):
    """Each round has a process for local files and one with the latency; here both are this one."""
    monkeypatch.setattr(storage, "simulated", None)
    arguments = [f"--config={tiny}", "--latency_ms=1", "--connections=3", "--images=64"]
    assert benchmark.main(["data", *arguments, "--alone"]) == 2
    assert "array_record, tfrecord and tars" in last_error(capsys)
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for i in range(100):
            buffer = io.BytesIO()
            Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(buffer, "png")
            for suffix, content in (("png", buffer.getvalue()), ("cls", b"%d" % (i % 10))):
                member = tarfile.TarInfo(f"{i}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    for name, value in (("DISTANT_WARMUP", 64), ("DISTANT_IMAGES", 512)):
        monkeypatch.setattr(data, name, value)
    monkeypatch.setattr(pipeline, "READ_AT_ONCE_DISTANT", 100)

    def run_alone(name, command):
        monkeypatch.setattr(storage, "simulated", None)
        assert benchmark.main(command[3:]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(data, "run_alone", run_alone)
    path = tmp_path / "out.json"
    arguments += [f"--config.data.name=tars:{tmp_path}", "--runs=1", f"--json={path}"]
    assert benchmark.main(["data", *arguments]) == 0
    found = rows_of(path)
    name = "at 1 ms, 3 connections"
    assert found[f"{name}: images per request", "images"]["median"] > 30
    speeds = [found[f"{key}: images_per_sec", "images/s"]["median"] for key in (name, "local")]
    ratio = found[f"{name} / local: images_per_sec", "ratio"]["median"]
    assert ratio == pytest.approx(speeds[0] / speeds[1])


def test_each_number_of_threads_has_its_rows(tiny, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--threads=1,3", "--images=128", "--runs=2", f"--json={path}"]
    assert benchmark.main(["data", f"--config={tiny}", *arguments]) == 0
    found = rows_of(path)
    assert len(found) == 6
    for count in (1, 3):
        whole = found[f"host, {count} threads: all", "core-ms/image"]["runs"]
        python = found[f"host, {count} threads: in Python", "core-ms/image"]["runs"]
        assert len(whole) == 2 and all(part > 0 for part in python)
        assert found[f"host, {count} threads: all", "images/s"]["median"] > 0


def rows_of(path) -> dict[tuple[str, str], dict]:
    return {(row["name"], row["unit"]): row for row in json.loads(path.read_text())}


@pytest.mark.slow
def test_the_step_of_several_models(tiny, tmp_path):
    """MFU is what images/s, analytic FLOPs and the measured product make of it."""
    path = tmp_path / "out.json"
    arguments = [
        f"--config={tiny}",
        f"--json={path}",
        "--models=Ti/4:16,Ti/2:8",
        "--steps=2",
        "--runs=2",
    ]
    assert benchmark.main(["step", *arguments]) == 0
    found = rows_of(path)
    product = 1e12 * found["product of bfloat16 matrices, one device", "TFLOP/s"]["median"]
    config = configs.load(str(tiny))
    for variant, images, patches in (("Ti/4", 16, 4), ("Ti/2", 8, 16)):
        name = f"{variant}, {images} images"
        with config.unlocked():
            config.model.variant = variant
        model = experiment.make_model(config, 10)
        assert math.prod(model.grid) == patches
        speed = found[f"{name}: training", "images/s"]["runs"]
        flops = 3 * model.flops / jax.device_count()
        mfu = found[f"{name}: of the peak in products", "MFU"]["runs"]
        assert len(mfu) == 2 and mfu == pytest.approx([one * flops / product for one in speed])
        memory = found[f"{name}: memory of the step, per device", "MiB"]["median"]
        params = sum(leaf.size for leaf in jax.tree.leaves(adapt.abstract_params(model)))
        assert memory > 3 * 4 * params / 2**20  # parameters and Adam's two moments at least
        assert found[f"{name}: inference", "images/s"]["median"] > 0
        assert found[f"{name}: compilation", "s"]["median"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models=Ti/16"], "'Ti/16' is not VARIANT:IMAGES, such as Ti/16:16"),
        (["--models=Ti/16:0"], "'Ti/16:0' is not VARIANT:IMAGES"),
        (["--models=Ti/4:8,"], "'' is not VARIANT:IMAGES"),
        (["--models=Ti/4:7"], "batch_size=7"),
        (["--models=X/16:8"], "X/16"),
        (["--steps=0"], "--steps=0 is too few: give 1 or more"),
        (["--runs=0"], "--runs=0 is too few: give 1 or more"),
        (["--config.image_size=-1"], "image_size"),
    ],
)
def test_wrong_arguments_of_step_are_one_line(arguments, message, tiny, capsys):
    assert benchmark.main(["step", f"--config={tiny}", *arguments]) == 2
    assert message in last_error(capsys)


@pytest.mark.slow
def test_saving_and_restoring(tiny, tmp_path, capsys):
    path, folder = tmp_path / "out.json", tmp_path / "saved"
    arguments = ["checkpoint", f"--config={tiny}", f"--json={path}", f"--folder={folder}"]
    arguments += ["--runs=2"]
    assert benchmark.main(arguments) == 0
    rows = json.loads(path.read_text())
    assert [row["unit"] for row in rows] == ["s", "s", "MiB/s", "s", "MiB/s"]
    blocking, saving, speed = (row["runs"] for row in rows[:3])
    assert all(0 < one <= other for one, other in zip(blocking, saving, strict=True))
    size = [s * v for s, v in zip(saving, speed, strict=True)]
    assert size == pytest.approx([size[0]] * 2)  # of the state, whatever the time
    assert benchmark.main(arguments) == 2
    assert f"--folder={folder} is not empty: name a new one" in last_error(capsys)


@pytest.mark.slow
def test_starting_fills_and_uses_the_cache_of_programs(tiny, tmp_path):
    """A second run loads the programs of the first, compiles nothing new, and trains to the same
    bits.
    """
    path = tmp_path / "out.json"
    assert benchmark.main(["startup", f"--config={tiny}", f"--json={path}", "--runs=1"]) == 0
    assert len(json.loads(path.read_text())) == 6

    cache = tmp_path / "cache"
    found = []
    variables = runtime.JAX_VARIABLES
    environment = {key: value for key, value in os.environ.items() if key not in variables}
    environment |= dict(
        VIT_JAX_CACHE=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        XLA_FLAGS="--xla_backend_optimization_level=0",
    )
    for name in ("one", "two"):
        command = [sys.executable, "-m", "vit_jax.train", f"--config={tiny}"]
        command += [f"--workdir={tmp_path / name}"]
        command += ["--config.total_steps=3", "--config.log_every=1"]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        files = [file.name for file in (cache / "programs").iterdir()]
        programs = sorted(file for file in files if file.endswith("-cache"))
        lines = metric_lines(tmp_path / name)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        found.append((programs, losses))
    assert found[0] == found[1]
    assert any("train_step" in name for name in found[0][0])
