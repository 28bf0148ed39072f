"""Who may import whom, and that the core does without TensorFlow."""

import ast
import itertools
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT

from vit_jax.__main__ import COMMANDS

PACKAGE = ROOT / "vit_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up: a folder (or file at the root) imports those above it in this list, and
# itself. Commands that are in one row do not import each other.
LAYERS = (
    ("errors",),
    ("config",),
    ("cli",),
    ("distributed",),
    ("models", "checkpoints"),
    ("weights", "data"),
    ("figures",),
    ("evaluate",),
    ("train",),
    ("vtab",),
    ("report",),
    ("plan", "finetune", "convert", "predict", "goodput", "compare"),
    ("study",),
    ("benchmark", "demo"),
    ("__init__", "__main__"),
)
# Library -> the only places that may import it.
ONLY_IN = {
    "tensorflow": ("data/", "benchmark/data.py"),
    "tensorflow_datasets": ("data/",),
    "clu": ("train/metrics.py",),
    "flax": ("models/",),
    "orbax": ("checkpoints/",),
    "bokeh": ("report/",),
    "wandb": ("train/trackers/",),
    "mlflow": ("train/trackers/",),
    "pickle": (),
    "dill": (),
    "cloudpickle": (),
    "joblib": (),
    "shelve": (),
    "marshal": (),
}


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    relative = path.relative_to(PACKAGE).as_posix()
    owner = relative.removesuffix(".py").split("/")[0]
    names = imports(path)
    above = set(itertools.chain(*itertools.takewhile(lambda row: owner not in row, LAYERS)))
    ours = {name.split(".")[1] for name in names if name.startswith("vit_jax.")}
    assert ours <= above | {owner}, f"{relative} imports {ours - above - {owner}}"
    for library, places in ONLY_IN.items():
        if any(name.split(".")[0] == library for name in names):
            assert relative.startswith(places), f"{relative} imports {library}"


def test_one_console_escapes_what_all_tables_show():
    users = [path for path in FILES if any("rich.console" in name for name in imports(path))]
    assert users == [PACKAGE / "cli/terminal.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_run(path):
    """No eval, and numpy is told not to read pickles; modules that do are not imported at all, see
    ONLY_IN.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "compile", "__import__"), f"{path}: {called}"
        if called in ("np.load", "np.lib.format.read_array"):
            assert any(k.arg == "allow_pickle" and k.value.value is False for k in node.keywords), (
                f"{path}: {called}"
            )


def test_only_operations_and_what_knows_the_hardware_ask_for_the_platform():
    asked = ("platform", "default_backend", "platform_dependent", "compute_capability")
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in asked
    }
    ops = {place for place in places if place.startswith("models/ops/")}
    assert ops == {
        f"models/ops/{name}.py" for name in ("activation", "attention", "precision", "tpu_layout")
    }
    assert places - ops == {"distributed/hardware.py"}


def test_names_of_files_say_something():
    stems = {path.stem for path in FILES}
    assert not stems & {"utils", "util", "common", "helpers", "misc"}


def test_the_core_imports_without_tensorflow():
    core = [path.relative_to(PACKAGE.parent) for path in FILES]
    modules = [
        ".".join(path.with_suffix("").parts)
        for path in core
        if "data" not in path.with_suffix("").parts
    ]
    modules += ["vit_jax.data.sources.catalog", "vit_jax.data.__main__"]
    code = "import sys\nfor name in ('tensorflow', 'tensorflow_datasets', 'clu'): sys.modules[name] = None\n"
    code += "\n".join(f"import {name}" for name in modules if not name.endswith("__main__"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_bare_import_brings_nothing_heavy():
    code = "import sys, vit_jax; print([m for m in ('jax', 'flax', 'numpy', 'tensorflow') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"


def test_help_works_without_tensorflow():
    code = """
import runpy
import sys
sys.modules["tensorflow"] = None
names = sys.argv[1:]
sys.argv = ["x", "--help"]
for name in names:
    try:
        runpy.run_module(f"vit_jax.{name}", run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = done.stdout.split("usage: vit_jax.")[1:]
    assert [text.split()[0] for text in texts] == list(COMMANDS)
    assert all("--" in text for text in texts)


def test_the_layers_name_what_stands_at_the_root_of_the_package():
    found = {path.stem for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found == set(itertools.chain(*LAYERS)) and len(found) <= 24
