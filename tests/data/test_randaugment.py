"""RandAugment on the device: operations equal golden outputs of big_vision's code, and chance has
the right chances.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import golden
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image, ImageOps

from vit_jax.data.augment import randaugment

GOLDEN, CONFIG = golden("randaug_ops")
WHOLE = "distort_image_with_randaugment"
SNAKE = {
    "AutoContrast": "autocontrast",
    "SolarizeAdd": "solarize_add",
}  # the others: in small letters
GEOMETRIC = {  # (value, height, width) -> matrix
    "rotate": randaugment.rotation,
    "shear_x": lambda v, h, w: (1, v, 0, 0, 1, 0),
    "shear_y": lambda v, h, w: (1, 0, 0, v, 1, 0),
    "translate_x": lambda v, h, w: (1, 0, v, 0, 1, 0),
    "translate_y": lambda v, h, w: (1, 0, 0, 0, 1, v),
}
SNAKE |= dict(zip(randaugment.MATRICES, GEOMETRIC, strict=True))
WAYS = [randaugment.one_by_one, randaugment.all_at_once]
SIGNED = [(name, False) for name in randaugment.OPS] + [
    (name, True) for name in randaugment.MATRICES
]  # (name, negative)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)


def keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def apply(name: str, image, args, centre=None):
    """One operation by the name that it has in the golden file: uint8 [H, W, 3]."""
    if name in GEOMETRIC:
        matrix = GEOMETRIC[name](args[0], *image.shape[:2])
        return randaugment.unpack(randaugment.project(randaugment.pack(image[None]), matrix))[0]
    args = args[:1]  # without the value that fills
    if name == "cutout":
        args = [args[0], jnp.array([centre])]
    return getattr(randaugment, name)(jnp.asarray(image[None]), *args)[0]


@functools.cache
def jitted(way, magnitude: float):
    return jax.jit(functools.partial(way, m=magnitude))


def every_operation(way, image, magnitude: float, centre=(13, 13)) -> dict:
    """(name, negative) -> the image after that operation alone."""
    op = jnp.array([randaugment.OPS.index(name) for name, _ in SIGNED])
    negative = jnp.array([negative for _, negative in SIGNED])
    images = jnp.asarray(np.broadcast_to(image, (len(SIGNED), *image.shape)))
    outs = jitted(way, magnitude)(
        images, op, negative, jnp.broadcast_to(jnp.array(centre), (len(SIGNED), 2))
    )
    return dict(zip(SIGNED, np.asarray(outs), strict=True))


def assert_same(out, expected, what: str, geometric: bool = False):
    out = np.asarray(out)
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape), what
    differing = (out != expected).any(-1).mean()
    assert differing < 0.005 if geometric else differing == 0, (
        f"{what}: {differing:.2%} of the pixels differ"
    )


@pytest.mark.parametrize("op", sorted({case["op"] for case in CONFIG["cases"]} - {WHOLE}))
def test_single_operations_equal_golden(op):
    cases = [case for case in CONFIG["cases"] if case["op"] == op]
    for case in cases:
        out = apply(op, GOLDEN[f"img/{case['image']}"], case["args"], case.get("center_yx"))
        assert_same(out, GOLDEN[case["key"]], case["key"], op in GEOMETRIC)
    assert len(cases) >= 2


@pytest.mark.parametrize("magnitude", [10, 15])
@pytest.mark.parametrize("way", WAYS)
def test_table_equals_golden_randaugment(way, magnitude):
    outs = every_operation(way, GOLDEN["img/photo0"], magnitude)
    cases = [
        case for case in CONFIG["cases"] if case["op"] == WHOLE and case["magnitude"] == magnitude
    ]
    assert {case["forced_op"] for case in cases} == set(randaugment.OPS) and len(cases) == len(
        randaugment.OPS
    )
    for case in cases:
        name = case["forced_op"]
        assert_same(
            outs[name, False], GOLDEN[case["key"]], case["key"], name in randaugment.MATRICES
        )


def test_optimised_code_rounds_products_before_sums():
    """The other tests run without the compiler's optimisation, so that nothing makes a fused
    multiply-add there.
    """
    base, value = (x.astype(np.uint8)[None, :, :, None] for x in np.indices((256, 256)))
    factors = [randaugment.enhance(m) for m in range(0, 31, 3)]
    run = jax.jit(
        lambda base, value: [randaugment.blend(base, value, factor) for factor in factors],
        compiler_options={"xla_backend_optimization_level": 3},
    )
    away = value.astype(np.float32) - base
    for factor, out in zip(factors, run(base, value), strict=True):
        expected = np.clip(base + np.float32(factor) * away, 0, 255).astype(np.uint8)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("negative", [False, True])
def test_arguments_by_magnitude_equal_golden(negative):
    image = GOLDEN["img/photo1"]
    entries = [entry for entry in CONFIG["level_to_arg"] if (entry["sign"] < 0) == negative]
    for entry in entries:
        name = entry["op"]
        outs = every_operation(randaugment.one_by_one, image, entry["magnitude"])
        expected = np.asarray(apply(SNAKE.get(name, name.lower()), image, entry["args"], (13, 13)))
        out = outs[name, negative and name in randaugment.MATRICES]
        assert_same(out, expected, str(entry), name in randaugment.MATRICES)
    assert len(entries) == 2 * len(randaugment.OPS)


@pytest.mark.parametrize(
    ("magnitude", "shape"), [(0.0, (37, 53)), (30.0, (53, 37)), (0.0, (2, 5)), (30.0, (1, 1))]
)
def test_both_ways_are_equal_at_odd_sizes_and_extreme_magnitudes(magnitude, shape):
    image = noise(*shape)
    one, all_ = (every_operation(way, image, magnitude, (shape[0] // 2, 0)) for way in WAYS)
    for name in SIGNED:
        assert_same(one[name], all_[name], f"{name}")
        assert one[name].shape == image.shape
    if magnitude == 0:
        assert all(
            (one[name] == image).all()
            for name in SIGNED
            if name[0] in [*randaugment.MATRICES, "Cutout"]
        )


def test_both_ways_are_equal_for_many_images():
    images, draws = jnp.asarray(noise(48, 9, 12)), randaugment.choose(keys(48), 9, 12)
    outs = [np.asarray(jitted(way, 5.0)(images, *draws)) for way in WAYS]
    assert_same(outs[0], outs[1], "48 images")


@pytest.mark.parametrize("way", WAYS)
def test_constant_images(way):
    for value in (0, 128, 255):
        image = np.full((8, 6, 3), value, np.uint8)
        outs = every_operation(way, image, 15.0, (3, 3))
        for name in ("AutoContrast", "Equalize", "Color", "Sharpness"):
            np.testing.assert_array_equal(outs[name, False], image)
        np.testing.assert_array_equal(outs["Invert", False], 255 - image)
        assert (outs["TranslateX", False] == randaugment.GREY).all()  # the image moved out of sight


def test_rotation_by_a_right_angle():
    image = noise(7, 7)
    outs = every_operation(randaugment.one_by_one, image, 30.0)
    np.testing.assert_array_equal(outs["Rotate", False], np.rot90(image))
    np.testing.assert_array_equal(outs["Rotate", True], np.rot90(image, -1))


def test_histograms_and_lookups_of_tpu_and_other_devices_are_equal():
    value = noise(2, 700).swapaxes(1, 2)
    table = np.random.default_rng(1).integers(0, 256, (2, 3, 256))
    counts = [[np.bincount(channel, minlength=256) for channel in image] for image in value]
    for histogram in (randaugment.histogram_by_matmul, randaugment.histogram_by_scatter):
        np.testing.assert_array_equal(histogram(jnp.asarray(value)), counts)
    for lookup in (randaugment.lookup_by_matmul, randaugment.lookup_by_gather):
        out = lookup(jnp.asarray(value), jnp.asarray(table))
        np.testing.assert_array_equal(out, np.take_along_axis(table, value.astype(int), -1))


def test_equalize_and_autocontrast_equal_pillow():
    images = [
        noise(40, 40),
        noise(40, 40) // 3 + 50,
        noise(9, 5),
        np.sort(noise(30, 30) ** 2 // 255, axis=0),
    ]
    for image in images:
        expected = np.asarray(ImageOps.equalize(Image.fromarray(image)))
        np.testing.assert_array_equal(apply("equalize", image, []), expected)
        near = np.asarray(ImageOps.autocontrast(Image.fromarray(image))).astype(int)
        assert np.abs(np.asarray(apply("autocontrast", image, [])).astype(int) - near).max() <= 1


def test_products_are_added_with_one_rounding():
    rng = np.random.default_rng(0)
    total = rng.uniform(0, 256, 50_000).astype(np.float32)
    pixel = rng.integers(0, 256, 50_000).astype(np.float32)
    # Sums of multiples of the weights lie on a grid.
    total = np.float32(np.round(total * 2.0**16) / 2**16)
    for weight in (np.float32(1) / np.float32(13), np.float32(5) / np.float32(13)):
        expected = (total.astype(np.float64) + np.float64(weight) * pixel).astype(np.float32)
        np.testing.assert_array_equal(
            jax.jit(lambda t, p, w=weight: randaugment.add_product(t, w, p))(total, pixel), expected
        )


@pytest.mark.parametrize(("bits", "kept"), [(0, 1), (1, 1), (3, 3), (8, 8), (9, 1), (12, 1)])
def test_posterize_keeps_upper_bits(bits, kept):
    image = noise(1, 5, 6)
    step = 2 ** (8 - kept)
    np.testing.assert_array_equal(
        randaugment.posterize(jnp.asarray(image), bits), image // step * step
    )


def test_choices_are_uniform_and_independent():
    op, negative, centre = (np.asarray(x) for x in randaugment.choose(keys(20_000), 6, 10))
    assert centre.dtype == np.int32 and centre.min() == 0 and tuple(centre.max(0)) == (5, 9)
    table = np.zeros((16, 2, 6, 10))
    np.add.at(table, (op, negative.astype(int), centre[:, 0], centre[:, 1]), 1)
    for axes in ((1, 2, 3), (0, 1), (2, 3)):  # operations, centres, operations with signs
        assert scipy.stats.chisquare(table.sum(axes).ravel()).pvalue > 1e-3


def test_layers_choose_independently(monkeypatch):
    def number(image, op, negative, centre, m):
        return (image * 16 + op[:, None, None, None]).astype(jnp.uint8)

    monkeypatch.setattr(randaugment, "operate", number)
    outs = randaugment.randaugment(keys(8192), jnp.zeros([8192, 1, 1, 3], jnp.uint8), 2, 10.0)
    pairs = np.bincount(np.asarray(outs)[:, 0, 0, 0], minlength=256)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-3


def test_operations_and_signs_are_uniform():
    image, count = noise(36, 40), 1536
    names = {
        out.tobytes(): name
        for name, out in every_operation(randaugment.one_by_one, image, 3.0).items()
    }
    del names[next(out for out, name in names.items() if name[0] == "Cutout")]
    assert len(names) == len(SIGNED) - 1  # what is none of these is a Cutout
    run = jax.jit(lambda key, image: randaugment.randaugment(key, image, 1, 3.0))
    outs = np.asarray(run(keys(count), np.broadcast_to(image, (count, *image.shape))))
    seen = collections.Counter(names.get(out.tobytes(), ("Cutout", False)) for out in outs)
    expected = [count / (32 if name in randaugment.MATRICES else 16) for name, _ in SIGNED]
    assert scipy.stats.chisquare([seen[cell] for cell in SIGNED], expected).pvalue > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_depends_on_key_and_pixels_only(way, monkeypatch):
    monkeypatch.setattr(randaugment, "operate", way)
    run = jax.jit(lambda key, image: randaugment.randaugment(key, image, 1, 2.0))
    key, image = keys(16), jnp.asarray(noise(16, 20, 24))
    whole = np.asarray(run(key, image))
    assert (whole != image).any((1, 2, 3)).all() and len({out.tobytes() for out in whole}) >= 14
    np.testing.assert_array_equal(run(key[:4], image[:4]), whole[:4])
    np.testing.assert_array_equal(run(key[::-1], image[::-1]), whole[::-1])
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = jax.device_put((key, image), sharding)
    np.testing.assert_array_equal(run(*sharded), whole)
    if way == randaugment.all_at_once:
        text = run.lower(*sharded).compile().as_text()
        assert not any(
            name in text
            for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        )


def test_no_layers_change_nothing():
    image = jnp.asarray(noise(2, 5, 6))
    np.testing.assert_array_equal(randaugment.randaugment(keys(2), image, 0, 10.0), image)
