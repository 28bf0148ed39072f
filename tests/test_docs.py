"""Every command and snippet of the README runs; links lead somewhere; the project speaks of itself
only.
"""

import ast
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, metric_lines
from PIL import Image

from vit_jax import config as configs
from vit_jax import convert, demo, finetune, predict
from vit_jax.compare import __main__ as compare
from vit_jax.evaluate import __main__ as evaluate
from vit_jax.train import __main__ as train
from vit_jax.weights import published

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def test_the_demo_runs_the_commands_that_the_readme_shows():
    shown = [shlex.split(command) for command in COMMANDS]
    for command in demo.commands(pathlib.Path("demo_workdir")):
        stripped = [word for word in command if not word.startswith("--json")]
        if "--out=demo_workdir/pretrain/evals" in stripped:
            continue  # the same evaluation, of the other stage
        assert stripped in shown, command


def test_every_command_is_a_make_target_or_python():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in COMMANDS:
        words = shlex.split(command)
        assert words[:2] == ["python", "-m"] or (
            words[0] == "make" and set(words[1:]) <= targets
        ), command


PODS = [
    command
    for command in COMMANDS
    if "gs://" in command and "vit_jax.train" in command and "launch" not in command
]


@pytest.mark.parametrize("command", PODS)
def test_pod_commands_dry_run(command, capsys):
    arguments = shlex.split(command)[3:]
    assert train.main([*arguments, *([] if "--dry_run" in arguments else ["--dry_run"])]) == 0
    assert "parameters" in capsys.readouterr().out


def test_the_launch_command_prints_what_it_would_run(capsys):
    from launch import tpu_vm

    (command,) = [command for command in COMMANDS if "launch.tpu_vm" in command]
    assert tpu_vm.main(shlex.split(command)[3:]) == 0
    out = capsys.readouterr().out
    assert "queued-resources create l16" in out and "configs/pods.py:L/16,v5e" in out


@pytest.mark.plan
@pytest.mark.parametrize("command", [command for command in COMMANDS if "vit_jax.plan" in command])
def test_plan_commands_run(command):
    """As they stand, but for a small model, and one compile of a search."""
    words = [sys.executable, *shlex.split(command)[1:], "--config.image_size=64"]
    sizes = dict(width=128, depth=1, mlp_dim=256, num_heads=2)
    words += [f"--config.model.{key}={value}" for key, value in sizes.items()]
    words += ["--max_compiles=1"] if "--search" in words else []
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "fits" in done.stdout and "MFU" in done.stdout, (
        done.stdout + done.stderr
    )


def make_photos(root: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (root / name).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(
                root / name / f"{i}.jpg"
            )


@pytest.mark.slow
def test_the_commands_for_own_photos_run(tmp_path, monkeypatch, capsys):
    """As they stand, but with small weights from a file, and a short run."""
    import jax

    import vit_jax
    from vit_jax.data import __main__ as data
    from vit_jax.weights import scan_layout

    check, tune, name = [shlex.split(line)[3:] for line in COMMANDS if "my_photos" in line]
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "my_photos")
    assert data.main(check) == 0
    assert "40 found, 40 used as images" in capsys.readouterr().out
    sizes = dict(width=32, depth=1, mlp_dim=64, num_heads=2)
    model = vit_jax.create_model("B/16", num_classes=7, image_size=32, pre_logits=True, **sizes)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 32, 32, 3)))["params"]
    np.savez("B_16.npz", **scan_layout.flatten(params))
    (weights,) = [word for word in tune if word.startswith("--init_from=")]
    assert published.path_of(weights.removeprefix("--init_from="))
    local = ["--init_from=B_16.npz" if word == weights else word for word in tune]
    assert finetune.main([*local, "--config.total_steps=2", "--lrs=0.01"]) == 0
    assert predict.main(name) == 0
    lines = pathlib.Path("classes.csv").read_text().splitlines()
    assert len(lines) == 41 and {line.split(",")[1] for line in lines[1:]} <= {"cats", "dogs"}


@pytest.mark.slow
def test_the_commands_of_pretraining_without_labels_run(tmp_path, monkeypatch):
    """As they stand, but for two steps of one block, on batches for eight devices."""
    import vit_jax

    pretrain, tune = [shlex.split(line)[3:] for line in COMMANDS if "demo_workdir/mae" in line]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    short = ["--config.total_steps=2", "--config.optim.warmup_steps=1"]
    short += ["--config.data.batch_size=48", "--config.model.depth=1"]
    assert train.main([*pretrain, *short]) == 0
    assert pathlib.Path("demo_workdir/mae/pictures/2.png").exists()
    autoencoder, params = vit_jax.from_pretrained("demo_workdir/mae", objective="mae")
    assert autoencoder.decoder.width == 64 and "decoder" in params
    assert train.main([*tune, *short]) == 0
    assert "eval/test/top1" in metric_lines("demo_workdir/few")[-1]


@pytest.mark.slow
def test_the_commands_of_vtab_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for mocked data of two tasks, and the size of model and images."""
    import mocked_tfds

    from vit_jax.vtab import __main__ as vtab

    check, run = [shlex.split(command)[3:] for command in COMMANDS if "vit_jax.vtab" in command]
    monkeypatch.chdir(ROOT)
    for name in ("dtd:3.0.1", "kitti:3.1.0"):
        mocked_tfds.write(name, str(tmp_path), mocked_tfds.COUNTS[name])
    small = ["--tasks=dtd,kitti_closest_vehicle_distance", f"--config.data.data_dir={tmp_path}"]
    assert vtab.main([*check, *small]) == 0
    assert capsys.readouterr().out.count("ready") == 2
    small += [
        "--config.init_from=",
        f"--workdir={tmp_path}/run",
        "--config.image_size=16",
        "--config.total_steps=2",
    ]
    small += [
        "--config.vtab.max_test_examples=20",
        "--config.data.batch_size=16",
        "--config.optim.warmup_steps=1",
    ]
    sizes = dict(width=32, depth=1, mlp_dim=64, num_heads=2)
    assert (
        vtab.main(
            [*run, *small, *(f"--config.model.{key}={value}" for key, value in sizes.items())]
        )
        == 0
    )
    assert "non-standard" in (tmp_path / "run/vtab.md").read_text()


DATA = [command for command in COMMANDS if "vit_jax.data " in command and "--config" in command]
BENCHMARKS = [command for command in COMMANDS if "vit_jax.benchmark " in command]


@pytest.mark.parametrize(
    "command", [*DATA, *(pytest.param(command, marks=pytest.mark.slow) for command in BENCHMARKS)]
)
def test_data_commands_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word.replace("configs/", f"{ROOT}/configs/") for word in shlex.split(command)[2:]]
    module = importlib.import_module(f"{words[0]}.__main__")
    assert module.main(words[1:]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 3 and "error" not in out


@pytest.mark.slow
def test_the_demo_its_evaluation_and_the_python_snippet_run(tmp_path, monkeypatch, capfd):
    """`make demo` without the installation: what it prints, draws, and reaches."""
    monkeypatch.delenv("XLA_FLAGS")  # one device and optimised programs, as at a user's
    assert demo.main([f"--workdir={tmp_path}/demo_workdir"]) == 0
    out = capfd.readouterr().out
    assert "test top-1" in out and "loss.png" in out and "accuracy.png" in out
    assert (tmp_path / "demo_workdir/finetune/figures/embedding_filters.png").exists()
    page = tmp_path / "demo_workdir/report.html"
    assert out.splitlines()[-1].startswith(f"The page:  {page}")
    assert page.read_text().count("data:image/") >= 10  # mistakes and attention of both stages
    for name in ("loss", "accuracy"):
        with Image.open(tmp_path / f"demo_workdir/{name}.png") as picture:
            assert picture.size[0] > 800 and len(picture.convert("L").getcolors(10_000)) > 10
    # The same bits as on the machine of the reference, or an end within its intervals.
    assert compare.main([f"{ROOT}/references/demo.json", f"{tmp_path}/demo_workdir/pretrain"]) == 0
    monkeypatch.chdir(tmp_path)
    (command,) = [command for command in COMMANDS if "vit_jax.evaluate" in command]
    arguments = [word.replace("configs/", f"{ROOT}/configs/") for word in shlex.split(command)[3:]]
    assert evaluate.main([*arguments, "--json=out.json"]) == 0
    (top1,) = re.findall(r'"eval/test/top1": ([\d.]+)', pathlib.Path("out.json").read_text())
    assert float(top1) >= 0.97
    (snippet,) = blocks("python")
    scope = {}
    exec(snippet, scope)
    assert scope["model"].num_classes == 100 and scope["model"].image_size == (48, 48)

    (command,) = [command for command in COMMANDS if "vit_jax.convert" in command]
    assert convert.main(shlex.split(command)[3:]) == 0
    assert pathlib.Path("demo_workdir/timm/model.safetensors").exists()

    (command,) = [command for command in COMMANDS if "launch.local" in command]
    words = [word.replace("configs/", f"{ROOT}/configs/") for word in shlex.split(command)]
    words = [sys.executable if word == "python" else word for word in words]
    done = subprocess.run(
        [*words, "--config.total_steps=10"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_settings_for_people_from_elsewhere_are_keys():
    page = (ROOT / "docs/coming_from.md").read_text().split("## Settings")[1].split("## Files")[0]
    names = re.findall(r"`([a-z_.0-9]+)", "\n".join(re.findall(r"^\| ([^|]*)", page, re.MULTILINE)))
    values = {"tok", "gap", "map", "adam"}
    groups = {key.split(".")[0] for key in configs.KEYS}
    assert len(names) > 40
    assert not [name for name in names if not configs.find(name) and name not in values | groups]


def test_links_in_the_documents_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"(?:\]\(|src=\")(?!https?:)([^)#\"]+)[)#\"]", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_snippets_in_the_documents_parse():
    for page in (ROOT / "docs").glob("*.md"):
        for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            assert ast.parse(snippet).body, f"{page.name}: an empty snippet"


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:vit_jax|configs)/[\w/.]+)", README):
        assert (ROOT / name).exists(), name
