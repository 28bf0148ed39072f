"""Eight fake CPU devices for every test, and golden data."""

import functools
import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the time goes into compilation, and tests compare numbers, not speed.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# All workers and the commands that they start share compiled programs: many tests train the same
# model.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory()
    os.environ |= dict(
        JAX_COMPILATION_CACHE_DIR=PROGRAMS.name, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
    )

import numpy as np
import pytest

# A job in the background of a shell ignores it, and so would the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects, and the search for garbage slow

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests/golden"


def build_experiment(config, num_classes: int = 10, mesh=None, **more):
    """The experiment of a config on data of 1,000 images, which need not exist."""
    from vit_jax.data.sources import catalog
    from vit_jax.distributed import mesh as meshes
    from vit_jax.train.experiment import Experiment

    mesh = mesh or meshes.make_mesh(config.mesh)
    return Experiment.build(config, catalog.Facts(1000, num_classes), mesh, **more)


# The files with the longest tests.
LONGEST = ("test_docs.py", "test_processes.py", "test_vtab_whole.py")


def pytest_collection_modifyitems(items):
    """The longest tests begin first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def index_folder(tmp_path_factory):
    """Keeps the indices of test data out of the user's cache."""
    os.environ["VIT_JAX_CACHE"] = str(tmp_path_factory.mktemp("index"))


def golden(name: str) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, config) of one file that the published implementations made."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return arrays, json.loads(str(arrays.pop("config")))


def below(arrays: dict, prefix: str) -> dict[str, np.ndarray]:
    """The entries under `prefix/`, without it."""
    return {
        key.removeprefix(f"{prefix}/"): value
        for key, value in arrays.items()
        if key.startswith(f"{prefix}/")
    }


def golden_file(
    folder, name: str, prefix: str = "params", change=lambda flat: flat
) -> pathlib.Path:
    """Writes a golden case as a published .npz; `change`: {name: array} -> what is written."""
    path = pathlib.Path(folder) / f"{name}.npz"
    np.savez(path, **change(below(golden(name)[0], prefix)))
    return path


def golden_folder(folder, name: str) -> pathlib.Path:
    """Copies a golden folder of timm or Hugging Face weights."""
    return pathlib.Path(shutil.copytree(GOLDEN / name, pathlib.Path(folder) / name))


def applied(model, params, image, **options):
    """What `model.apply` returns, compiled, in full float32."""
    import jax

    apply = jax.jit(functools.partial(model.apply, **options))
    with jax.default_matmul_precision("highest"):
        return jax.device_get(apply({"params": params}, image))


def features_of(model, params, image):
    """What `vit_jax.features` returns, compiled."""
    import jax

    import vit_jax

    return jax.device_get(jax.jit(vit_jax.features, static_argnums=0)(model, params, image))


# In place of a library: it takes long to import, and swallows what is raised meanwhile.
SWALLOWS = """
import sys
print("here", flush=True)
while True:
    try:
        sys.stdin.readline()
    except BaseException:
        pass
"""


def importing(folder: pathlib.Path, library: str, command: str) -> subprocess.Popen:
    """A command in the middle of the import of a library, which is made in `folder`."""
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).write_text(SWALLOWS)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    variables = os.environ | dict(PYTHONPATH=f"{folder}:{ROOT}")
    words = [sys.executable, "-m", f"vit_jax.{command}"]
    job = subprocess.Popen(words, env=variables, text=True, **pipes)
    assert job.stdout.readline() == "here\n", f"{command} does not import {library}"
    return job


TINY = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.total_steps = 12
    config.image_size = 8
    config.log_every = 1
    config.model = dict(variant="Ti/4", width=32, depth=2, mlp_dim=64, num_heads=4, pool="gap")
    config.data = dict(name="digits", batch_size=64, crop="inception", area_min=0.5)
    config.optim = dict(lr=1e-3, warmup_steps=2, grad_clip_norm=1.0)
    config.evals = dict(val=dict(every=6, data=dict(split="val")))
    config.checkpoint = dict(every=4)
    return config
"""


@pytest.fixture
def tiny(tmp_path) -> str:
    """A config file that trains a tiny model on digits for 12 steps."""
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def unlabelled(tmp_path) -> str:
    """Trains the tiny model of `TINY`, without a classification."""
    path = tmp_path / "unlabelled.py"
    path.write_text(TINY.replace("evals = dict(val=dict(", 'evals = dict(val=dict(type="knn", '))
    return str(path)


def metric_lines(workdir) -> list[dict]:
    return [
        json.loads(line)
        for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    ]


def last_error(capsys) -> str:
    """The last line on stderr, which must be an error of one line, without a traceback."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines and lines[-1].startswith("error: "), lines
    assert not any(line.startswith("Traceback") for line in lines), lines
    return lines[-1]
