"""`vit_jax.data show` and `check`, the cache of evaluation images, and the warning of a run that waits for data."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import last_error
from PIL import Image
from test_listings import make_folder
from test_pipeline import SIDE, eval_config, memory_source, noise

from vit_jax import augment, preprocess
from vit_jax import config as configs
from vit_jax.data import __main__ as command
from vit_jax.data import eval_cache, images, ops, pipeline, sources, stages


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


# --- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop", ["inception", "random", "simple", "resize"])
def test_show_tells_what_training_reads(crop, tiny, tmp_path, capsys):
    folder = photo_folder(tmp_path / "photos")
    arguments = [f"--config.data.name=folder:{folder}", f"--config.data.crop={crop}", "--config.data.batch_size=8"]
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
            image = ops.resize(image, 9)
        if crop == "simple":
            image = ops.reflect_pad(ops.resize_small(image, 8, **how), 4)
        if crop == "resize":
            image = ops.resize(image, 8)
        wanted = ops.resize(image[y : y + height, x : x + width], 8)
        difference = np.abs(wanted.numpy().astype(int) - batch["image"][number])
        assert difference.max() <= (4 if crop == "inception" else 0)  # a part of a JPEG upsamples its colours alone
    mirrored = augment.flip(preprocess.keys(batch["seed"], preprocess.FLIP), jnp.asarray(batch["image"]))
    for number, flip in enumerate(shown["flip"]):
        wanted = batch["image"][number][:, ::-1] if flip else batch["image"][number]
        np.testing.assert_array_equal(mirrored[number], wanted)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8


def test_show_refuses_a_negative_step(tiny, capsys):
    assert command.main(["show", f"--config={tiny}", "--step=-1"]) == 2
    assert "--step=-1 is negative" in last_error(capsys)


# --- check ------------------------------------------------------------------------------------------------------------


def check(config, tmp_path, *arguments) -> tuple[int, dict]:
    path = tmp_path / "check.json"
    code = command.main(["check", f"--config={config}", f"--json={path}", f"--out={tmp_path}/sheets", *arguments])
    return code, json.loads(path.read_text())


def test_check_tells_what_there_is(tiny, tmp_path):
    code, report = check(tiny, tmp_path)
    assert code == 0 and report["ready"]
    train, val = report["data"]
    assert (train["use"], train["num_examples"], train["num_classes"]) == ("train", 1077, 10)
    assert (val["use"], val["num_examples"]) == ("evals.val", 360)
    assert val["splits"] == dict(train=1077, val=360, test=360)
    batch = next(
        pipeline.eval_pipeline(
            eval_config(), sources.open_source("digits", "val"), np.arange(64), 64, 8, "error"
        ).batches()
    )
    np.testing.assert_allclose(val["mean"], batch["image"].mean((0, 1, 2)) / 255, atol=1e-4)
    for entry in (train, val):
        with Image.open(entry["sheet"]) as sheet:
            assert sheet.size[0] > 8 * 90


def test_check_names_what_is_missing_and_goes_on(tiny, tmp_path, capsys):
    started = time.monotonic()
    code, report = check(tiny, tmp_path, "--config.data.name=cifar10", f"--config.data.data_dir={tmp_path}")
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


# --- cache ------------------------------------------------------------------------------------------------------------


def test_evaluation_images_that_fit_are_decoded_once(monkeypatch):
    source, reads = memory_source(noise(20)), []
    counted = source.__class__(**{**vars(source), "read": lambda chosen: reads.extend(chosen) or source.read(chosen)})
    host = pipeline.eval_pipeline(eval_config(), counted, np.arange(8), 8, SIDE, "error")
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


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_the_slow_stage_is_named_once_each_time_that_waiting_passes_the_limit():
    clock, told = stages.Stages(), []
    waits = (0.5, 9, 1), (0.01, 1, 1), (0.2, 1, 9), (0.3, 1, 9), (0.04, 1, 1), (0.1, 1, 1), (0.0, 1, 1), (0.1, 90, 9)
    for wait, read, decode in waits:
        clock.add("read", read, 1000)
        clock.add("decode", decode, 1000)
        clock.add("transfer", 0.1, 1000)
        told.append(clock.warning(wait, threads=4))
    assert [bool(text) for text in told] == [False, False, True, False, False, False, False, True]
    assert "20% of the time" in told[2] and "slow stage is decode" in told[2] and "decode 9.00" in told[2]
    assert "slow stage is read" in told[7] and "prepare" in told[7]


def test_the_pipeline_knows_where_its_time_goes():
    source = memory_source(noise(16))

    def slow(chosen):
        time.sleep(0.02)
        return source.read(chosen)

    slowed = source.__class__(**{**vars(source), "read": slow})
    host = pipeline.eval_pipeline(eval_config(), slowed, np.arange(4), 4, SIDE, "error")
    list(host.batches())
    spent = host.stages.take()
    assert spent["read"] >= 20 / 16 and spent["decode"] > 0 and not host.stages.take()
    assert jax.device_count() == 8


def test_a_folder_that_changed_ends_a_continued_run(tiny, tmp_path, capsys):
    from vit_jax import train

    root = make_folder(tmp_path / "data", {"owl": 40, "jay": 40})
    arguments = [f"--config={tiny}", f"--workdir={tmp_path}/run", f"--config.data.name=folder:{root}"]
    arguments += ["--config.evals.val.data.name=folder:" + root, "--config.evals.val.data.split=train[:8]"]
    assert train.main([*arguments, "--config.total_steps=1"]) == 0
    (tmp_path / "data/owl/000.png").unlink()
    assert train.main([*arguments, "--config.total_steps=1"]) == 2
    assert "is not what it was when the run" in last_error(capsys)
