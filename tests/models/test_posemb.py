"""Position embeddings of arXiv 2010.11929 table 8 against a forward pass written out in numpy."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.special
from conftest import applied

import vit_jax
from vit_jax.errors import UserError
from vit_jax.weights import scan_layout

SIZES = dict(
    width=24,
    depth=2,
    mlp_dim=32,
    num_heads=3,
    patch_size=4,
    num_classes=5,
    image_size=(8, 12),
    gelu="erf",
    ln_eps=1e-5,
)
KINDS = [
    ("learn", "stem"),
    ("learn", "every"),
    ("learn", "shared"),
    ("learn2d", "stem"),
    ("learn2d", "every"),
    ("learn2d", "shared"),
    ("relative", "stem"),
    ("none", "stem"),
]


def noisy(model) -> dict:
    """Parameters of which every leaf is random."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, *model.image_size, 3)))[
        "params"
    ]
    return jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(np.float32), shapes)


def norm(x, p):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + SIZES["ln_eps"]) * p["scale"] + p["bias"]


def positions(p, grid) -> np.ndarray:
    """Rows [length, width] that a `posembed_input` stands for."""
    if "pos_embedding" in p:
        return p["pos_embedding"][0]
    rows = [
        np.concatenate([p["pos_embedding_x"][0, 0, x], p["pos_embedding_y"][0, y, 0]])
        for y in range(grid[0])
        for x in range(grid[1])
    ]
    return np.concatenate([p["pos_embedding_prefix"][0], rows])


def attention(x, p) -> np.ndarray:
    query, key, value = (
        np.einsum("ld,dhk->hlk", x, p[name]["kernel"]) + p[name]["bias"][:, None]
        for name in ("query", "key", "value")
    )
    scores = np.einsum("hqk,hvk->hqv", query, key)
    if "relative_embedding" in p:
        length = len(x)
        for q in range(length):
            for v in range(length):
                scores[:, q, v] += query[:, q] @ p["relative_embedding"][q - v + length - 1]
    weights = scipy.special.softmax(scores / np.sqrt(query.shape[-1]), axis=-1)
    return np.einsum("hqv,hvk,hkd->qd", weights, value, p["out"]["kernel"]) + p["out"]["bias"]


def mlp(x, p) -> np.ndarray:
    x = x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]
    x = x * (1 + scipy.special.erf(x / np.sqrt(2))) / 2
    return x @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"]


def forward(image, p, place: str, grid) -> np.ndarray:
    """Logits of one image [H, W, 3]."""
    patch = SIZES["patch_size"]
    patches = (
        image.reshape(grid[0], patch, grid[1], patch, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(grid[0] * grid[1], -1)
    )
    x = patches @ p["embedding"]["kernel"].reshape(-1, SIZES["width"]) + p["embedding"]["bias"]
    x = np.concatenate([p["cls"][0], x])
    encoder = p["Transformer"]
    common = positions(encoder["posembed_input"], grid) if "posembed_input" in encoder else 0.0
    x = x + common if place == "stem" else x
    for i in range(SIZES["depth"]):
        block = encoder[f"encoderblock_{i}"]
        if place == "every":
            x = x + positions(block["posembed_input"], grid)
        if place == "shared":
            x = x + common
        x = x + attention(norm(x, block["LayerNorm_0"]), block["MultiHeadDotProductAttention_1"])
        x = x + mlp(norm(x, block["LayerNorm_2"]), block["MlpBlock_3"])
    return norm(x, encoder["encoder_norm"])[0] @ p["head"]["kernel"] + p["head"]["bias"]


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_every_kind_equals_the_formula_looped_and_scanned(kind, place):
    model = vit_jax.create_model(posemb=kind, posemb_at=place, **SIZES)
    params = noisy(model)
    image = np.random.default_rng(2).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    double = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    expected = np.stack(
        [forward(one.astype(np.float64), double, place, model.grid) for one in image]
    )
    with jax.default_matmul_precision("highest"):
        looped = applied(model, params, image)
        scanned = applied(
            model.clone(scan=True, remat="full"), scan_layout.stack_blocks(params), image
        )
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(looped, expected, atol=2e-5)
    np.testing.assert_allclose(scanned, expected, atol=2e-5)


def count(kind, place) -> int:
    model = vit_jax.create_model("B/16", posemb=kind, posemb_at=place)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 224, 224, 3)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    ("kind", "place", "parameters"),
    [
        ("learn", "stem", 197 * 768),
        ("learn", "every", 12 * 197 * 768),
        ("learn", "shared", 197 * 768),
        ("learn2d", "stem", 768 + 2 * 14 * 384),
        ("relative", "stem", 12 * (2 * 197 - 1) * 64),
        ("sincos2d", "stem", 0),
    ],
)
def test_what_the_kinds_of_table_8_cost_in_b16(kind, place, parameters):
    assert count(kind, place) - count("none", "stem") == parameters


@pytest.mark.parametrize("kind", ["relative", "none", "sincos2d"])
def test_what_has_no_rows_can_only_stand_at_the_stem(kind):
    with pytest.raises(UserError, match=f"posemb_at=every has no effect with posemb={kind}"):
        vit_jax.create_model("Ti/16", posemb=kind, posemb_at="every")


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_gradients_reach_every_position_embedding(kind, place):
    model = vit_jax.create_model(posemb=kind, posemb_at=place, **SIZES)
    params = noisy(model)
    image = np.random.default_rng(3).uniform(-1, 1, (1, 8, 12, 3)).astype(np.float32)
    loss = lambda p: model.apply({"params": p}, image).sum()  # noqa: E731
    grads = scan_layout.flatten(jax.jit(jax.grad(loss))(params))
    rows = {
        name: leaf for name, leaf in grads.items() if "pos_embedding" in name or "relative" in name
    }
    assert bool(rows) == (kind != "none")
    assert all(np.abs(leaf).max() > 1e-6 for leaf in rows.values())


def test_tokens_are_cls_dist_registers_patches():
    model = vit_jax.create_model("Ti/16", image_size=32, distilled=True, registers=2)
    assert model.prefix == (("cls", 1), ("dist", 1), ("reg", 2)) and model.num_prefix == 4
    plain = dataclasses.replace(model, distilled=False, registers=0)
    assert plain.prefix == (("cls", 1),)
