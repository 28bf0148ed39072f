"""Pairs of runs with one difference each: where they begin to differ is known before."""

import csv
import json

import numpy as np
import pytest
from conftest import metric_lines
from PIL import Image

from vit_jax import config as configs
from vit_jax.compare import __main__ as compare
from vit_jax.data import order
from vit_jax.data.sources import open as sources
from vit_jax.distributed import versions
from vit_jax.train import __main__ as train
from vit_jax.train import optim

pytestmark = pytest.mark.slow

STEPS = 8


def make_run(config: str, folder, *overrides: str) -> str:
    words = [f"--config={config}", f"--workdir={folder}", f"--config.total_steps={STEPS}"]
    assert train.main([*words, *(f"--config.{text}" for text in overrides)]) == 0
    return str(folder)


def found(a: str, b: str, folder, code: int = 1, *flags: str) -> dict:
    path = folder / "found.json"
    assert compare.main([a, b, f"--json={path}", *flags]) == code
    return json.loads(path.read_text())


def quality(line: dict) -> dict:
    """What a line of metrics says about the model, and not about time."""
    return {key: line[key] for key in line if key.startswith(("train/", "eval/"))}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(config file, workdir) of a run on digits."""
    from conftest import TINY

    folder = tmp_path_factory.mktemp("base")
    config = folder / "tiny.py"
    config.write_text(TINY.replace("config.evals", "evals"))
    return str(config), make_run(str(config), folder / "a")


@pytest.mark.parametrize(
    ("overrides", "step", "key"),
    [
        (["seed=1"], 1, "seed"),
        (["optim.wd=0.2"], 3, "optim.wd"),  # the learning rate of the first update is 0
        (["model.dtype=bfloat16"], 1, "model.dtype"),
        (["model.dropout=0.1"], 1, "model.dropout"),
    ],
)
def test_a_key_of_the_config(base, tmp_path, overrides, step, key):
    config, a = base
    b = make_run(config, tmp_path / "b", *overrides)
    seen = found(a, b, tmp_path)
    assert not seen["same"] and seen["first_step"] == step
    assert seen["last_same_step"] == (step - 1 or None)
    assert set(seen["config"]) == {key} and any(key in text for text in seen["causes"])
    assert seen["data"] is seen["code"] is None and not seen["versions"]


def test_the_same_command_again(base, tmp_path, capsys):
    config, a = base
    b = make_run(config, tmp_path / "b")
    seen = found(a, b, tmp_path, code=0)
    assert seen["same"] and seen["first_step"] is None and not seen["causes"]
    assert "to the last bit" in capsys.readouterr().out


def test_a_batch_that_was_left_out(base, tmp_path):
    config, a = base
    (tmp_path / "b").mkdir()
    part = dict(spike=6, detected=6, step=5, batches=[5, 5])
    (tmp_path / "b/left_out.json").write_text(json.dumps([part]))
    b = make_run(config, tmp_path / "b")
    seen = found(a, b, tmp_path)
    assert (seen["first_step"], seen["last_same_step"]) == (6, 5)
    assert "left out batches 5 to 5" in seen["causes"][0]


def test_a_restart_that_adds_in_another_order(base, tmp_path, monkeypatch):
    """Stopped after the checkpoint of step 4, and continued with microbatches."""
    from vit_jax.train import loop

    class Stop(Exception):
        pass

    def stop(self, number, *_):
        saves(self, number, *_)
        raise Stop

    config, a = base
    saves = loop.Loop.save
    monkeypatch.setattr(loop.Loop, "save", stop)
    words = [f"--config={config}", f"--workdir={tmp_path / 'b'}", f"--config.total_steps={STEPS}"]
    with pytest.raises(Stop):
        train.main([*words, "--debug"])
    monkeypatch.undo()
    b = make_run(config, tmp_path / "b", "accum_steps=2")
    seen = found(a, b, tmp_path)
    assert (seen["first_step"], seen["last_same_step"]) == (5, 4)
    assert "started again after step 4 with accum_steps 1 -> 2" in seen["causes"][0]
    assert seen["beyond_rounding_step"] is None
    assert found(a, b, tmp_path, 0, "--tolerance=1e-3")["same"]


def test_another_mesh(base, tmp_path):
    """It only rounds otherwise, at a step that the lines of the metrics tell."""
    config, a = base
    b = make_run(config, tmp_path / "b", "mesh.fsdp=4", "mesh.tensor=2")
    pairs = zip(metric_lines(a), metric_lines(b), strict=True)
    truth = next(one["step"] for one, other in pairs if quality(one) != quality(other))
    seen = found(a, b, tmp_path)
    assert seen["first_step"] == truth and seen["beyond_rounding_step"] is None
    assert set(seen["config"]) == {"mesh.fsdp", "mesh.tensor"}
    assert any("mesh" in text for text in seen["causes"])


def test_other_code(base, tmp_path, monkeypatch):
    config, a = base
    make = optim.make_schedule

    def later(*args, **options):
        before = make(*args, **options)
        return lambda step: before(step) * (1 + (step >= 3) * 1e-3)  # of the fourth update on

    monkeypatch.setattr(optim, "make_schedule", later)
    monkeypatch.setattr(versions, "code", lambda: "0123456789abcdef")
    b = make_run(config, tmp_path / "b")
    seen = found(a, b, tmp_path)
    assert (seen["first_step"], seen["quantity"]) == (4, "train/lr")
    assert seen["code"][1] == "0123456789abcdef"
    assert any("another code" in text for text in seen["causes"])


# --- data ---


def make_table(folder, rows: list[tuple[str, int]]) -> str:
    """A CSV of images in `folder`, which are made if they are not there."""
    path = folder / "train.csv"
    for name, label in rows:
        if not (folder / name).exists():
            rng = np.random.default_rng([label, int(name[3:6])])
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / name)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return str(path)


ROWS = [(f"img{number:03}.png", number % 10) for number in range(600)]


def batches(table: str, config: str) -> list[list[str]]:
    """The names of the images that each step reads."""
    loaded = configs.load(config, [f"--config.data.name=csv:{table}"])
    source = sources.open_training(loaded.data, loaded.user, True)
    names = [source.describe(i) for i in range(len(source))]
    read = [order.ids(loaded, source.parts, step, source.block) for step in range(STEPS)]
    return [[names[i] for i in ids] for ids in read]


@pytest.fixture(scope="module")
def table(base, tmp_path_factory):
    """(table, config file, workdir) of a run on files."""
    folder = tmp_path_factory.mktemp("table")
    path = make_table(folder, ROWS)
    return path, base[0], make_run(base[0], folder / "a", f"data.name=csv:{path}")


def test_one_image_with_other_pixels(table, tmp_path):
    """Of the same name, so that no record has it."""
    path, config, a = table
    read = batches(path, config)
    image = (tmp_path / path).parent / "img123.png"
    first = next(step for step, names in enumerate(read, 1) if any(image.name in x for x in names))
    before = image.read_bytes()
    Image.fromarray(255 - np.asarray(Image.open(image))).save(image)
    b = make_run(config, tmp_path / "b", f"data.name=csv:{path}")
    image.write_bytes(before)
    seen = found(a, b, tmp_path)
    assert seen["first_step"] == first
    assert not seen["config"] and not seen["causes"]


def test_another_order(table, tmp_path):
    path, config, a = table
    before = batches(path, config)
    swapped = [*ROWS[:40], ROWS[41], ROWS[40], *ROWS[42:]]
    make_table((tmp_path / path).parent, swapped)
    after = batches(path, config)
    first = next(step for step in range(STEPS) if before[step] != after[step]) + 1
    b = make_run(config, tmp_path / "b", f"data.name=csv:{path}")
    seen = found(a, b, tmp_path)
    assert seen["first_step"] == first
    assert seen["data"] and any("another training data" in text for text in seen["causes"])
