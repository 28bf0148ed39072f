"""All 19 tasks by the command that a user runs, with real features of every data set and sprites in
place of dSprites, and a kill.
"""

import functools
import json
import pathlib
import signal
import subprocess
import sys
import time

import mocked_tfds
import pytest
from conftest import ROOT
from test_vtab import SMALL

from comparisons import sprites
from vit_jax.data.sources.vtab_tasks import VTAB

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """Has a config for a tiny model."""
    (tmp_path / "small.py").write_text(SMALL.format(root=str(ROOT)))
    return tmp_path


def start(where, command: str, *arguments, workdir: str = "") -> subprocess.Popen:
    words = [sys.executable, "-m", "vit_jax.vtab", command, f"--config={where}/small.py"]
    words += [f"--config.data.data_dir={where}/data", *arguments]
    words += [f"--workdir={where}/{workdir}"] if workdir else []
    return subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(where, workdir: str) -> dict:
    return json.loads((where / workdir / "vtab.json").read_text())


def test_all_tasks_run_and_a_kill_in_the_seventh_changes_no_number(folder, monkeypatch):
    mocked_tfds.main(str(folder / "data"))
    draw = functools.cache(sprites.example)
    # To draw all 737,280 would take more than a minute.
    monkeypatch.setattr(sprites, "example", lambda number: draw(number // 240 * 240))
    sprites.write(str(folder / "data"))
    run = start(folder, "run", workdir="killed")
    tasks = folder / "killed" / "tasks"
    while not tasks.exists() or len(list(tasks.glob("*.json"))) < 12:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    kept = {path.name: path.read_text() for path in tasks.glob("*.json")}
    assert 12 <= len(kept) <= 14
    again = start(folder, "run", workdir="killed")
    out, err = again.communicate(timeout=900)
    assert again.returncode == 0, err[-3000:]
    assert all((tasks / name).read_text() == text for name, text in kept.items())
    assert err.count(": top1 ") == 19 - len(kept) // 2
    names = list(VTAB)[:8]  # those before the kill, that of the kill, and one after it
    undisturbed = start(folder, "run", f"--tasks={','.join(names)}", workdir="straight")
    err = undisturbed.communicate(timeout=900)[1]
    assert undisturbed.returncode == 0, err[-3000:]

    straight, killed = results(folder, "straight"), results(folder, "killed")
    assert list(killed["tasks"]) == list(VTAB) and list(straight["tasks"]) == names
    assert straight["means"]["natural"] == killed["means"]["natural"]
    for name, task in straight["tasks"].items():
        assert task["seeds"] == killed["tasks"][name]["seeds"]
    for task in killed["tasks"].values():
        assert task["status"] == "done"
        assert (task["num_train"], task["num_test"]) == (1_000, 90)
    assert None not in killed["means"].values() and not killed["standard"]
    table = (folder / "killed" / "vtab.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 1 + 19 + 4
    assert "90 of 73,728 test images" in table and out.count("mean") == 4


def test_two_processes_share_the_tasks_and_give_the_same(folder):
    for name in ("dtd:3.0.1", "kitti:3.1.0", "smallnorb:2.0.0"):
        mocked_tfds.write(name, str(folder / "data"), mocked_tfds.COUNTS[name])
    # Three tasks with two seeds each: each process does one seed of the second task.
    names = "dtd,kitti_closest_vehicle_distance,smallnorb_label_azimuth"
    command = [
        sys.executable,
        "-m",
        "launch.local",
        "--num_processes=2",
        "--devices=1",
        "--",
        sys.executable,
        "-m",
    ]
    command += ["vit_jax.vtab", "run", f"--config={folder}/small.py", f"--tasks={names}"]
    command += [f"--config.data.data_dir={folder}/data", f"--workdir={folder}/two"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = start(folder, "run", f"--tasks={names}", workdir="one")
    err = alone.communicate(timeout=600)[1]
    assert alone.returncode == 0, err[-3000:]
    one, two = results(folder, "one")["tasks"], results(folder, "two")["tasks"]
    assert {name: task["seeds"] for name, task in one.items()} == {
        name: task["seeds"] for name, task in two.items()
    }
    other = (pathlib.Path(folder) / "two" / "logs" / "process_1.txt").read_text()
    assert other.count(": top1 ") == 2
