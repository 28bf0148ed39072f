"""Initial parameters are distributed as those of timm 1.0.31, leaf by leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import below, golden

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import timm_init
from vit_jax.weights.formats import timm as timm_format
from vit_jax.weights.scan_layout import flatten

GOLDEN, SIZES = golden("init_timm")
MAP = dict(pool="map", registers=4, layer_scale=1e-4)
WIDTH = 192


@functools.cache
def make_init(**fields):
    model = vit_jax.create_model("Ti/16", **SIZES, **fields)
    return jax.jit(lambda key: model.init(key, jnp.zeros((1, 64, 64, 3)))["params"])


def initial(key=0, **fields) -> dict[str, np.ndarray]:
    """The parameters by name."""
    params = make_init(**fields)(jax.random.key(key))
    return flatten(jax.tree.map(np.asarray, params))


def assert_alike(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """Constants are equal; of random values no test tells the two apart."""
    if theirs.std() == 0:
        assert (ours == theirs[0]).all(), name
        return
    assert scipy.stats.ks_2samp(ours.ravel(), theirs).pvalue > 1e-3, name
    assert ours.std() == pytest.approx(theirs.std(), rel=0.15), name


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("timm", dict(distilled=True)),
        pytest.param("timm_map", MAP, marks=pytest.mark.slow),
        ("jax", {}),
    ],
)
def test_every_parameter_starts_as_timms(case, fields):
    """timm calls the default here 'jax'. Two leaves of its own are not those of the published code:
    query, key and value are drawn as one matrix, whose fan out is three times as large, and the
    class token is not zero.
    """
    ours = initial(weight_init=case.removesuffix("_map"), **fields)
    theirs = below(GOLDEN, case)
    names = {name: row.theirs for row in timm_format.rows(1, False) for name in row.ours}
    assert {names[name] for name in ours} == set(theirs)
    for name, value in ours.items():
        published = theirs[names[name]]
        if case == "jax" and name == "cls":
            assert not value.any() and 0 < np.abs(published).max() < 1e-5
            continue
        if case == "jax" and "qkv.weight" in names[name]:
            published = published * np.sqrt(2)  # 1 + 3 against 1 + 1 widths
        assert_alike(value, published, name)


@pytest.mark.slow
def test_a_head_may_have_another_start():
    """As in MAE's fine-tuning, which has timm's initialisation but for the head."""
    found = initial(weight_init="timm", head_std=2e-5, head_bias=-3.0)
    assert found["head/kernel"].std() == pytest.approx(2e-5, rel=0.05)
    assert (found["head/bias"] == -3).all()


def test_leaves_are_independent_and_a_function_of_the_key():
    one, same, other = (initial(key, weight_init="timm", distilled=True) for key in (0, 0, 1))
    for name, value in one.items():
        np.testing.assert_array_equal(value, same[name])
        assert value.std() == 0 or (value != other[name]).any(), name
    kernels = [one[name].ravel() for name in one if name.endswith(("query/kernel", "key/kernel"))]
    assert abs(np.corrcoef(*kernels)[0, 1]) < 0.03


@pytest.mark.slow
def test_every_way_to_initialise_has_it():
    """Also with layers in one array, and keys by name."""
    model = vit_jax.create_model("Ti/16", **SIZES, weight_init="timm", scan=True)
    keys = dict(dropout=jax.random.key(1), params=jax.random.key(0))
    params = jax.jit(model.init)(keys, jnp.zeros((1, 64, 64, 3)))["params"]
    stacked = flatten(params)["Transformer/encoderblock/MlpBlock_3/Dense_0/kernel"]
    assert stacked.shape == (1, WIDTH, 4 * WIDTH)
    assert np.std(stacked) == pytest.approx(0.02, rel=0.03)


def test_the_stem_of_a_hybrid_is_as_it_was():
    stem = dict(conv_root=dict(kernel=jnp.ones((7, 7, 3, 4))), gn_root=dict(bias=jnp.ones(4)))
    stem |= dict(block1=dict(unit1=dict(conv1=dict(kernel=jnp.ones((1, 1, 4, 4))))))
    patches = dict(embedding=dict(kernel=jnp.ones((1, 1, 4, 8)), bias=jnp.ones(8)))
    found = timm_init.like_timm(jax.random.key(0), stem | patches, width=8)
    assert all((value == 1).all() for name, value in flatten(found).items() if "emb" not in name)
    assert set(flatten(found)) == set(flatten(stem | patches))
    kernel = found["embedding"]["kernel"]
    assert 0.3 < np.abs(kernel).max() <= 0.5  # 1 / sqrt(4 channels)


def test_another_name_is_an_error():
    with pytest.raises(UserError, match="weight_init 'torch' is unknown: use one of jax, timm"):
        vit_jax.create_model("Ti/16", weight_init="torch")
