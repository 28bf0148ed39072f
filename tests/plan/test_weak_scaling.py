"""Weak scaling with plans that are made up; the compiler makes real ones in other tests."""

import re

import pytest
from conftest import last_error

from vit_jax.plan import pods_page, weak_scaling

RECIPE = "configs/pods.py:L/16,v5e"


def values(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words)


@pytest.mark.parametrize("chips", weak_scaling.PODS)
def test_every_chip_has_as_many_images(chips):
    found = values(weak_scaling.options(RECIPE, chips))
    replicas, fsdp, data = (int(found[f"config.mesh.{a}"]) for a in ("replica", "fsdp", "data"))
    assert int(found["config.data.batch_size"]) == 64 * chips
    assert replicas * fsdp * data == chips and fsdp == min(16, chips)
    sides = re.fullmatch(r"v5e:(\d+)x(\d+)", found["topology"])
    assert int(sides[1]) * int(sides[2]) * int(found["num_slices"]) == chips
    assert replicas == int(found["num_slices"])


@pytest.fixture
def made_up(monkeypatch):
    """Plans whose computation takes 100 ms, and 2 ms more for every doubling; 8 chips do not fit."""

    def plan(words):
        found = values(words)
        chips = int(found["config.data.batch_size"]) // 64
        more = 2.0 * (chips.bit_length() - 4)
        step = dict(compute_roofline=80.0, compute_estimate=100.0 + more, communication=30.0)
        step |= dict(low=80.0 + more, high=130.0 + more)
        mesh = dict(data=chips, fsdp=1)
        memory = dict(total=1.0 + more)
        fits = chips > 8
        return dict(
            num_chips=chips, mesh=mesh, hbm_gib=memory, fits=fits, step_ms=step if fits else None
        )

    monkeypatch.setattr(pods_page, "plan", plan)


def test_the_table_is_relative_to_the_first_that_fits(made_up, tmp_path, capsys):
    out = tmp_path / "page.md"
    chips = [f"--chips={number}" for number in (8, 16, 32)]
    assert weak_scaling.main([f"--config={RECIPE}", f"--out={out}", *chips]) == 0
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip("| ") for cell in row] for row in rows]
    assert cells[0] == ["8", "data 8", "does not fit", "", "", "", "", "1.0"]
    assert cells[1] == ["16", "data 16", "102.0", "1.000", "30.0", "2.0", "1.9", "3.0"]
    assert cells[2] == ["32", "data 32", "104.0", "1.020", "30.0", "4.0", "3.7", "5.0"]
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert "![Time of a step against the number of chips](page.png)" in capsys.readouterr().out


def test_a_chip_of_three_dimensions_is_an_error(made_up, tmp_path, capsys):
    words = ["--config=configs/pods.py:L/16,v4", f"--out={tmp_path / 'page.md'}"]
    assert weak_scaling.main(words) == 2
    assert "torus of 3 dimensions" in last_error(capsys)
