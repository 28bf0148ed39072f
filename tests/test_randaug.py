"""RandAugment: single operations equal golden outputs of big_vision's code, and its choices have the right chances."""

import collections
import json
import pathlib

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from vit_jax.data import randaug

with np.load(pathlib.Path(__file__).parent / "golden" / "randaug_ops.npz", allow_pickle=False) as file:
    GOLDEN = dict(file)
CONFIG = json.loads(str(GOLDEN["config"]))
WHOLE = "distort_image_with_randaugment"
GEOMETRIC = {"Rotate": "rotate", "ShearX": "shear_x", "ShearY": "shear_y"}
GEOMETRIC |= {"TranslateX": "translate_x", "TranslateY": "translate_y"}
FUNCTIONS = GEOMETRIC | {"AutoContrast": "autocontrast", "SolarizeAdd": "solarize_add"}  # the others: in small letters
SEED = tf.constant([3, 4])


def function(name: str):
    return getattr(randaug, FUNCTIONS.get(name, name.lower()))


def assert_same(out, expected, geometric: bool, what: str):
    out, expected = np.asarray(out), np.asarray(expected)
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape), what
    differing = (out != expected).any(-1).mean()
    assert differing < 0.005 if geometric else differing == 0, f"{what}: {differing:.2%} of the pixels differ"


def noise(height: int, width: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).integers(0, 256, (height, width, 3)), tf.uint8)


def over_seeds(f, count: int) -> np.ndarray:
    """Stacks f(seed) over `count` seeds, made as the input pipeline makes them."""
    data = tf.data.Dataset.range(count).map(lambda i: f(tf.random.fold_in(SEED, i)), num_parallel_calls=2)
    return next(data.batch(count).as_numpy_iterator())


def assert_uniform(values, cells: int):
    """Chi-square test of ints in [0, cells); the seeds are fixed, so that it passes always or never."""
    assert scipy.stats.chisquare(np.bincount(values, minlength=cells)).pvalue > 1e-3


@pytest.mark.parametrize("op", sorted({case["op"] for case in CONFIG["cases"]} - {WHOLE}))
def test_single_operations_equal_golden(op):
    cases = [case for case in CONFIG["cases"] if case["op"] == op]
    for case in cases:
        args = [case["args"][0], case["center_yx"]] if op == "cutout" else case["args"][:1]  # the rest: the fill value
        out = getattr(randaug, op)(tf.constant(GOLDEN[f"img/{case['image']}"]), *args)
        assert_same(out, GOLDEN[case["key"]], op in GEOMETRIC.values(), case["key"])
    assert len(cases) >= 2


@pytest.mark.parametrize("magnitude", [10, 15])
def test_table_equals_golden_randaugment_in_a_graph(magnitude, monkeypatch):
    monkeypatch.setattr(randaug, "random_sign", lambda seed: tf.constant(1.0))
    monkeypatch.setattr(randaug, "random_centre", lambda image, seed: [13, 13])
    data = tf.data.Dataset.from_tensors(GOLDEN["img/photo0"])
    outs = next(iter(data.map(lambda image: {k: op(image, float(magnitude), SEED) for k, op in randaug.OPS.items()})))
    cases = [case for case in CONFIG["cases"] if case["op"] == WHOLE and case["magnitude"] == magnitude]
    assert [case["forced_op"] for case in cases] == list(randaug.OPS)
    for case in cases:
        name = case["forced_op"]
        assert_same(outs[name], GOLDEN[case["key"]], name in GEOMETRIC, case["key"])


@pytest.mark.parametrize("sign", [1, -1])
def test_arguments_by_magnitude_equal_golden(sign, monkeypatch):
    monkeypatch.setattr(randaug, "random_sign", lambda seed: tf.constant(float(sign)))
    image = tf.constant(GOLDEN["img/photo1"])
    entries = [entry for entry in CONFIG["level_to_arg"] if entry["sign"] == sign]
    for entry in entries:
        name, args = entry["op"], entry["args"]
        if name == "Cutout":
            args = [*args, randaug.random_centre(image, SEED)]
        out = randaug.OPS[name](image, entry["magnitude"], SEED)
        assert_same(out, function(name)(image, *args), name in GEOMETRIC, str(entry))
    assert len(entries) == 2 * len(randaug.OPS)


def test_operations_and_signs_are_uniform(monkeypatch):
    image, count = noise(36, 40), 4096
    names = {}  # output -> (operation, sign); what is none of these is a Cutout
    for sign in (-1.0, 1.0):
        with monkeypatch.context() as patch:
            patch.setattr(randaug, "random_sign", lambda seed, sign=sign: tf.constant(sign))
            for name, op in randaug.OPS.items():
                if name != "Cutout":
                    names[op(image, 3.0, SEED).numpy().tobytes()] = (name, sign if name in GEOMETRIC else 0)
    assert len(names) == 15 + len(GEOMETRIC)
    outs = over_seeds(lambda seed: randaug.randaugment(image, 1, 3.0, seed), count)
    seen = collections.Counter(names.get(out.tobytes(), ("Cutout", 0)) for out in outs)
    cells = [(name, sign) for name in randaug.OPS for sign in ((-1.0, 1.0) if name in GEOMETRIC else (0,))]
    expected = [count / 16 / (2 if sign else 1) for _, sign in cells]
    assert scipy.stats.chisquare([seen[cell] for cell in cells], expected).pvalue > 1e-3


def test_layers_choose_independently(monkeypatch):
    digits = {name: lambda image, m, seed, k=k: image * 16 + k for k, name in enumerate(randaug.OPS)}
    monkeypatch.setattr(randaug, "OPS", digits)
    image = tf.zeros([1, 1, 3], tf.uint8)
    outs = over_seeds(lambda seed: randaug.randaugment(image, 2, 10.0, seed), 4096)
    assert_uniform(outs[:, 0, 0, 0], 256)  # pairs of operations


def test_centre_of_cutout_is_uniform():
    centres = over_seeds(lambda seed: randaug.random_centre(tf.zeros([8, 12, 3]), seed), 4096)
    assert_uniform(centres[:, 0] * 12 + centres[:, 1], 96)


def test_is_a_function_of_the_seed():
    image = noise(36, 40)

    def run():
        return over_seeds(lambda seed: randaug.randaugment(image, 2, 3.0, seed), 64)

    first = run()
    np.testing.assert_array_equal(first, run())
    eager = [randaug.randaugment(image, 2, 3.0, tf.random.fold_in(SEED, tf.constant(i, tf.int64))) for i in range(8)]
    np.testing.assert_array_equal(first[:8], np.stack(eager))
    assert len({out.tobytes() for out in first}) > 48


@pytest.mark.parametrize("shape", [[12, 10, 3], [None, None, 3]])
def test_keeps_shape_and_dtype(shape):
    data = tf.data.Dataset.from_tensors(noise(12, 10)).repeat(40).enumerate()
    data = data.map(lambda i, x: (i, tf.ensure_shape(x[: i + 12, : i + 10], shape)))
    data = data.map(lambda i, x: randaug.randaugment(x, 2, 15.0, tf.random.fold_in(SEED, i)))
    assert data.element_spec == tf.TensorSpec(shape, tf.uint8)
    assert all(out.shape == (12, 10, 3) and out.dtype == np.uint8 for out in data.as_numpy_iterator())


@pytest.mark.parametrize("magnitude", [0.0, 30.0])
def test_extreme_magnitudes(magnitude):
    for image in (noise(1, 1), noise(2, 5)):
        for name, op in randaug.OPS.items():
            out = op(image, magnitude, SEED)
            assert (out.shape, out.dtype) == (image.shape, tf.uint8), name


def test_no_layers_change_nothing():
    image = noise(5, 6)
    np.testing.assert_array_equal(randaug.randaugment(image, 0, 10.0, SEED), image)


@pytest.mark.parametrize(("bits", "kept"), [(0, 1), (1, 1), (3, 3), (8, 8), (9, 1), (12, 1)])
def test_posterize_keeps_upper_bits(bits, kept):
    image = noise(5, 6)
    np.testing.assert_array_equal(randaug.posterize(image, bits), image.numpy() // 2 ** (8 - kept) * 2 ** (8 - kept))
