"""Images given in Python have the pixels that prediction and evaluation see."""

import io
import subprocess
import sys

import ml_collections
import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

import vit_jax
from vit_jax import config as configs
from vit_jax.data import given_images, pipeline
from vit_jax.data.sources import file_list
from vit_jax.errors import UserError

ORIENTATION = 0x0112  # a tag of EXIF
PUBLISHED = dict(image_size=32)
TIMM = dict(
    image_size=32,
    pixels_of="timm",
    interpolation="bicubic",
    crop=0.875,
    mean=(0.48, 0.46, 0.41),
    std=(0.23, 0.22, 0.26),
)


def model_of(fields: dict):
    return vit_jax.create_model("Ti/16", **fields)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Smooth images of three sizes: JPEG of a turned camera, PNG with grey values, WebP with
    alpha.
    """
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    found = []
    sizes = {"a.jpg": ("RGB", (70, 50)), "b.png": ("L", (40, 90)), "c.webp": ("RGBA", (33, 32))}
    for name, (mode, size) in sizes.items():
        noise = Image.fromarray(rng.integers(0, 256, (6, 6, 4), np.uint8), "RGBA")
        noise.resize(size, Image.Resampling.BICUBIC).convert(mode).save(folder / name, exif=turned)
        found.append(str(folder / name))
    return found


@pytest.mark.parametrize("fields", [PUBLISHED, TIMM], ids=["published", "timm"])
def test_files_have_the_pixels_of_predict(fields, paths):
    model = model_of(fields)
    data = ml_collections.ConfigDict(configs.eval_defaults()["data"])
    _, listing = file_list.load(paths)
    host = pipeline.eval_pipeline(data, listing, np.arange(3), 3, (32, 32), "error", model=model)
    (batch,) = host.batches()
    wanted = np.float32((batch["image"] / 255.0 - model.mean) / model.std)
    image = np.asarray(vit_jax.preprocess(model, paths))
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, wanted, atol=1e-6)
    (found,) = given_images.batches(model, paths, 3)
    np.testing.assert_array_equal(found["image"], batch["image"])


@pytest.mark.parametrize("fields", [PUBLISHED, TIMM], ids=["published", "timm"])
def test_pillow_images_and_arrays_are_prepared_like_lossless_files(fields, paths, tmp_path):
    model = model_of(fields)
    with Image.open(paths[0]) as image:
        pixels = np.asarray(image)
        image = Image.fromarray(pixels)  # without EXIF
        Image.fromarray(pixels).save(tmp_path / "same.png")
        wanted = np.asarray(vit_jax.preprocess(model, tmp_path / "same.png"))
        for given in (image, [image], pixels, pixels[None], [pixels], np.float64(pixels) / 255):
            np.testing.assert_array_equal(vit_jax.preprocess(model, given), wanted)


def test_a_pillow_image_is_turned_as_its_camera_says():
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the top of the scene is at the right of the pixels
    Image.fromarray(pixels).save(file, "png", exif=exif)
    with Image.open(file) as image:
        turned = np.asarray(vit_jax.preprocess(model_of(PUBLISHED), image))
    np.testing.assert_array_equal(turned[0, :, 16:], 1)
    np.testing.assert_array_equal(turned[0, :, :16], -1)


def test_batches_keep_the_order_and_mask_what_fills_the_last(paths):
    model = model_of(PUBLISHED)
    first, last = given_images.batches(model, paths, 2)
    assert first["mask"].tolist() == [1, 1] and last["mask"].tolist() == [1, 0]
    assert last["image"].shape == (2, 32, 32, 3)
    one = np.asarray(vit_jax.preprocess(model, np.array(paths[2:])))
    np.testing.assert_array_equal(model.normalize(last["image"])[:1], one)


def test_weights_of_timm_need_no_tensorflow(paths):
    code = f"""
import sys
sys.modules["tensorflow"] = None
import vit_jax
model = vit_jax.create_model("Ti/16", **{TIMM})
print(vit_jax.preprocess(model, {paths}).shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "(3, 32, 32, 3)", done.stderr


GREY = np.zeros((20, 20), np.uint8)
RGB = np.zeros((20, 20, 3), np.uint8)
WRONG = [
    ([], "the list of images is empty"),
    (np.zeros((0, 20, 20, 3), np.uint8), "the list of images is empty"),
    (RGB.transpose(2, 0, 1), r"images\[0\] has shape \(3, 20, 20\), .* channels come first"),
    ([RGB, GREY], r"images\[1\] has shape \(20, 20\), .* grey: add channels, np.stack"),
    (RGB[..., :1], "it is grey"),
    (np.zeros((1, 20, 20, 4), np.uint8), "alpha channel"),
    (RGB[:0], "give one with pixels"),
    (RGB + 200.0, "floats from 200 to 200: give uint8 from 0 to 255"),
    (RGB - 0.5, "floats from -0.5 to -0.5: .* not normalised"),
    (RGB + np.nan, "floats from nan to nan"),
    (RGB.astype(int), "int64: give uint8"),
    (3, "images of type int can't be read: give paths"),
    (["nowhere.jpg"], "image nowhere.jpg does not exist"),
    ([b"bytes"], r"images\[0\] is of type bytes: give a path"),
]


@pytest.mark.parametrize(("images", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_refused(images, message):
    with pytest.raises(UserError, match=message):
        vit_jax.preprocess(model_of(TIMM), images)


@pytest.mark.parametrize("fields", [PUBLISHED, TIMM], ids=["published", "timm"])
def test_files_that_are_not_images_are_named(fields, paths, tmp_path):
    path = tmp_path / "notes.jpg"
    path.write_text("no image")
    model = model_of(fields)
    with pytest.raises(UserError, match=r"notes.jpg can't be read as an image \([^{\[]*\): remove"):
        vit_jax.preprocess(model, [paths[0], path])
    with pytest.raises(UserError, match="is a folder: give the files in it"):
        vit_jax.preprocess(model, tmp_path)


def test_images_that_can_not_be_read_are_skipped_where_that_is_asked_for(paths, tmp_path):
    bad = tmp_path / "notes.jpg"
    bad.write_text("no image")
    model = model_of(TIMM)
    skipped = {}
    first, last = given_images.batches(model, [bad, *paths], 3, skipped)
    assert first["mask"].tolist() == [0, 1, 1] and last["mask"].tolist() == [1, 0, 0]
    assert not first["image"][0].any()
    (alone,) = given_images.batches(model, paths, 3)
    np.testing.assert_array_equal(first["image"][1:], alone["image"][:2])
    assert list(skipped) == [0] and f"{bad} can't be read as an image" in skipped[0]


def test_an_image_that_is_given_often_is_decoded_once_and_right():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(noise).save(file, "png", exif=exif)
    model = model_of(TIMM)
    with Image.open(io.BytesIO(file.getvalue())) as image:
        wanted = vit_jax.preprocess(model, image)
    with Image.open(io.BytesIO(file.getvalue())) as image:
        found = np.asarray(vit_jax.preprocess(model, [image] * 16))
    np.testing.assert_array_equal(found, np.repeat(wanted, 16, axis=0))
    cut = Image.open(io.BytesIO(file.getvalue()[:5000]))
    with pytest.raises(UserError, match=r"images\[0\] can't be read as an image"):
        vit_jax.preprocess(model, [cut])
