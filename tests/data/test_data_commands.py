"""`vit_jax.data show` and `check`, the cache of decoded evaluation images, and the warning of a run
that waits for data.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import last_error
from PIL import Image
from test_listings import make_folder
from test_pipeline import SIDE, eval_config, memory_source, noise

from vit_jax import config as configs
from vit_jax.data import __main__ as command
from vit_jax.data import eval_cache, image_ops, images, pipeline, stage_times
from vit_jax.data.augment.batch import FLIP, flip, keys
from vit_jax.data.check import contact_sheet
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import storage
from vit_jax.errors import UserError


def photo_folder(root, count: int = 12):
    """Smooth pictures of odd sizes, half of them JPEGs."""
    rng = np.random.default_rng(0)
    for i in range(count):
        picture = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize((61 + i, 47))
        path = root / ("owl", "jay")[i % 2] / f"{i:02}.{('png', 'jpg')[i // 2 % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return root


def show(tiny, tmp_path, *arguments) -> dict:
    path = tmp_path / "show.json"
    assert command.main(["show", f"--config={tiny}", f"--json={path}", *arguments]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("crop", ["inception", "torchvision", "random", "simple", "resize"])
def test_show_tells_what_training_reads(crop, tiny, tmp_path, capsys):
    folder = photo_folder(tmp_path / "photos")
    arguments = [
        f"--config.data.name=folder:{folder}",
        f"--config.data.crop={crop}",
        "--config.data.batch_size=8",
    ]
    shown = show(tiny, tmp_path, "--step=123456", *arguments)
    config = configs.load(tiny, arguments)
    source = sources.open_training(config.data)
    batch = next(pipeline.train_pipeline(config, source, np.arange(8), 123_457).batches(123_456))
    assert (shown["step"], shown["epoch"]) == (123_456, 123_456 * 8 // 12)
    assert shown["ids"] == batch["id"].tolist() and shown["seeds"] == batch["seed"].tolist()
    assert shown["names"] == [source.describe(i) for i in batch["id"]]
    how = dict(method="bilinear", antialias=False)
    for number, (y, x, height, width) in enumerate(shown["crop"]):
        image = images.decode(source.read([shown["ids"][number]])[0])
        if crop == "random":
            image = image_ops.resize(image, 9)
        if crop == "simple":
            image = image_ops.reflect_pad(image_ops.resize_small(image, 8, **how), 4)
        if crop == "resize":
            image = image_ops.resize(image, 8)
        wanted = image_ops.resize(image[y : y + height, x : x + width], 8)
        difference = np.abs(wanted.numpy().astype(int) - batch["image"][number])
        # The border of a partially decoded JPEG is upsampled without its neighbours.
        assert difference.max() <= (4 if crop in images.BOXES else 0)
    mirrored = flip(keys(batch["seed"], FLIP), jnp.asarray(batch["image"]))
    for number, is_flipped in enumerate(shown["flip"]):
        wanted = batch["image"][number][:, ::-1] if is_flipped else batch["image"][number]
        np.testing.assert_array_equal(mirrored[number], wanted)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8


@pytest.mark.parametrize("step", [-1, 2**31])
def test_show_refuses_a_step_that_is_none(step, tiny, capsys):
    assert command.main(["show", f"--config={tiny}", f"--step={step}"]) == 2
    assert f"--step={step} is outside of 0 to 2147483647" in last_error(capsys)


@pytest.mark.parametrize("crop", ["inception", "resize"])
def test_show_names_an_image_that_cannot_be_read(crop, tiny, tmp_path, capsys):
    root = photo_folder(tmp_path / "photos")
    bad = root / "jay" / "01.png"
    bad.write_bytes(bad.read_bytes()[:60])
    arguments = [
        f"--config.data.name=folder:{root}",
        f"--config.data.crop={crop}",
        "--config.data.batch_size=12",
    ]
    assert command.main(["show", f"--config={tiny}", *arguments]) == 2
    assert f"{bad} can't be read as an image" in last_error(capsys)
    shown = show(tiny, tmp_path, "--config.data.on_corrupt=skip", *arguments)
    crops = dict(zip(shown["names"], shown["crop"], strict=True))
    assert [name for name, crop in crops.items() if crop is None] == [str(bad)]
    assert f"{bad}: can't be read" in capsys.readouterr().out


def test_show_asks_for_a_size(capsys):
    assert command.main(["show", "--config=configs/evaluate.py:digits"]) == 2
    assert "image_size=0 is for evaluate only" in last_error(capsys)


@pytest.mark.slow
def test_show_needs_no_accelerator_and_prints_what_the_terminal_cannot(tiny, tmp_path):
    root = photo_folder(tmp_path / "photos")
    (root / "jay" / "01.png").rename(root / "jay" / "\u00fc.png")
    arguments = [
        f"--config={tiny}",
        f"--config.data.name=folder:{root}",
        "--config.data.batch_size=12",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.data", "show", *arguments],
        capture_output=True,
        check=False,
        env=os.environ | dict(JAX_PLATFORMS="cuda", PYTHONIOENCODING="ascii"),
    )
    assert done.returncode == 0 and b"\\xfc.png" in done.stdout, done.stderr[-400:]


def check(config, tmp_path, *arguments) -> tuple[int, dict]:
    path = tmp_path / "check.json"
    code = command.main(
        ["check", f"--config={config}", f"--json={path}", f"--out={tmp_path}/sheets", *arguments]
    )
    return code, json.loads(path.read_text())


def test_check_tells_what_there_is(tiny, tmp_path):
    code, report = check(tiny, tmp_path)
    assert code == 0 and report["ready"]
    train, val = report["data"]
    assert (train["use"], train["num_examples"], train["num_classes"]) == ("train", 1077, 10)
    assert (val["use"], val["num_examples"]) == ("evals.val", 360)
    assert val["splits"] == dict(train=1077, val=360, test=360)
    source = sources.open_source("digits", "val")
    host = pipeline.eval_pipeline(eval_config(), source, np.arange(64), 64, 8, "error")
    batch = next(host.batches())
    np.testing.assert_allclose(val["mean"], batch["image"].mean((0, 1, 2)) / 255, atol=1e-4)
    for entry in (train, val):
        with Image.open(entry["sheet"]) as sheet:
            assert sheet.size[0] > 8 * 90


def test_check_names_what_is_missing_and_goes_on(tiny, tmp_path, capsys):
    started = time.monotonic()
    code, report = check(
        tiny, tmp_path, "--config.data.name=cifar10", f"--config.data.data_dir={tmp_path}"
    )
    assert code == 1 and time.monotonic() - started < 60
    line = last_error(capsys)
    assert "train: data set 'cifar10' is not prepared in" in line and "evals.val: " in line
    assert not report["ready"] and not any(entry["ready"] for entry in report["data"])


def test_check_scans_for_corrupt_images(tiny, tmp_path, capsys):
    root = photo_folder(tmp_path / "photos", 100)
    bad = root / "jay" / "99.jpg"
    bad.write_bytes(bad.read_bytes()[:200])
    arguments = [f"--config.data.name=folder:{root}", "--config.evals.val.data.split=train[:2]"]
    code, report = check(tiny, tmp_path, "--scan", *arguments)
    assert code == 1 and report["data"][0]["corrupt"] == [str(bad)]
    assert str(bad) in last_error(capsys)
    bad.unlink()
    assert check(tiny, tmp_path, "--scan", *arguments)[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config.data.name=../[/x]"],
        ["--config.data.name=cifar10/foo:9.9"],
        ["--config.data.split=train[/a]"],
    ],
)
def test_check_prints_what_looks_like_markup(arguments, tiny, tmp_path, capsys):
    code, _ = check(tiny, tmp_path, f"--config.data.data_dir={tmp_path}", *arguments)
    assert code == 1 and "train: " in last_error(capsys)


def test_sheets_of_long_names_differ(tmp_path):
    paths = [
        contact_sheet.file_of(str(tmp_path), "train", "folder:/" + "\u00e4" * 300 + end)
        for end in "ab"
    ]
    assert paths[0] != paths[1] and max(len(os.fsencode(path.name)) for path in paths) < 240
    for path in paths:
        path.touch()


@pytest.mark.parametrize("below", ["", "/folder"])
def test_check_refuses_an_out_that_is_a_file(below, tiny, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command.main(["check", f"--config={tiny}", f"--out={tmp_path}/file{below}"]) == 2
    assert f"--out={tmp_path}/file{below} can't be written" in last_error(capsys)


def test_json_can_be_no_folder(tiny, tmp_path, capsys):
    assert (
        command.main(["check", f"--config={tiny}", f"--json={tmp_path}", f"--out={tmp_path}"]) == 2
    )
    assert f"--json={tmp_path} is a folder" in last_error(capsys)
    name = tmp_path / ("x" * 300)
    assert command.main(["show", f"--config={tiny}", f"--json={name}"]) == 2
    assert "can't be written" in last_error(capsys)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--config.data.num_examples=5"],
            "train: config key data.num_examples=5, but digits train has 1077",
        ),
        (
            ["--config.model.num_classes=7"],
            "train: config key model.num_classes=7 is less than the 10 classes",
        ),
        (["--config.data.subset=5000"], "train: config key data.subset='5000' is 5000 of the 1077"),
        (
            ["--config.evals.val.data.name=PHOTOS"],
            "evals.val has the class 'jay', which the model does not have",
        ),
    ],
)
def test_check_refuses_what_training_refuses(arguments, message, tiny, tmp_path, capsys):
    root = photo_folder(tmp_path / "photos")
    arguments = [argument.replace("PHOTOS", f"folder:{root}") for argument in arguments]
    split = ["--config.evals.val.data.split=train"] if "photos" in arguments[0] else []
    assert check(tiny, tmp_path, *arguments, *split)[0] == 1
    assert message in last_error(capsys)


def test_check_of_a_subset_counts_it(tiny, tmp_path):
    code, report = check(tiny, tmp_path, "--config.data.subset=100")
    assert code == 0 and report["data"][0]["num_examples"] == 100


def mixed(tiny, *parts: str) -> str:
    path = pathlib.Path(tiny).with_name("mixed.py")
    text = pathlib.Path(tiny).read_text()
    path.write_text(
        text.replace(
            'name="digits"', f'name="mixture", mixture={tuple((part, 1.0) for part in parts)!r}'
        )
    )
    return str(path)


def test_check_of_a_mixture(tiny, tmp_path, capsys):
    evals = ["--config.evals.val.data.name=digits"]
    code, report = check(mixed(tiny, "digits@train", "digits@test"), tmp_path, *evals)
    assert code == 0
    first, second, whole, _ = report["data"]
    assert [part["num_examples"] for part in (first, second, whole)] == [1077, 360, 1437]
    assert (whole["use"], whole["name"]) == ("train", "mixture") and os.path.exists(whole["sheet"])
    photos = f"folder:{photo_folder(tmp_path / 'photos')}@train"
    none = f"folder:{tmp_path}/none"
    code, report = check(mixed(tiny, photos, none, "digits@nosplit"), tmp_path, *evals)
    ready = [part["ready"] for part in report["data"]]
    assert code == 1 and ready == [True, False, False, False, True]
    line = last_error(capsys)
    assert line.count("/none does not exist") == 1 and "'nosplit' does not exist in digits" in line


def test_check_of_an_evaluation_without_an_image_size(tmp_path):
    code, report = check("configs/evaluate.py:digits", tmp_path)
    assert code == 0 and [entry["ready"] for entry in report["data"]] == [True, True]


def test_check_asks_the_network_only_for_what_lies_there(tiny, tmp_path, monkeypatch, capsys):
    asked = []

    def refuse(path):
        asked.append(path)
        raise UserError(f"{path} can't be reached")

    monkeypatch.setattr(storage, "must_be_reachable", refuse)
    root = photo_folder(tmp_path / "photos")
    evals = ["--config.evals.val.data.name=digits", "--config.data.data_dir=gs://bucket/data"]
    # The classes are not those of digits.
    assert check(tiny, tmp_path, f"--config.data.name=folder:{root}", *evals)[0] == 1
    assert not asked
    assert check(tiny, tmp_path, "--config.data.name=folder:gs://bucket/photos", *evals)[0] == 1
    assert check(tiny, tmp_path, "--config.data.name=cifar10", *evals)[0] == 1
    assert asked == ["gs://bucket/photos", "gs://bucket/data"]


def test_evaluation_images_that_fit_are_decoded_once(monkeypatch):
    source, reads = memory_source(noise(20)), []
    read = source.read
    source.read = lambda chosen: reads.extend(chosen) or read(chosen)
    host = pipeline.eval_pipeline(eval_config(), source, np.arange(8), 8, SIDE, "error")
    size = 24 * (3 * SIDE**2 + 32)
    cache = eval_cache.EvalCache(1.5 * size / 2**30)
    first, second = cache.batches(host), cache.batches(host)  # the second no longer fits
    next(first())  # left after one batch: nothing is kept of it
    seen = [list(first()), list(first())]
    before = len(reads)
    seen.append(list(first()))
    assert len(reads) == before
    seen.append(list(second()))
    assert len(reads) > before
    for found in seen:
        assert len(found) == 3
        for one, other in zip(found, seen[0], strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


def test_the_slow_stage_is_named_once_each_time_that_waiting_passes_the_limit():
    clock, told = stage_times.StageTimes(), []
    waits = [(0.5, 9, 1), (0.01, 1, 1), (0.2, 1, 9), (0.3, 1, 9)]
    waits += [(0.04, 1, 1), (0.1, 1, 1), (0.0, 1, 1), (0.1, 90, 9)]
    for wait, read, decode in waits:
        clock.add("read", read, 1000)
        clock.add("decode", decode, 1000)
        clock.add("transfer", 0.1, 1000)
        told.append(clock.warning(wait, threads=4))
    assert [bool(text) for text in told] == [False, False, True, False, False, False, False, True]
    assert "20% of the time" in told[2]
    assert "slow stage is decode" in told[2] and "decode 9.00" in told[2]
    assert "slow stage is read" in told[7] and "prepare" in told[7]


def test_the_pipeline_knows_where_its_time_goes():
    source = memory_source(noise(16))
    read = source.read

    def slow(chosen):
        time.sleep(0.02)
        return read(chosen)

    source.read = slow
    host = pipeline.eval_pipeline(eval_config(), source, np.arange(4), 4, SIDE, "error")
    list(host.batches())
    spent = host.stages.take()
    assert spent["read"] >= 20 / 16 and spent["decode"] > 0 and not host.stages.take()
    assert jax.device_count() == 8


@pytest.mark.slow
def test_a_folder_that_changed_ends_a_continued_run(tiny, tmp_path, capsys):
    from vit_jax.train import __main__ as train

    root = make_folder(tmp_path / "data", {"owl": 40, "jay": 40})
    arguments = [
        f"--config={tiny}",
        f"--workdir={tmp_path}/run",
        f"--config.data.name=folder:{root}",
    ]
    arguments += [
        "--config.evals.val.data.name=folder:" + root,
        "--config.evals.val.data.split=train[:8]",
    ]
    assert train.main([*arguments, "--config.total_steps=1"]) == 0
    (tmp_path / "data/owl/000.png").unlink()
    assert train.main([*arguments, "--config.total_steps=1"]) == 2
    assert "is not what it was when the run" in last_error(capsys)
