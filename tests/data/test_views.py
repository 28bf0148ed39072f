"""The views of an image for DINO: which windows, which pixels, and that batches of them are a pure
function of (config, seed, step) as all batches are.
"""

import json

import jax
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from conftest import golden
from nasty import encoded, photos
from PIL import Image
from test_pipeline import joined, memory_source, mesh_of

from vit_jax import config as configs
from vit_jax.data import __main__ as command
from vit_jax.data import pipeline, shapes, to_device, views
from vit_jax.data.augment import views as augment_views
from vit_jax.data.augment.batch import VIEWS, keys
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError

SIDE = 24
LOCAL = 12
SETTINGS = {
    "objective": "dino",
    "image_size": SIDE,
    "data.views.local_size": LOCAL,
    "data.views.local_count": 3,
    "data.batch_size": 4,
}
SEEDS = np.random.default_rng(0).integers(-(2**31), 2**31, (1000, 2)).astype(np.int32)


def dino_config(**more):
    return configs.from_values(SETTINGS | {name.replace("__", "."): x for name, x in more.items()})


def batches(source, config, start=0, stop=3, rows=None) -> list[dict]:
    rows = np.arange(config.data.batch_size) if rows is None else np.asarray(rows)
    return list(pipeline.train_pipeline(config, source, rows, stop).batches(start))


def photo_source(count: int = 8):
    return memory_source(np.stack([np.asarray(photo) for photo in photos(count)]))


def drawn(config, height: int, width: int) -> np.ndarray:
    """(y, x, height, width) of all views of an image for all SEEDS, [seeds, views, 4]."""

    def of_seed(seed):
        return views.boxes(config.data.views, tf.constant([height, width, 3]), seed)

    return tf.function(lambda: tf.map_fn(of_seed, SEEDS, tf.int32))().numpy()


def test_windows_have_the_areas_that_the_config_says():
    """All sizes fit into a square image if its share is less than 3 / 4, so that none is drawn
    anew: then share and logarithm of the aspect ratio are uniform.
    """
    config = dino_config(data__views__global_area=(0.32, 0.7))
    found = drawn(config, 3000, 3000).astype(float)
    assert found.shape == (len(SEEDS), 5, 4)
    for view, (low, high) in enumerate(2 * [(0.32, 0.7)] + 3 * [(0.05, 0.32)]):
        y, x, h, w = found[:, view].T
        share = h * w / 3000**2
        ratio = np.log(w / h) / np.log(4 / 3)
        where = (y / (3000 - h), x / (3000 - w))
        assert scipy.stats.kstest(share, "uniform", (low, high - low)).pvalue > 1e-3
        assert scipy.stats.kstest(ratio, "uniform", (-1, 2)).pvalue > 1e-3
        assert min(scipy.stats.kstest(part, "uniform").pvalue for part in where) > 1e-3
    correlation = np.corrcoef(found.reshape(len(SEEDS), -1)[:, 2:].T)[0]
    assert np.abs(correlation[[2 + 4 * i for i in range(4)]]).max() < 4 / np.sqrt(len(SEEDS))


def test_windows_of_any_image_are_inside():
    config = dino_config()
    for height, width in ((1, 1), (1, 9), (40, 500)):
        found = drawn(config, height, width)
        assert found.min() >= 0 and found[..., 2:].min() >= 1
        assert ((found[..., :2] + found[..., 2:]).max((0, 1)) <= (height, width)).all()


def test_crops_are_those_of_torchvision():
    """Against functional.resized_crop of torchvision 0.29.1, bicubic, on PIL images: number 0 is
    noise, whose interpolation overshoots, and number 2 is smooth.
    """
    data, _ = golden("views_torchvision")
    for number, side in ((0, 16), (2, 24)):
        image = tf.constant(data["image"][number])
        for window, wanted in zip(data["windows"], data[f"crops_of_{number}"], strict=True):
            found = views.crop(image, tf.constant(window, tf.int32), side).numpy()
            off = np.abs(found.astype(int) - wanted)
            assert off.max() <= (1 if number else 10) and off.mean() < 0.3


def test_views_are_crops_of_the_upright_image():
    (photo,) = photos(1)
    turned = encoded(photo.transpose(Image.Transpose.ROTATE_90), "PNG", orientation=6)
    config = dino_config()
    make = views.train_views(config)
    seed = tf.constant(SEEDS[0])
    one, other = (make(tf.constant(x), seed, True) for x in (turned, encoded(photo, "PNG")))
    boxes = views.boxes(config.data.views, tf.constant([photo.height, photo.width, 3]), seed)
    sides = 2 * [SIDE] + 3 * [LOCAL]
    for number, (box, side) in enumerate(zip(boxes.numpy(), sides, strict=True)):
        y, x, h, w = box.tolist()
        cut = photo.crop((x, y, x + w, y + h))
        wanted = np.asarray(cut.resize((side, side), Image.Resampling.BICUBIC)).astype(int)
        for found in (one, other):
            view = found["image"][number] if number < 2 else found["local"][number - 2]
            off = np.abs(view.numpy() - wanted)
            assert off.max() <= 4 and off.mean() < 0.5


def test_batches_are_a_function_of_seed_and_step():
    source = photo_source()
    whole = batches(source, dino_config(), stop=4)
    resumed = batches(source, dino_config(), start=3, stop=4)[0]
    parts = [batches(source, dino_config(), stop=1, rows=rows)[0] for rows in ((0, 1), (2, 3))]
    other = batches(source, dino_config(seed=1), stop=1)[0]
    for name, shape in dict(image=(4, 2, SIDE, SIDE, 3), local=(4, 3, LOCAL, LOCAL, 3)).items():
        assert all(batch[name].shape == shape for batch in whole)
        np.testing.assert_array_equal(resumed[name], whole[3][name])
        np.testing.assert_array_equal(joined(parts, name), whole[0][name])
        assert (other[name] != whole[0][name]).any()
    few = batches(source, dino_config(data__views__local_count=0), stop=1)[0]
    assert "local" not in few
    np.testing.assert_array_equal(few["image"], whole[0]["image"])
    pixels = {
        view.tobytes()
        for batch in whole  # two epochs
        for name in ("image", "local")
        for view in batch[name].reshape(-1, *batch[name].shape[2:])
    }
    assert len(pixels) == 4 * 4 * 5


def test_images_of_one_pixel(tmp_path):
    for i in range(4):
        path = tmp_path / f"photos/{'ab'[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1, 1), (10 * i, 20, 30)).save(path)
    source = sources.open_source(f"folder:{tmp_path / 'photos'}", "train")
    (batch,) = batches(source, dino_config(), stop=1)
    for name in ("image", "local"):
        red = batch[name][..., 0].reshape(4, -1)
        np.testing.assert_array_equal(red.min(1), red.max(1))
        assert sorted(red[:, 0].tolist()) == [0, 10, 20, 30]


def test_damage_is_skipped_or_named():
    source = photo_source(4)
    source.files[2] = b"this is no image"
    (batch,) = batches(source, dino_config(data__on_corrupt="skip"), stop=1)
    assert batch["mask"].tolist() == [float(i != 2) for i in batch["id"]]
    for name, shape in shapes.of_training(dino_config()).items():
        assert batch[name].shape[1:] == shape
        black = (batch[name] == 0).reshape(4, -1).all(1)
        np.testing.assert_array_equal(black, batch["mask"] == 0)
    with pytest.raises(UserError, match="picture number 2 can't be read"):
        batches(source, dino_config())


def test_views_reach_the_devices_in_the_shapes_that_are_declared():
    config = dino_config(data__batch_size=8)
    mesh = mesh_of(data=8)
    rows = np.arange(8)
    host = pipeline.train_pipeline(config, photo_source(), rows, 1)
    (placed,) = to_device.to_device(host.batches(), mesh, rows, 8, 1)
    declared = to_device.abstract_batch(mesh, 8, shapes.of_training(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), placed) == jax.tree.map(
        lambda x: (x.shape, x.dtype), declared
    )
    assert shapes.num_bytes(host.shapes) == 3 * (2 * SIDE**2 + 3 * LOCAL**2)


def arguments(folder, *more: str) -> list[str]:
    """Overrides for DINO on twelve photos, which are written to `folder`."""
    for i, photo in enumerate(photos(12)):
        path = folder / f"{'ab'[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.save(path)
    values = SETTINGS | {"data.name": f"folder:{folder}", "evals.val.type": "knn"}
    given = [f"--config.{name}={value}" for name, value in values.items()]
    return given + [f"--config.{text}" for text in more]


def test_show_lists_every_view(tiny, tmp_path, capsys):
    out = tmp_path / "show.json"
    given = arguments(tmp_path / "photos")
    assert command.main(["show", f"--config={tiny}", "--step=1", f"--json={out}", *given]) == 0
    shown = json.loads(out.read_text())
    config = configs.load(str(tiny), given)
    source = sources.open_training(config.data)
    batch = batches(source, config, start=1, stop=2)[0]
    assert shown["ids"] == batch["id"].tolist()
    chosen = augment_views.choose(keys(batch["seed"], VIEWS), 5)
    assert shown["flip"] == chosen["flip"].tolist()
    for seed, crops in zip(batch["seed"], shown["crop"], strict=True):
        wanted = views.boxes(config.data.views, tf.constant([64, 96, 3]), tf.constant(seed))
        assert crops == wanted.numpy().tolist()
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * 5


def test_check_draws_every_view(tiny, tmp_path):
    given = arguments(tmp_path / "photos", "evals.val.data.split=train")
    assert command.main(["check", f"--config={tiny}", f"--out={tmp_path}", "--scan", *given]) == 0
    (sheet,) = tmp_path.glob("train_*.png")
    with Image.open(sheet) as drawn_sheet:
        assert drawn_sheet.size[0] == 5 * 100  # a row is an example


@pytest.mark.parametrize(
    "given, message",
    [
        ({"data.views.global_area": (0.5,)}, "data.views.global_area=.* must be the smallest"),
        ({"data.views.local_area": (0.4, 0.3)}, "must be the smallest and the largest share"),
        ({"data.crop": "inception"}, "data.crop .* has no effect with objective=dino"),
        ({"data.area_min": 0.1}, "data.area_min .* has no effect with objective=dino"),
        ({"data.erase": 0.1}, "data.erase .* has no effect with objective=dino"),
        ({"objective": "mae"}, "has no effect with objective=mae: .* choose objective=dino"),
    ],
)
def test_keys_that_do_not_fit_are_errors(given, message):
    with pytest.raises(UserError, match=message):
        configs.from_values(SETTINGS | given)
