"""What an installation that is not editable consists of, and that it works from any folder."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from jax.experimental import topologies

from vit_jax.errors import UserError
from vit_jax.plan import topology


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the files that `pip install .` puts into site-packages, built offline."""
    folder = tmp_path_factory.mktemp("installed")
    base = tmp_path_factory.mktemp("build")
    words = [sys.executable, "setup.py", "-q", "build"]
    words += [f"--build-base={base}", f"--build-lib={folder}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def python(installed, folder, *words: str) -> str:
    """The output of Python with the installed files, run in another folder."""
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_package_with_all_its_files(installed):
    assert [path.name for path in installed.iterdir()] == ["vit_jax"]
    files = list((ROOT / "vit_jax").rglob("*.py")) + list((ROOT / "configs").rglob("*.py"))
    names = {str(path.relative_to(ROOT)).removeprefix("vit_jax/") for path in files}
    names |= {"data/prepare/imagenet21k_wordnet_ids.txt", "report/page.html"}
    names |= {"data/sources/digits.npz"}
    there = installed / "vit_jax"
    assert names == {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}


def test_configs_are_found_by_name_from_any_folder(installed, tmp_path):
    location = python(installed, tmp_path, "-c", "import vit_jax; print(vit_jax.__file__)")
    assert location.startswith(str(installed))
    words = ("-m", "vit_jax", "train", "--config=configs/demo.py", "--dry_run")
    assert re.search(r"^model .* parameters", python(installed, tmp_path, *words), re.MULTILINE)
    code = "from vit_jax.plan import pods_page; print(pods_page.recipes())"
    assert "L/16,v5e" in python(installed, tmp_path, "-c", code)


def test_a_plan_without_the_tpu_compiler_says_what_to_install(monkeypatch):
    """Whatever JAX says without it."""

    def missing(**_):
        raise RuntimeError("no such topology")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match="pip install libtpu"):
        topology.devices("v5e:2x2")
