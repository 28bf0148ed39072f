"""`data.decode=fast`: windows of JPEGs at a part of their size, against averages by Pillow."""

import nasty
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from test_photo_formats import ORIENTATIONS, by_pillow, listing
from test_pipeline import SIDE, train, train_config

from vit_jax.data import images, jpeg_window
from vit_jax.errors import UserError

# (y, x, height, width) and the ratio of a window that is resized to SIDE x SIDE, in a picture of
# 180 x 260 pixels. All but the last have whole pixels of the reduced image.
WINDOWS = [
    ((8, 32, 160, 168), 8),
    ((12, 4, 124, 252), 4),
    ((100, 56, 64, 64), 4),
    ((6, 2, 62, 200), 2),
    ((151, 201, 29, 50), 1),
]


def picture(width: int = 260, height: int = 180) -> Image.Image:
    """A smooth picture without any symmetry."""
    small = next(nasty.photos(1, width=13, height=9))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def averages(image: np.ndarray, window: tuple, shape: tuple) -> np.ndarray:
    """A window of an image, reduced by Pillow to the height and width of `shape`."""
    y, x, height, width = window
    box = (x, y, x + width, y + height)
    reduced = Image.fromarray(image).resize(shape[1::-1], Image.Resampling.BOX, box)
    return np.asarray(reduced).astype(int)


@pytest.mark.parametrize(("window", "ratio"), WINDOWS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_window_is_reduced_as_far_as_it_stays_large_enough(window, ratio, mode):
    encoded = nasty.encoded(picture().convert(mode), "JPEG", quality=95)
    found = jpeg_window.fast(encoded, tf.constant(window), side=SIDE).numpy()
    height, width = window[2:]
    assert found.shape == (height // ratio, width // ratio, 3)
    difference = np.abs(found - averages(images.decode(encoded).numpy(), window, found.shape))
    assert difference.mean() < 1 and difference.max() < 12
    if ratio == 1:
        exact = jpeg_window.exact(encoded, tf.constant(window))
        np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("sampling", [0, 1, 2])
def test_the_accurate_transform_is_pillows(sampling):
    """Bit for bit, but for the outermost columns of a window whose colours are stored at half the
    width: 4:4:4 has no such columns, 4:2:2 (1) and 4:2:0 (2) have.
    """
    encoded = nasty.encoded(picture(), "JPEG", quality=80, subsampling=sampling)
    wanted = by_pillow(encoded)
    whole = (0, 0, *wanted.shape[:2])
    np.testing.assert_array_equal(jpeg_window.accurate(encoded, tf.constant(whole)), wanted)
    assert (jpeg_window.exact(encoded, tf.constant(whole)).numpy() != wanted).mean() > 0.2
    y, x, height, width = window = (13, 21, 90, 101)
    found = jpeg_window.accurate(encoded, tf.constant(window)).numpy()
    border = int(sampling > 0)
    inner = slice(border, width - border)
    np.testing.assert_array_equal(found[:, inner], wanted[y : y + height, x : x + width][:, inner])


@pytest.mark.parametrize("crop", ["inception", "simple"])
def test_training_decodes_as_pillow(crop):
    """Whatever the crop, `decode=accurate` is what reads the files; PNG is the same either way."""
    png = nasty.encoded(picture(), "PNG")
    files = [nasty.encoded(picture(), "JPEG", quality=80, subsampling=0), png]
    decoded = nasty.encoded(Image.fromarray(by_pillow(files[0])), "PNG")
    config = train_config(2, crop=crop, decode="accurate")
    found, wanted = (train(listing(given), config, stop=1)[0] for given in (files, [decoded, png]))
    np.testing.assert_array_equal(found["seed"], wanted["seed"])
    np.testing.assert_array_equal(found["image"], wanted["image"])


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_the_window_of_a_turned_image_is_that_of_the_upright_one(orientation):
    encoded = nasty.encoded(picture(), "JPEG", orientation, quality=95)
    upright = by_pillow(encoded)
    config = train_config(1, area_min=0.3, decode="fast")
    box = images.window(config.data, SIDE)
    decode = images.train_decode(config.data, SIDE)
    for number in range(4):
        seed = tf.constant([number, 7])
        found = decode(encoded, seed, True).numpy()
        window = box(tf.constant(upright.shape), seed).numpy().tolist()
        assert SIDE <= min(found.shape[:2]) < min(window[2:]) / 1.9
        # Edges are rounded to pixels of the reduced image; another window would differ by 20.
        assert np.abs(found - averages(upright, window, found.shape)).mean() < 4


@pytest.mark.parametrize("crop", ["inception", "random", "simple"])
def test_training_sees_the_same_crops(crop):
    """Of large JPEGs their averages; of small ones, and of other formats, the same bits."""
    files = [nasty.encoded(picture(), "JPEG", quality=95), nasty.encoded(picture(28, 28), "JPEG")]
    files.append(nasty.encoded(picture(), "PNG"))
    exact, fast = (
        train(listing(files), train_config(3, crop=crop, decode=kind), stop=1)[0]
        for kind in ("exact", "fast")
    )
    np.testing.assert_array_equal(exact["seed"], fast["seed"])
    difference = np.abs(exact["image"].astype(int) - fast["image"]).mean(axis=(1, 2, 3))
    is_large_jpeg = exact["id"] == 0
    assert 0 < difference[is_large_jpeg] < 6
    assert not difference[~is_large_jpeg].any()


def test_a_truncated_jpeg_fails_at_every_ratio():
    encoded = nasty.encoded(picture(), "JPEG")
    config = train_config(1, crop="resize", decode="fast")
    with pytest.raises(UserError, match="can't be read as an image"):
        train(listing([encoded[: len(encoded) * 9 // 10]]), config, stop=1)
