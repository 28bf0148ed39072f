"""The page in a real browser, if one is installed."""

import math

import browser
import numpy as np
import pytest
import workdirs

from vit_jax import config as configs
from vit_jax.report import page
from vit_jax.train import __main__ as train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason="no Chromium or Chrome on the PATH"),
]
CHOOSE_AXIS = "Bokeh.documents[0].roots()[0].active = {};"
SMOOTH = "Bokeh.documents[0].roots()[1].value = {};"


def check_clean(answer: dict) -> None:
    """No errors, nothing asked of a network, and nothing wider than the window."""
    assert answer["errors"] == [] and answer["console"] == []
    assert answer["requests"] == []
    assert answer["wide"] <= 0
    assert all(answer["images"])


def test_the_page_of_a_real_run(tiny, tmp_path):
    folder = tmp_path / "run"
    assert train.main([f"--config={tiny}", f"--workdir={folder}"]) == 0
    workdirs.make_evaluation(folder / "evals/test")
    path = page.write([str(folder)])
    answer = browser.look(path, tmp_path, CHOOSE_AXIS.format(1) + SMOOTH.format(0.5))
    check_clean(answer)
    assert answer["canvases"] == len(answer["before"]) > 5
    assert len(answer["images"]) == 2
    loss = answer["before"][0]["curves"][0]
    assert loss["name"] == "run" and loss["x"] == list(range(1, 13))
    after = answer["after"][0]
    assert after["label"] == "epoch"
    np.testing.assert_allclose(after["curves"][0]["x"], np.arange(1, 13) * 64 / 1077, rtol=1e-6)
    np.testing.assert_allclose(after["curves"][0]["y"], smoothed(loss["y"], 0.5), rtol=1e-6)


def smoothed(values: list[float], weight: float) -> list[float]:
    """The weighted mean of all values until each one."""
    found = []
    for i in range(len(values)):
        weights = weight ** np.arange(i, -1, -1)
        found.append(float(weights @ values[: i + 1] / weights.sum()))
    return found


@pytest.mark.parametrize("width", [400, 900, 1500])
def test_five_runs_side_by_side(width, tiny, tmp_path):
    """A run that is hidden in one chart is hidden in all; names are text."""
    config = configs.load(tiny, [])
    names = ["a", "b" * 200, "<img src=x onerror=alert(1)>", "\udcff😀", "<!--<script>"]
    paths = [workdirs.make_run(tmp_path / name, config) for name in names]
    path = page.write(paths, str(tmp_path / "out.html"))
    act = "panels()[0].renderers[0].visible = false;" + CHOOSE_AXIS.format(3)
    answer = browser.look(path, tmp_path, act, width)
    check_clean(answer)
    for panel in answer["before"]:
        assert [curve["visible"] for curve in panel["curves"]] == [True] * 5
    for panel in answer["after"]:
        assert [curve["visible"] for curve in panel["curves"]] == [False] + [True] * 4
        assert panel["label"] == "training time, seconds"
        np.testing.assert_allclose(panel["curves"][4]["x"][-1], 10, rtol=1e-5)  # 100 steps of 0.1 s
    assert answer["after"][0]["curves"][2]["name"] == names[2]


def test_a_hundred_thousand_points(tiny, tmp_path):
    count = 10_000
    lines = [
        {"step": step, **{f"train/{key}": math.sin(step * key / 1e3) for key in range(1, 11)}}
        for step in range(1, count + 1)
    ]
    lines[4_321]["train/1"] = 77.0  # a spike
    lines[7_654]["train/1"] = math.nan
    folder = workdirs.make_run(tmp_path / "run", configs.load(tiny, []), lines)
    path = page.write([folder])
    assert path.stat().length < 5_000_000
    answer = browser.look(path, tmp_path)
    check_clean(answer)
    assert answer["canvases"] == len(answer["before"]) == 10
    (curve,) = answer["before"][0]["curves"]
    assert len(curve["x"]) <= 1_000 and curve["x"][-1] == count
    shown = dict(zip(curve["x"], curve["y"], strict=True))
    assert shown[4_322] == 77 and shown[7_655] is None
