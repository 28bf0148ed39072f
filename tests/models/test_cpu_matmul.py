"""Products of bfloat16 operands on CPUs, LayerNorm, GELU: against float64, within the bounds that
rounding gives.
"""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_file

import vit_jax
from vit_jax.models import encoder
from vit_jax.models.ops import cpu_attention, cpu_matmul, dense, layer_norm

# Rounding to bfloat16 changes a number by at most this share, so a product of two by 2 ROUND +
# ROUND^2.
ROUND = 2.0**-8
BOTH = 2 * ROUND + ROUND**2 + 1e-5  # and what float32 sums add


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def with_gradients(function, gradient, *arrays):
    y, vjp = jax.vjp(jax.jit(function), *arrays)
    return [np.asarray(x, np.float64) for x in (y, *vjp(jnp.asarray(gradient, y.dtype)))]


def assert_within(found, x, y, share=BOTH):
    """`found` is the product of x and y but for rounding of both."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert (np.abs(found - x @ y) <= share * (np.abs(x) @ np.abs(y))).all()


@pytest.mark.parametrize("sizes", [(5, 7, 3), (196, 64, 48), (1, 1, 1)])
def test_a_product_and_its_gradients_are_those_of_rounded_operands(sizes):
    rows, inner, columns = sizes
    x, kernel, gradient = draw(rows, inner), draw(inner, columns), draw(rows, columns)
    y, of_x, of_kernel = with_gradients(cpu_matmul.matmul, gradient, x, kernel)
    assert_within(y, x, kernel)
    assert_within(of_x, gradient, kernel.T)
    assert_within(of_kernel, x.T, gradient)


LAYERS = {
    "dense": (nn.Dense(7), dense.Dense(7, jnp.bfloat16), 1),
    "heads": (nn.DenseGeneral((3, 4)), dense.HeadProjection(3, 4, jnp.bfloat16), 1),
    "out": (nn.DenseGeneral(7, (-2, -1)), dense.OutputProjection(7, jnp.bfloat16), 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_flax_by_that_product(name):
    """With its parameters, of the same names and shapes."""
    flax, ours, axes = LAYERS[name]
    x = draw(2, 5, 4, 6)
    params = flax.init(jax.random.key(0), x)
    shapes = jax.eval_shape(ours.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    params["params"]["bias"] += draw(*params["params"]["bias"].shape)
    truth, found = (layer.apply(params, x) for layer in (flax, ours))
    assert found.dtype == jnp.float32
    inner = math.prod(x.shape[-axes:])
    kernel = np.abs(params["params"]["kernel"]).reshape(inner, -1)
    bound = BOTH * (np.abs(x.reshape(-1, inner)) @ kernel).reshape(truth.shape)
    assert (np.abs(found - truth) <= bound).all()


@pytest.mark.parametrize(
    ("side", "padding"), [(24, "VALID"), (27, "VALID"), (27, "SAME"), (24, "SAME")]
)
def test_patches_are_the_convolution(side, padding):
    """Also where a border fills no patch."""
    image, kernel = draw(2, side, 24, 3), draw(8, 8, 3, 5)
    dimensions = ("NHWC", "HWIO", "NHWC")

    def convolved(image, kernel):
        return jax.lax.conv_general_dilated(
            image, kernel, (8, 8), padding, dimension_numbers=dimensions
        )

    found = dense.patch_convolution(
        jnp.bfloat16, image, kernel, (8, 8), padding, dimension_numbers=dimensions
    )
    bound = BOTH * convolved(np.abs(image), np.abs(kernel))
    assert found.shape == bound.shape and (np.abs(found - convolved(image, kernel)) <= bound).all()


def attention64(query, key, value):
    scores = np.einsum("bqhk,bvhk->bhqv", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqv,bvhk->bqhk", weights, value)


@pytest.mark.parametrize("other", [9, 14])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_equals_float64(dtype, other):
    """float32 to 1e-5; bfloat16 to 3 % of the largest, output and gradients: some roundings of 0.4
    % in a row.
    """
    bound = dict(float32=1e-5, bfloat16=0.03)[dtype]
    arrays = [draw(2, n, 3, 8, seed=i) for i, n in enumerate((9, other, other, 9))]
    attend = lambda *inputs: cpu_attention.cpu_attention(*inputs, jnp.dtype(dtype))  # noqa: E731
    y, *gradients = with_gradients(attend, arrays[3], *arrays[:3])
    wide = [x.astype(np.float64) for x in arrays]
    truth = attention64(*wide[:3])
    assert np.abs(y - truth).max() <= bound * np.abs(truth).max()
    rng = np.random.default_rng(0)
    for i, gradient in enumerate(gradients):  # along a direction, by central differences
        step = [np.zeros_like(x) for x in wide[:3]]
        step[i] = rng.normal(size=wide[i].shape)
        ends = [
            attention64(*(x + sign * 1e-5 * s for x, s in zip(wide, step, strict=False)))
            for sign in (1, -1)
        ]
        slope = ((ends[0] - ends[1]) / 2e-5 * wide[3]).sum()
        size = np.linalg.norm(gradient) * np.linalg.norm(step[i])
        assert abs((gradient * step[i]).sum() - slope) <= bound * size


def test_large_scores_do_not_overflow():
    x = np.full((1, 4, 1, 8), 100.0, np.float32)
    y, *gradients = with_gradients(
        lambda *a: cpu_attention.cpu_attention(*a, jnp.dtype("bfloat16")), x, x, x, x
    )
    assert np.isfinite(gradients).all() and (y == 100.0).all()


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_layer_norm_and_its_gradients_equal_flaxs(offset):
    x, gradient = draw(3, 11, 32) * 3 + offset, draw(3, 11, 32)
    params = dict(scale=draw(32) + 1, bias=draw(32, seed=1))
    found, truth = (
        jax.vjp(lambda x, params, module=module: module.apply({"params": params}, x), x, params)
        for module in (layer_norm.LayerNorm(1e-5), nn.LayerNorm(1e-5))
    )
    np.testing.assert_allclose(found[0], truth[0], atol=2e-5)
    for one, other in zip(
        jax.tree.leaves(found[1](gradient)), jax.tree.leaves(truth[1](gradient)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=5e-5)


def test_layer_norm_keeps_the_input_alone():
    """One array of the input's size, where automatic differentiation keeps several."""
    x, params = draw(4, 16, 64), dict(scale=np.ones(64, np.float32), bias=np.zeros(64, np.float32))
    _, kept = jax.vjp(lambda x: layer_norm.LayerNorm().apply({"params": params}, x), x)
    assert sum(leaf.size >= x.size for leaf in jax.tree.leaves(kept)) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mlp_keeps_its_input_and_its_hidden_layer(dtype):
    """The latter in the dtype of the operands; automatic differentiation would keep what tanh
    gives, too.
    """
    x, block = draw(2, 16, 8), encoder.MlpBlock(64, dtype=jnp.dtype(dtype))
    params = block.init(jax.random.key(0), x)
    _, kept = jax.vjp(lambda x: block.apply(params, x), x)
    large = [leaf.dtype for leaf in jax.tree.leaves(kept) if leaf.size >= 2 * 16 * 64]
    assert large.count(dtype) == len(large) <= 2


def test_bfloat16_is_for_the_operands_of_products_alone(tmp_path):
    """Every product of the encoder, forward and backward, has bfloat16 operands and a float32
    result.
    """
    model, params = vit_jax.from_pretrained(
        golden_file(tmp_path, "vit_token_norep"), dtype="bfloat16"
    )
    image = draw(2, *model.image_size, 3)
    loss = lambda params: jnp.square(model.apply({"params": params}, image)).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
    kinds = re.findall(
        r"stablehlo.dot_general .*: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\) -> .*x(\w+)>",
        text,
    )
    low = [kind for kind in kinds if kind == ("bf16", "bf16", "f32")]
    per_block = (
        3 * (4 + 2) + 6
    )  # four projections and two layers of the MLP, forward and twice backward; attention
    assert len(low) == per_block * model.depth + 2  # the patches, whose images need no gradient
    assert (
        sum(kind != ("f32", "f32", "f32") for kind in kinds) == len(low)
        and len(kinds) - len(low) <= 3
    )  # the head
    assert "stablehlo.convolution" not in text


def test_a_model_in_bfloat16_is_close_to_float32(tmp_path):
    """Logits and gradients of a golden model, to 4 % of the largest of each."""
    path = golden_file(tmp_path, "vit_token_norep")

    def logits_and_gradients(dtype):
        model, params = vit_jax.from_pretrained(path, dtype=dtype)
        image = draw(2, *model.image_size, 3)
        loss = lambda params: model.apply({"params": params}, image)[:, 0].sum()  # noqa: E731
        return jax.tree.leaves(
            (model.apply({"params": params}, image), jax.jit(jax.grad(loss))(params))
        )

    for one, other in zip(*map(logits_and_gradients, ("float32", "bfloat16")), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        assert np.abs(one - other).max() <= 0.04 * np.abs(one).max() + 1e-3


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 6)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_summed_in_float32_by_a_product_too(shape, dtype):
    x = jnp.asarray(draw(*shape), dtype)
    truth = np.asarray(x, np.float64).reshape(-1, shape[-1]).sum(0)
    for way in (dense.multiply_rows, dense.add_rows, dense.sum_of_rows):
        found = jax.jit(way)(x)
        assert found.dtype == dtype and found.shape == truth.shape
        np.testing.assert_allclose(
            np.asarray(found, np.float64), truth, rtol=4 * jnp.finfo(dtype).eps, atol=1e-5
        )
