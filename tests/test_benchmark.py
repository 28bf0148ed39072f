"""The benchmark of the input pipeline: what it reports, and what it refuses."""

import json

import pytest
from conftest import last_error

from vit_jax import benchmark, chips
from vit_jax.data import benchmark as data_benchmark


def test_the_report_holds_every_stage(tiny, tmp_path):
    path = tmp_path / "out.json"
    arguments = [f"--config={tiny}", f"--json={path}", "--images=128", "--runs=2", "--topology=v5e:2x4", "--mfu=0.25"]
    assert benchmark.main(["data", *arguments]) == 0
    rows = json.loads(path.read_text())
    assert all(set(row) == {"name", "unit", "median", "runs"} for row in rows)
    found = {(row["name"], row["unit"]): row for row in rows}
    whole = found["host: all", "core-ms/image"]
    assert len(whole["runs"]) == 2 and whole["median"] == sum(whole["runs"]) / 2 > 0
    stages = [
        found[f"host: {name}", "core-ms/image"]["runs"][0] for name in ("read and parse", "decode and crop", "resize")
    ]
    assert sum(stages) == pytest.approx(whole["runs"][0])  # each is the difference to the one before it
    assert found["transfer to the devices", "bytes/image"]["median"] == 8 * 8 * 3 + 4 + 4 + 8  # label, mask, seed
    speed = found["v5e:2x4 at 25% MFU takes", "images/s"]["median"]
    assert found["cores that feed v5e:2x4", "cores"]["median"] == pytest.approx(speed * whole["median"] / 1e3)


def test_topologies():
    assert data_benchmark.chips_of("v5e:16x16") == ("TPU v5e", 256)
    assert data_benchmark.chips_of("v4:2x2x4") == ("TPU v4", 16)
    assert all(kind in chips.PEAK_FLOPS for kind, _ in map(data_benchmark.chips_of, ("v5p:1x1", "v6e:4x4")))


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
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tiny, capsys):
    assert benchmark.main(["data", f"--config={tiny}", *arguments]) == 2
    assert message in last_error(capsys)
