"""Image operations give the pixels that big_vision and vision_transformer publish, and random
choices have the right probabilities.
"""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from conftest import below, golden

from vit_jax.data import image_ops, images

BIG_VISION, CONFIG = golden("pp_bigvision")
VIT_JAX, VIT_JAX_CONFIG = golden("pp_vitjax")
MEAN = np.array([0.485, 0.456, 0.406])  # of ImageNet, as in torchvision
STD = np.array([0.229, 0.224, 0.225])
CASES = {case["key"]: case for case in CONFIG["cases"] if case["op"] != "resize_long(64)"}


def normalised(image):
    return image_ops.value_range(image, -1, 1)


# big_vision's preprocessing strings, and the same by our functions.
OURS = {
    "resize(48)": lambda image: image_ops.resize(image, 48),
    "resize((40, 56))": lambda image: image_ops.resize(image, (40, 56)),
    "resize(48, antialias=True)": lambda image: image_ops.resize(image, 48, antialias=True),
    'resize(48, method="bicubic")': lambda image: image_ops.resize(image, 48, "bicubic"),
    'resize(48, method="bicubic", antialias=True)': lambda image: image_ops.resize(
        image, 48, "bicubic", True
    ),
    'resize(48, method="area")': lambda image: image_ops.resize(image, 48, "area"),
    'resize(48, method="lanczos3", antialias=True)': lambda image: image_ops.resize(
        image, 48, "lanczos3", True
    ),
    "resize(48) on float32 image": lambda image: image_ops.resize(tf.cast(image, tf.float32), 48),
    "resize_small(64)": lambda image: image_ops.resize_small(image, 64),
    "resize_small(24)": lambda image: image_ops.resize_small(image, 24),
    'resize_small(64, method="bilinear")': lambda image: image_ops.resize_small(
        image, 64, "bilinear"
    ),
    'resize_small(24, method="bilinear", antialias=True)': lambda image: image_ops.resize_small(
        image, 24, "bilinear", True
    ),
    'resize_small(24, method="lanczos3", antialias=True)': lambda image: image_ops.resize_small(
        image, 24, "lanczos3", True
    ),
    "central_crop()": image_ops.central_crop,
    "central_crop(24)": lambda image: image_ops.central_crop(image, 24),
    "central_crop((20, 31))": lambda image: image_ops.central_crop(image, (20, 31)),
    "value_range(-1, 1)": lambda image: image_ops.value_range(image, -1, 1),
    "value_range(0, 1)": lambda image: image_ops.value_range(image, 0, 1),
    "value_range(-1, 1, 20, 200, True)": lambda image: image_ops.value_range(
        image, -1, 1, 20, 200, True
    ),
    "vgg_value_range": lambda image: image_ops.value_range(
        image, 0, 1, 255 * MEAN, 255 * (MEAN + STD)
    ),
    "resize_small(64)|central_crop(56)|value_range(-1, 1)": lambda image: normalised(
        image_ops.central_crop(image_ops.resize_small(image, 64), 56)
    ),
    "resize(48)|value_range(-1, 1)": lambda image: normalised(image_ops.resize(image, 48)),
}


def assert_as_published(found, wanted, float_tolerance=1e-5):
    """Floats in [-1, 1] within 1e-5. uint8 within one level, in few places: where the last bit
    decides a truncation.
    """
    found = found.numpy()
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    difference = np.abs(found.astype(np.float64) - wanted)
    if wanted.dtype == np.uint8:
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02
    else:
        assert difference.max() <= float_tolerance


@pytest.mark.parametrize("op", OURS)
def test_as_published_by_big_vision(op):
    cases = [case for case in CASES.values() if case["op"] == op]
    assert cases
    for case in cases:
        # A float image keeps its scale of 0 to 255, where the same relative error is a hundred
        # times larger.
        tolerance = 1e-3 if op.endswith("on float32 image") else 1e-5
        found = OURS[op](tf.constant(BIG_VISION[f"img/{case['image']}"]))
        assert_as_published(found, BIG_VISION[case["key"]], tolerance)


def test_every_published_case_is_used():
    boxed = [case for case in CASES.values() if case["op"] not in OURS]
    assert len(CASES) == 71 and len(boxed) == 3
    assert all(key.startswith("out/inception_fixed_") for case in boxed for key in [case["key"]])
    assert len(VIT_JAX_CONFIG["cases"]) == 4 + 3 + 3  # the two tests of vision_transformer below


def test_values_are_clipped_only_when_asked_to():
    image = tf.constant(BIG_VISION["img/c"])
    free, clipped = image_ops.value_range(image, -1, 1, 20, 200).numpy(), BIG_VISION["out/18/c"]
    assert free.min() < -1 and free.max() > 1
    np.testing.assert_allclose(np.clip(free, -1, 1), clipped, atol=1e-5)


def test_overshoot_of_bicubic_is_clipped():
    chessboard = np.kron(np.indices((4, 4)).sum(0) % 2 * 255, np.ones((4, 4)))
    image = chessboard[:, :, None].astype(np.uint8)
    free = tf.image.resize(tf.cast(image, tf.float32), (40, 40), "bicubic").numpy()
    assert free.min() < -5 and free.max() > 260
    found = image_ops.resize(tf.constant(image), 40, "bicubic").numpy()
    np.testing.assert_array_equal(found, np.clip(free, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", [(9, 9), (64, 64), (48, 80), (101, 7)])
def test_bilinear_tf1_is_that_of_tensorflow_1(size):
    """Its images are float32: ours have the nearest values of uint8."""
    for name in below(BIG_VISION, "img"):
        image = tf.constant(BIG_VISION[f"img/{name}"])
        published = tf.compat.v1.image.resize(image, size).numpy()
        found = image_ops.resize(image, size, "bilinear_tf1")
        assert found.dtype == tf.uint8
        np.testing.assert_array_equal(found, np.round(published))
        floats = image_ops.resize(tf.cast(image, tf.float32), size, "bilinear_tf1")
        np.testing.assert_array_equal(floats, published)
        small = image_ops.resize_small(image, size[0], "bilinear_tf1")
        whole = tf.compat.v1.image.resize(image, small.shape[:2]).numpy()
        np.testing.assert_array_equal(small, np.round(whole))


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_windows_are_resized_as_by_torchvision(kind):
    """Against functional.resized_crop of torchvision 0.29.1 on PIL images, to larger and to smaller
    sizes. Pillow rounds after each axis; what of noise goes beyond 0 and 255 then, it clips.
    """
    data = golden("resize_torchvision")[0]
    image = tf.constant(data["image"])
    for (y, x, h, w), wanted in zip(data["windows"].tolist(), data[kind], strict=True):
        found = image_ops.resize(image[y : y + h, x : x + w], 16, f"{kind}_pillow")
        off = np.abs(found.numpy().astype(int) - wanted)
        assert off.max() <= dict(bilinear=1, bicubic=10)[kind] and off.mean() < 0.2
        # The published methods have other pixels: these are antialiased, those truncated.
        others = image_ops.resize(image[y : y + h, x : x + w], 16, **images.resizing(kind))
        assert (h, w) == (16, 16) or (others.numpy() != wanted).mean() > 0.3


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
def test_floats_keep_their_fractions(kind):
    image = tf.constant(golden("resize_torchvision")[0]["image"])
    found = image_ops.resize_small(image, 24, f"{kind}_pillow").numpy()
    floats = image_ops.resize_small(tf.cast(image, tf.float32), 24, f"{kind}_pillow").numpy()
    assert (found.dtype, floats.dtype) == (np.uint8, np.float32)
    assert 0 < np.abs(floats.clip(0, 255) - found).max() <= 0.5001


@pytest.mark.parametrize("number", [0, 1, 2])
def test_inception_crop_of_a_given_box(monkeypatch, number):
    (case,) = (
        case for key, case in CASES.items() if key.startswith(f"out/inception_fixed_{number}")
    )
    top, left, height, width = case["box"]
    image = tf.constant(BIG_VISION[f"img/{case['image']}"])
    box = tf.constant([top, left, 0]), tf.constant([height, width, -1])
    monkeypatch.setattr(image_ops, "inception_box", lambda shape, seed, area: box)
    found = image_ops.inception_crop(
        image, case["size"], tf.constant([0, 0]), antialias=case["antialias"]
    )
    assert_as_published(found, BIG_VISION[case["key"]])


@pytest.mark.parametrize("name", "abcd")
def test_as_published_by_vision_transformer_evaluation(name):
    image = tf.cast(VIT_JAX[f"img/{name}"], tf.float32)
    assert_as_published(normalised(image_ops.resize(image, 48)), VIT_JAX[f"get_data/48/{name}"])


@pytest.mark.parametrize("name", "abd")
def test_as_published_by_vision_transformer_preprocess(name):
    image = tf.constant(VIT_JAX[f"img/{name}"])
    levels = 2 / 255 + 1e-5  # one level of uint8, as above
    assert_as_published(
        normalised(image_ops.resize(image, 48)),
        VIT_JAX[f"preprocess_images/48_False/{name}"],
        levels,
    )
    cropped = image_ops.central_crop(image_ops.resize_small(image, 48, "bilinear"), 48)
    assert_as_published(normalised(cropped), VIT_JAX[f"preprocess_images/48_True/{name}"], levels)


SEEDS = tf.constant(np.random.default_rng(0).integers(-(2**31), 2**31, (2000, 2)), tf.int32)


def coordinates(height: int, width: int):
    """An image whose channels are its row and column numbers."""
    return tf.cast(
        tf.stack(tf.meshgrid(tf.range(height), tf.range(width), indexing="ij"), axis=-1), tf.float32
    )


def boxes(height: int, width: int, area) -> np.ndarray:
    """(top, left, height, width) of the crops of all SEEDS, recovered from their pixels.

    Half-pixel bilinear resizing to 2 x 2 reads rows top + h / 4 - 1 / 2 and top + 3 h / 4 - 1 / 2.
    """
    image = coordinates(height, width)
    crops = tf.function(
        lambda: tf.map_fn(lambda s: image_ops.inception_crop(image, 2, s, area), SEEDS, tf.float32)
    )().numpy()
    low, high = crops[:, 0, 0], crops[:, 1, 1]
    size = 2 * (high - low)
    return np.round(np.concatenate([low - size / 4 + 0.5, size], axis=1), 3)


@pytest.mark.parametrize(
    "height, width, low, high", [(300, 400, 0.05, 1.0), (400, 300, 0.05, 1.0), (240, 240, 0.3, 0.6)]
)
def test_inception_boxes_are_in_range(height, width, low, high):
    top, left, h, w = boxes(height, width, (low, high)).T
    for values in (top, left, h, w):
        np.testing.assert_allclose(values, np.round(values), atol=0.02)  # whole pixels
    assert top.min() >= 0 and left.min() >= 0
    assert (top + h).max() <= height and (left + w).max() <= width
    share = h * w / (height * width)
    # Sides are rounded to pixels, by which a side of n changes by 1 / n: here less than 1 / 50.
    assert share.min() > low * 0.96 and share.max() < high * 1.04
    assert (w / h).min() > 3 / 4 * 0.96 and (w / h).max() < 4 / 3 * 1.04
    # All of the allowed range is used, and no corner is preferred.
    assert share.min() < low + 0.05 * (high - low) and share.max() > low + 0.9 * (high - low)
    assert (w / h).min() < 0.78 and (w / h).max() > 1.28
    for start, extent, side in ((top, h, height), (left, w, width)):
        free = side - extent > 8
        where = start[free] / (side - extent[free])
        assert abs(where.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(where))


WINDOWS = below(golden("crop_torchvision")[0], "windows")


def drawn(crop: str, height: int, width: int) -> np.ndarray:
    """(y, x, height, width) of the windows of all SEEDS in an image."""
    box, shape = images.BOXES[crop], tf.constant([height, width, 3])
    return tf.function(
        lambda: tf.map_fn(lambda seed: box(shape, seed, area_min=0.08), SEEDS, tf.int32)
    )().numpy()


def likeness(ours: np.ndarray, theirs: np.ndarray, height: int, width: int) -> float:
    """The smallest p-value of Kolmogorov-Smirnov tests of area, aspect ratio and position."""

    def quantities(windows):
        y, x, h, w = windows.T.astype(float)
        return h * w, np.log(w / h), y[h < height] / (height - h)[h < height], x / (width + 1 - w)

    pairs = zip(quantities(ours), quantities(theirs), strict=True)
    return min(scipy.stats.ks_2samp(*pair).pvalue for pair in pairs)


@pytest.mark.parametrize("shape", WINDOWS)
def test_windows_are_distributed_as_torchvisions(shape):
    """Against 2,000 windows of RandomResizedCrop.get_params of torchvision 0.29.1, scale 0.08 to 1.

    In the longest image, most of ten sizes do not fit, and many windows are the central one.
    """
    height, width = map(int, shape.split("x"))
    theirs = WINDOWS[shape]
    ours = drawn("torchvision", height, width)
    assert likeness(ours, theirs, height, width) > 1e-3
    assert ours.min(0).min() >= 0 and (ours[:, 2:] > 0).all()
    assert ((ours[:, :2] + ours[:, 2:]).max(0) <= (height, width)).all()
    assert likeness(drawn("inception", height, width), theirs, height, width) < 1e-6


def test_where_no_size_fits_the_window_is_torchvisions_central_one():
    """Of an image of 100 x 600: 100 x 133, which the golden windows have most often."""
    modes = []
    for windows in (drawn("torchvision", 100, 600), WINDOWS["100x600"]):
        values, counts = np.unique(windows, axis=0, return_counts=True)
        modes.append((values[counts.argmax()].tolist(), counts.max() / len(windows)))
    assert modes[0][0] == modes[1][0] == [0, 233, 100, 133]
    assert modes[0][1] == pytest.approx(modes[1][1], abs=0.05) and modes[1][1] > 0.2


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 2), (5, 300_000_000)])
def test_every_image_has_a_window(shape):
    for y, x, h, w in drawn("torchvision", *shape)[:50].tolist():
        assert 0 <= y < y + h <= shape[0] and 0 <= x < x + w <= shape[1]


def test_inception_crop_is_a_function_of_its_seed():
    image = coordinates(50, 60)
    one, same, other = (
        image_ops.inception_crop(image, (8, 12), tf.constant(seed))
        for seed in ([3, 4], [3, 4], [3, 5])
    )
    assert one.shape == (8, 12, 2)
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1


def test_flips_have_probability_one_half():
    image = coordinates(2, 3)
    out = tf.function(
        lambda: tf.map_fn(lambda seed: image_ops.flip_lr(image, seed), SEEDS, tf.float32)
    )().numpy()
    flipped = out[:, 0, 0, 1] == 2
    np.testing.assert_array_equal(
        out, np.where(flipped[:, None, None, None], image[:, ::-1], image)
    )
    assert abs(flipped.mean() - 0.5) < 4 * np.sqrt(0.25 / len(SEEDS))


def test_random_crop_takes_every_window_equally_often():
    image = tf.cast(coordinates(6, 9), tf.uint8)
    out = tf.function(
        lambda: tf.map_fn(lambda seed: image_ops.random_crop(image, (4, 6), seed), SEEDS, tf.uint8)
    )().numpy()
    top, left = out[:, 0, 0].T.astype(int)
    windows = np.stack([image[y : y + 4, x : x + 6] for y, x in zip(top, left, strict=True)])
    np.testing.assert_array_equal(out, windows)
    counts = np.histogram2d(top, left, bins=[range(4), range(5)])[0]  # 3 x 4 windows
    assert np.abs(counts - len(SEEDS) / 12).max() < 4 * np.sqrt(len(SEEDS) / 12)


def test_reflect_pad_is_numpys():
    image = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    wanted = np.pad(image, [(4, 4), (4, 4), (0, 0)], mode="reflect")
    np.testing.assert_array_equal(image_ops.reflect_pad(tf.constant(image), 4), wanted)
