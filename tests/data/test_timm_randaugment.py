"""timm's RandAugment on the device: pixels and choices are those of timm 1.0.31 with Pillow 13."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import scipy.stats
from conftest import below, golden
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data.augment import affine, batch, randaugment, shears, timm_randaugment
from vit_jax.data.augment.timm_randaugment import MOVED, OPS, Policy

GOLDEN, CONFIG = golden("randaug_timm")
CASES = CONFIG["cases"]
FILL = tuple(CONFIG["fill"])
WAYS = [timm_randaugment.one_by_one, timm_randaugment.all_at_once]
DRAWN = below(GOLDEN, "draws")
ALIKE = (*MOVED, "AutoContrast", "Equalize", "Invert", "SolarizeAdd")  # with inc1 and without it
# The share of values that may differ by one level.
TOLERANCE = dict.fromkeys(MOVED, 0.03) | dict(AutoContrast=0.05)


def keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)


def ours(name: str) -> str:
    """The name here of one of timm's operations."""
    return name.removesuffix("Increasing").removesuffix("Rel")


@functools.cache
def jitted(way, policy: Policy):
    return jax.jit(functools.partial(way, policy=policy))


def distorted(way, numbers: list[int], policy: Policy):
    """The two golden images after each of these cases: uint8 [cases, 2, H, W, 3]."""
    chosen = [CASES[number] for number in numbers]
    op = np.repeat([OPS.index(ours(case["op"])) for case in chosen], 2)
    level = np.repeat(np.float32([case["magnitude"] for case in chosen]), 2)
    sign = np.repeat([-1 if case["negative"] else 1 for case in chosen], 2)
    image = np.tile(GOLDEN["image"], (len(chosen), 1, 1, 1))
    out = jitted(way, policy)(image, op, level, sign)
    return np.asarray(out).reshape(len(chosen), *GOLDEN["image"].shape)


@pytest.mark.parametrize(
    ("way", "bicubic", "increasing"), [(WAYS[0], True, True), (WAYS[1], False, False)]
)
def test_pixels_are_those_of_timm(way, bicubic, increasing):
    """Within one level: of moved images where float32 decides a truncation (many translations by a
    share of 18 and 22 pixels interpolate to whole numbers), of autocontrast where Pillow's scale is
    not exact. All else is equal.
    """

    def belongs(case) -> bool:
        if case.get("bicubic", bicubic) != bicubic:
            return False
        return ours(case["op"]) in ALIKE or case["op"].endswith("Increasing") == increasing

    numbers = [number for number, case in enumerate(CASES) if belongs(case)]
    assert {ours(CASES[number]["op"]) for number in numbers} == set(OPS)
    found = distorted(way, numbers, Policy(10.0, 0.0, increasing, FILL, bicubic))
    for number, out in zip(numbers, found, strict=True):
        case = CASES[number]
        off = np.abs(out.astype(int) - GOLDEN["output"][number])
        share = TOLERANCE.get(ours(case["op"]), 0)
        assert off.max() <= (share > 0) and (off > 0).mean() <= share, case


@pytest.mark.parametrize(
    ("bicubic", "shape", "count"),
    [
        (True, (90, 40), 10),
        pytest.param(True, (2, 1), 10, marks=pytest.mark.slow),
        pytest.param(False, (224, 224), 10, marks=pytest.mark.slow),
    ],
)
def test_shears_find_what_gathers_find(bicubic, shape, count):
    """Of all maps up to the largest. Of a flat image exactly: no pixel is missed, whose weight
    would be missing, and the error of a sum of weights never becomes a level. The largest
    translations are by a fifth of a pixel, so that many values of noise are whole numbers.
    """
    height, width = shape
    op = np.arange(count) % len(MOVED)
    level = np.linspace(10, 0, count).astype(np.float32)
    level[: 2 * len(MOVED)] = 10  # both signs of the largest
    sign = np.where(np.arange(count) // len(MOVED) % 2, -1, 1)
    by = timm_randaugment.moves(op, level, sign, height, width)
    x, y = affine.positions(by, height, width)
    inside = np.asarray((x >= 0) & (x < width) & (y >= 0) & (y < height))
    ways = [
        jax.jit(functools.partial(way.interpolate, bicubic=bicubic)) for way in (affine, shears)
    ]
    flat = jnp.broadcast_to(jnp.array([1, 128, 255], jnp.uint8), (count, *shape, 3))
    for image, most in ((noise(count, *shape), 0.05), (flat, 0.0)):
        one, other = (np.asarray(randaugment.as_uint8(way(image, by))) for way in ways)
        off = np.abs(one.astype(int) - other)[inside]
        assert off.max() <= (most > 0) and (off > 0).mean() <= most


def test_tpus_gather_nothing_and_devices_send_nothing():
    """On a TPU a gather costs per index, and each image would have its own."""
    policy = Policy(9.0)
    op, level, sign = timm_randaugment.choose(keys(8), policy)
    image = jnp.asarray(noise(8, 6, 7))
    run = jax.jit(functools.partial(timm_randaugment.moved, policy=policy))
    traced = run.trace(image, op, level, sign)
    has = [
        "gather" in traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu")
    ]
    assert has == [False, True]
    mesh = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    by = timm_randaugment.moves(op, level, sign, 6, 7)
    arrays = jax.device_put((image, by), mesh)
    for way in (affine, shears):
        compiled = jax.jit(functools.partial(way.interpolate, bicubic=False)).lower(*arrays)
        text = compiled.compile().as_text()
        sent = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        assert not any(name in text for name in sent)


def test_no_bit_is_kept_at_the_end_of_the_magnitudes():
    """Pillow 13 refuses it; before, the image became black."""
    image = jnp.asarray(noise(1, 5, 6))
    for increasing, level in ((True, 10.0), (False, 0.0)):
        policy = Policy(10.0, increasing=increasing)
        assert not timm_randaugment.posterize(image, jnp.array([level]), None, policy).any()


def test_arguments_are_rounded_as_in_double_precision():
    level = np.arange(0, 11)
    for largest in (4, 110, 256):
        wanted = [int(magnitude / 10 * largest) for magnitude in level]
        found = timm_randaugment.whole(jnp.float32(level), largest)
        np.testing.assert_array_equal(found, wanted)


def test_choices_are_distributed_as_timms():
    """Of rand-m9-mstd0.5-inc1: operations, magnitudes with those that are clipped, and signs."""
    policy = Policy(9.0, 0.5, increasing=True)
    op, level, sign = (np.asarray(x) for x in timm_randaugment.choose(keys(12_000), policy))
    names = np.array([*OPS, ""])
    theirs = np.array([ours(name) for name in DRAWN["op"].tolist()])
    counts = [[(one == name).sum() for name in names] for one in (names[op], theirs)]
    assert scipy.stats.chi2_contingency(counts).pvalue > 1e-3
    assert (
        scipy.stats.chisquare(counts[0], 12_000 * np.float64([1 / 30] * 15 + [0.5])).pvalue > 1e-3
    )
    wanted = DRAWN["magnitude"][~np.isnan(DRAWN["magnitude"])]
    assert scipy.stats.ks_2samp(level, wanted).pvalue > 1e-3
    assert (level == 10).mean() == pytest.approx((wanted == 10).mean(), abs=0.015)
    assert 0 < (level == 10).mean() < 0.05
    # Signs are independent of the rest, and of the operation in particular.
    table = np.histogram2d(op, sign, (np.arange(17) - 0.5, (-2, 0, 2)))[0]
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-3
    positive = (sign > 0).mean()
    assert positive == pytest.approx(0.5, abs=0.02)
    moves = DRAWN["sign"][DRAWN["sign"] != 0]
    assert (moves > 0).mean() == pytest.approx(0.5, abs=0.06)


def test_without_a_deviation_the_magnitude_is_the_same_for_all():
    _, level, _ = timm_randaugment.choose(keys(50), Policy(9.0))
    assert (np.asarray(level) == 9).all()
    _, level, _ = timm_randaugment.choose(keys(50), Policy(15.0))
    assert (np.asarray(level) == 10).all()


@pytest.mark.slow
def test_depends_on_key_and_pixels_only(monkeypatch):
    """The choice of a few images, whatever batch they are in; and some have no operation."""
    monkeypatch.setattr(timm_randaugment, "operate", WAYS[1])
    policy = Policy(9.0, 0.5, increasing=True)
    run = jax.jit(lambda key, image: timm_randaugment.timm_randaugment(key, image, 1, policy))
    key = keys(24)
    image = jnp.asarray(noise(24, 12, 16))
    out = np.asarray(run(key, image))
    unchanged = (out == image).all((1, 2, 3)).mean()
    assert 0.25 < unchanged < 0.75
    np.testing.assert_array_equal(run(key[::-1], image[::-1]), out[::-1])


@pytest.mark.slow
def test_both_ways_are_equal_for_an_odd_size():
    policy = Policy(9.0, 0.5, increasing=True, fill=FILL)
    image = jnp.asarray(noise(64, 2, 31))
    op, level, sign = timm_randaugment.choose(keys(64), policy)
    one, other = (jitted(way, policy)(image, op, level, sign) for way in WAYS)
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_layers_choose_independently(monkeypatch):
    def number(image, op, level, sign, policy):
        return (image * 16 + op[:, None, None, None]).astype(jnp.uint8)

    monkeypatch.setattr(timm_randaugment, "operate", number)
    image = jnp.zeros([8192, 1, 1, 3], jnp.uint8)
    outs = timm_randaugment.timm_randaugment(keys(8192), image, 2, Policy(9.0))
    pairs = np.bincount(np.asarray(outs)[:, 0, 0, 0], minlength=256).reshape(16, 16)
    one = np.array([1 / 30] * 15 + [0.5])
    assert scipy.stats.chisquare(pairs.ravel(), 8192 * np.outer(one, one).ravel()).pvalue > 1e-3


def test_the_config_chooses_it(monkeypatch):
    """With its magnitude, deviation, interpolation, and the mean of the pixels as the fill."""
    given = []
    monkeypatch.setattr(
        batch.timm_randaugment, "timm_randaugment", lambda key, image, *more: given.append(more)
    )
    data = dict(crop="inception", method="bicubic_pillow", flip=False, randaug_layers=3)
    data |= dict(
        randaug_ops="timm_inc", randaug_magnitude=9.0, randaug_std=0.5, three_augment=False
    )
    seed = np.zeros((2, 2), np.int32)
    for changes in ({}, dict(randaug_ops="timm", method="bilinear")):
        chosen = ml_collections.ConfigDict(data | changes)
        batch.augment_pixels(chosen, noise(2, 4, 4), seed, (0.485, 0.456, 0.406))
    wanted = Policy(9.0, 0.5, True, (124, 116, 104), True)
    other = dataclasses.replace(wanted, increasing=False, bicubic=False)
    assert given == [(3, wanted), (3, other)]
