"""The notebooks run as they stand, and show the pictures that they are stored with."""

import os
import pathlib
import re
import sys

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The TPU compiler takes minutes for the model that a notebook plans.
POD = "configs/pods.py:B/32,v5e --json=plan.json"
SMALL = "--config.image_size=64 --config.model.depth=1 --config.model.width=128"
SMALL += " --config.model.mlp_dim=256 --config.model.num_heads=2"


def pictures(book) -> list[int]:
    """How many each cell shows."""
    return [
        sum(
            "image/png" in output.get("data", {}) or "image/jpeg" in output.get("data", {})
            for output in cell.get("outputs", [])
        )
        for cell in book.cells
    ]


def marked(path: pathlib.Path):
    mark = pytest.mark.plan if "pod" in path.stem else pytest.mark.slow
    return pytest.param(path, id=path.stem, marks=mark)


@pytest.mark.parametrize("path", [marked(path) for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_what_it_was_stored_with(path, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # one device and optimised programs, as at a user's
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(path, as_version=4)
    stored = pictures(book)
    for cell in book.cells:
        cell.source = cell.source.replace(POD, f"{POD} {SMALL}")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=600, kernel_name="python3", resources=resources).execute()
    assert pictures(book) == stored and sum(stored)
    text = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    assert "error:" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path):
    """From the first cell to the last, without an error, and with what its links lead to."""
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(pictures(book)) and "/tmp/" not in path.read_text()
    for link in re.findall(r"\]\(([^)#]+)", "".join(cell.source for cell in book.cells)):
        assert (path.parent / link).exists(), link
