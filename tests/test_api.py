"""The front page: what it has, that its guide runs, and that its reference is built."""

import functools
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import matplotlib
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import vit_jax

GUIDE = (ROOT / "docs/api.md").read_text()
FUNCTIONS = [name for name in vit_jax.__all__ if name != "UserError"]

TWO_CLASSES = dict(
    total_steps=3,
    image_size=32,
    model=dict(variant="Ti/8", width=64, depth=2, mlp_dim=128, num_heads=4, pool="tok"),
    data=dict(name="folder:my_photos", split="train", batch_size=8, crop="resize"),
    optim=dict(lr=1e-3),
)


def test_dir_shows_what_is_public_and_only_that():
    assert dir(vit_jax) == vit_jax.__all__ == sorted(vit_jax.__all__)
    stems = {path.stem for path in (ROOT / "vit_jax").iterdir()}
    assert not stems & set(vit_jax.__all__)  # the import of a module would replace a function


def example_of(name: str) -> str:
    """The indented lines in the docstring of a function, before its arguments."""
    text = inspect.getdoc(getattr(vit_jax, name)).split("Args:")[0]
    return "".join(re.findall(r"^    (.*\n)", text, re.MULTILINE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_types_an_example_and_its_errors(name):
    function = getattr(vit_jax, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
    text = inspect.getdoc(function)
    assert f"vit_jax.{name}(" in example_of(name)
    assert "Returns:" in text and "Raises:" in text
    assert f"`{name}(" in GUIDE


def make_photos(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    for name, channel in (("cats", 0), ("dogs", 2)):
        (folder / "train" / name).mkdir(parents=True)
        (folder / name).symlink_to(folder / "train" / name)
        for i in range(10):
            pixels = rng.integers(0, 100, (40, 50, 3), np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(folder / "train" / name / f"{i}.jpg")


SMALL = {"model.width": 32, "model.depth": 1, "model.mlp_dim": 64, "model.num_heads": 2}


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    """As it stands, and the examples of the docstrings, but for the size of the model that they
    train, and with weights of two classes.
    """
    fit = vit_jax.fit

    @functools.wraps(fit)
    def fit_small(config, workdir, overrides=None):
        return fit(vit_jax.load_config(config, overrides), workdir, SMALL)

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "my_photos")
    fit(TWO_CLASSES, "my_run/final")
    monkeypatch.setattr(vit_jax, "fit", fit_small)
    capsys.readouterr()
    scope = {}
    for snippet in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(snippet, scope)
    out = capsys.readouterr().out
    (shown,) = re.findall(r"\n```\n(weights .*?)```", GUIDE, re.DOTALL)
    assert shown in out
    assert "resampled Transformer/posembed_input/pos_embedding" in out and "new head/kernel" in out
    assert "('cats', 'dogs')" in out and "(3, 2, 17, 64)" in out
    assert scope["accuracies"].keys() == {3e-4, 1e-3} and scope["metrics"]["step"] == 20
    with Image.open("attention.png") as picture:
        assert picture.size[0] > 300 and len(picture.convert("L").getcolors(10_000)) > 10
    for name, photo in zip(("cat.jpg", "dog.jpg"), scope["photos"], strict=True):
        shutil.copy(photo, name)
    for example in map(example_of, FUNCTIONS):
        exec(example, dict(scope, jnp=jax.numpy))


@pytest.mark.slow
def test_the_reference_is_built_without_warnings(tmp_path):
    """By the command of the Makefile; and the docstrings have no markup that it would swallow."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    modules = re.search(r"^REFERENCE = (.*)$", makefile, re.MULTILINE)[1].split()
    (options,) = re.findall(r"-W error -m pdoc (--\S+) .*\$\(REFERENCE\)", makefile)
    words = [sys.executable, "-W", "error", "-m", "pdoc", options, f"--output-directory={tmp_path}"]
    env = os.environ | dict(PDOC_ALLOW_EXEC="1", PYTHONPATH=str(ROOT))
    done = subprocess.run([*words, *modules], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    for name in modules:
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        texts = re.findall(r'<div class="docstring">(.*?)</div>', page, re.DOTALL)
        assert texts, name
        tags = set(re.findall(r"<(\w+)", " ".join(texts)))
        known = {"p", "pre", "code", "span", "div", "a", "h6", "ul", "li", "strong", "blockquote"}
        assert tags <= known, f"{name}: {tags - known}"
