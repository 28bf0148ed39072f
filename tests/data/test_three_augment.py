"""3-Augment: every operation equals Pillow's, and chance has the right chances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data.augment import three_augment

ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def images(count: int, height: int = 24, width: int = 31) -> np.ndarray:
    """Half of them smooth, half noise."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (count, height, width, 3)).astype(np.uint8)
    smooth = [
        Image.fromarray(image[:4, :5]).resize((width, height), Image.Resampling.BICUBIC)
        for image in noise
    ]
    return np.where(
        np.arange(count)[:, None, None, None] % 2, noise, np.stack([np.asarray(x) for x in smooth])
    )


def operate_with_pillow(image, operation: int, radius: float):
    image = Image.fromarray(image)
    if operation == 0:
        return ImageOps.grayscale(image).convert("RGB")
    return (
        ImageOps.solarize(image)
        if operation == 1
        else image.filter(ImageFilter.GaussianBlur(radius))
    )


def jitter_with_pillow(image, factors, order):
    for which in order:
        image = ENHANCE[which](image).enhance(float(factors[which]))
    return np.asarray(image)


def difference(out, expected) -> np.ndarray:
    assert out.dtype == np.uint8 and out.shape == expected.shape
    return np.abs(np.asarray(out).astype(int) - expected)


def test_grey_and_solarisation_equal_pillow():
    image = images(8)
    for operation, function in enumerate((three_augment.grayscale, three_augment.solarize)):
        expected = np.stack([np.asarray(operate_with_pillow(x, operation, 0)) for x in image])
        np.testing.assert_array_equal(function(jnp.asarray(image)), expected)


@pytest.mark.parametrize("shape", [(24, 31), (3, 2), (1, 1)])
def test_blur_equals_pillow(shape):
    fixed = [
        0.1,
        0.5,
        1.0,
        1.4,
        1.42,
        1.5,
        2.0,
    ]  # the box is wider than three pixels from sqrt(2) on
    radius = np.float32([*fixed, *np.random.default_rng(1).uniform(0.1, 2, 41)])
    image = images(len(radius), *shape)
    out = jax.jit(three_augment.gaussian_blur)(image, radius)
    expected = np.stack(
        [
            np.asarray(operate_with_pillow(x, 2, float(r)))
            for x, r in zip(image, radius, strict=True)
        ]
    )
    off = difference(out, expected)
    assert off.max() <= 1 and (off > 0).mean() < 0.002


@pytest.mark.parametrize("which", range(3))
def test_single_factors_equal_pillow(which):
    image, factors = images(16), np.ones((16, 3), np.float32)
    factors[:, which] = [0.0, 0.5, 1.0, 2.0, *np.random.default_rng(2).uniform(0.7, 1.3, 12)]
    order = np.broadcast_to(np.int32([0, 1, 2]), (16, 3))
    out = jax.jit(three_augment.color_jitter)(image, factors, order)
    triples = zip(image, factors, order, strict=True)
    expected = np.stack([jitter_with_pillow(Image.fromarray(x), f, o) for x, f, o in triples])
    off = difference(out, expected)
    assert off.max() <= 1 and (off > 0).mean() < 0.01
    np.testing.assert_array_equal(out[2], image[2])


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_whole_equals_pillow(jitter):
    image, key = images(48), keys(48)
    out = jax.jit(lambda key, image: three_augment.three_augment(key, image, jitter))(key, image)
    draws = zip(image, *(np.asarray(x) for x in three_augment.choose(key, jitter)), strict=True)
    expected = [
        jitter_with_pillow(operate_with_pillow(x, op, float(r)), f, order)
        for x, op, r, f, order in draws
    ]
    off = difference(out, np.stack(expected))
    assert off.max() <= 3 and (off > 1).mean() < 1e-3  # up to four roundings after each other


def test_choices_have_the_chances_of_deit():
    operation, radius, factors, order = (
        np.asarray(x) for x in three_augment.choose(keys(6000), 0.3)
    )
    orders = (order * [9, 3, 1]).sum(1)
    cells = [
        operation[orders == code]
        for code in sorted(9 * a + 3 * b + c for a, b, c in three_augment.ORDERS)
    ]
    assert (
        scipy.stats.chisquare(np.concatenate([np.bincount(x, minlength=3) for x in cells])).pvalue
        > 1e-3
    )
    assert scipy.stats.kstest(radius, "uniform", (0.1, 1.9)).pvalue > 1e-3
    for which in range(3):
        assert scipy.stats.kstest(factors[:, which], "uniform", (0.7, 0.6)).pvalue > 1e-3
    values = np.column_stack([operation, radius, factors, orders])
    correlation = np.corrcoef(values.T) - np.eye(values.shape[1])
    assert np.abs(correlation).max() < 4 / np.sqrt(len(values))


def test_depends_on_key_and_pixels_only():
    run = jax.jit(lambda key, image: three_augment.three_augment(key, image, 0.3))
    key, image = keys(16), jnp.asarray(images(16))
    whole = np.asarray(run(key, image))
    assert len({out.tobytes() for out in whole}) == 16
    np.testing.assert_array_equal(run(key[:3], image[:3]), whole[:3])
    np.testing.assert_array_equal(run(key[::-1], image[::-1]), whole[::-1])
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = jax.device_put((key, image), sharding)
    np.testing.assert_array_equal(run(*sharded), whole)
    text = run.lower(*sharded).compile().as_text()
    assert not any(
        name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )
