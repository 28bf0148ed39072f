"""Who may import whom, and that the core does without TensorFlow."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "vit_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Module (or folder) -> modules of ours that it may import. What is not listed may import everything: the entry points.
MAY_IMPORT = {
    "errors": set(),
    "chips": set(),
    "perf": set(),
    "losses": set(),
    "augment": set(),
    "randaug": {"chips"},
    "three_augment": set(),
    "preprocess": {"augment", "losses", "randaug", "three_augment"},
    "result_file": {"errors"},
    "user_cache": set(),
    "config_rules": {"errors"},
    "config": {"config_rules", "errors"},
    "processes": {"errors"},
    "sharding": {"chips", "errors"},
    "layout": {"sharding"},
    "optim": {"errors", "sharding"},
    "step": {"losses"},
    "metrics": {"errors", "result_file"},
    "figures": {"metrics"},
    "integrity": {"errors", "processes", "sharding"},
    "memory": {"errors"},
    "preemption": set(),
    "soundness": {"errors"},
    "versions": set(),
    "agreement": {"errors", "processes", "versions"},
    "watch": {"errors", "processes"},
    "checkpoint": {"errors", "integrity", "memory", "processes"},
    "checkpointer": {"checkpoint", "errors", "integrity", "processes"},
    "workdir": {"errors", "config", "checkpoint", "result_file", "versions"},
    "state": {"adapt", "checkpoint", "errors", "layout", "pretrained", "sharding", "step", "workdir"},
    "summary": {"layout", "perf", "sharding", "data"},
    "models": {"errors", "sharding", "augment", "perf", "models"},
    "formats": {"errors", "layout", "memory", "models", "formats"},
    "adapt": {"errors", "layout", "models", "formats"},
    "pretrained": {"errors", "checkpoint", "layout", "models", "formats", "adapt"},
    "plan": {"chips", "config", "data", "errors", "models", "perf", "plan", "result_file"}
    | {"sharding", "state", "train"},
    "plan/hlo": set(),
    "plan/topology": {"chips", "errors"},
    "plan/collectives": {"chips", "plan"},
    "data": {"errors", "sharding", "user_cache", "data"},
    "data/show": {"augment", "errors", "preprocess", "data"},
    "data/benchmark": {"chips", "errors", "perf", "preprocess", "sharding", "train", "data"},
    "data/__main__": {"config", "errors", "metrics", "result_file"},
    "step_benchmark": {"chips", "errors", "perf", "plan", "state"},
    "checkpoint_benchmark": {"checkpointer", "errors", "perf", "plan", "state"},
    "startup_benchmark": {"errors", "perf", "user_cache"},
    "evals": {"errors", "evaluators", "pretrained", "sharding", "watch", "data"},
    "evaluators": {"errors", "losses", "augment", "sharding", "evaluators"},
}
# Library -> the only places that may import it.
ONLY_IN = {
    "tensorflow": ("data/",),
    "tensorflow_datasets": ("data/",),
    "clu": ("metrics.py",),
    "flax": ("models/",),
    "orbax": ("checkpoint.py", "checkpointer.py"),
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
def test_layers(path):
    relative = path.relative_to(PACKAGE).as_posix()
    owner = relative.removesuffix(".py")
    owner = owner if owner in MAY_IMPORT else owner.split("/")[0]
    names = imports(path)
    ours = {name.split(".")[1] for name in names if name.startswith("vit_jax.")}
    if owner in MAY_IMPORT:
        assert ours <= MAY_IMPORT[owner], f"{relative} imports {ours - MAY_IMPORT[owner]}"
    for library, places in ONLY_IN.items():
        if any(name.split(".")[0] == library for name in names):
            assert relative.startswith(places), f"{relative} imports {library}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_run(path):
    """No eval, and numpy is told not to read pickles; modules that do are not imported at all, see ONLY_IN."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "compile", "__import__"), f"{path}: {called}"
        if called in ("np.load", "np.lib.format.read_array"):
            assert any(k.arg == "allow_pickle" and k.value.value is False for k in node.keywords), f"{path}: {called}"


def test_platforms_are_told_apart_in_two_files_alone():
    asked = ("platform", "default_backend", "platform_dependent", "compute_capability")
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in asked
    }
    assert places == {"distributed/hardware.py"}


def test_names_of_files_say_something():
    stems = {path.stem for path in FILES}
    assert not stems & {"utils", "util", "common", "helpers", "misc"}


def test_the_core_imports_without_tensorflow():
    core = [path.relative_to(PACKAGE.parent) for path in FILES]
    modules = [".".join(path.with_suffix("").parts) for path in core if "data" not in path.parts]
    modules += ["vit_jax.data.catalog", "vit_jax.data.__main__"]
    code = "import sys\nfor name in ('tensorflow', 'tensorflow_datasets', 'clu'): sys.modules[name] = None\n"
    code += "\n".join(f"import {name}" for name in modules if not name.endswith("__main__"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr


def test_a_bare_import_brings_nothing_heavy():
    code = "import sys, vit_jax; print([m for m in ('jax', 'flax', 'numpy', 'tensorflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    ["train", "evaluate", "demo", "convert", "models", "data", "benchmark", "plan", "finetune", "predict", "vtab"],
)
def test_help_works_without_tensorflow(command):
    code = "import sys, runpy; sys.modules['tensorflow'] = None; sys.argv = ['x', '--help'];"
    code += f"runpy.run_module('vit_jax.{command}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_the_map_names_only_modules_that_exist():
    assert all((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists() for name in MAY_IMPORT)
