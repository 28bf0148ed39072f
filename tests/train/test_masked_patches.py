"""Masked patch prediction against a version in plain numpy, written from the paper (arXiv
2010.11929 sections 4.6 and B.1.2).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from vit_jax.errors import UserError
from vit_jax.train.objectives import masked_patches
from vit_jax.train.objectives.masked_patches import Choice, MaskedPatches, color_class

PATCH = 8
SIDES = (32, 24)  # of images, in pixels: 4 x 3 patches
PATCHES = 12


def make(target="mean_color", ratio=0.5, **fields) -> MaskedPatches:
    sizes = dict(width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=PATCH)
    model = vit_jax.create_model(num_classes=0, image_size=SIDES, **sizes | fields)
    return MaskedPatches(model, Choice.of(PATCHES, ratio), target)


def random_params(objective) -> dict:
    """Every parameter is random, so that each has an effect."""
    shapes = objective.abstract_params()
    chance = np.random.default_rng(1)
    return jax.tree.map(lambda x: chance.normal(0, 0.3, x.shape).astype(np.float32), shapes)


def example_batch(size=3) -> dict:
    chance = np.random.default_rng(2)
    image = chance.uniform(-1, 1, (size, *SIDES, 3)).astype(np.float32)
    seed = chance.integers(0, 2**31 - 1, (size, 2)).astype(np.int32)
    return dict(image=image, seed=seed)


def layer_norm(x, params):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(x, params):
    """x [length, embed]; a head after the other."""
    heads = []
    for head in range(params["query"]["kernel"].shape[1]):
        q, k, v = (
            x @ params[name]["kernel"][:, head] + params[name]["bias"][head]
            for name in ("query", "key", "value")
        )
        weights = softmax(q @ k.T / math.sqrt(q.shape[-1]))
        heads.append(weights @ v @ params["out"]["kernel"][head])
    return sum(heads) + params["out"]["bias"]


def encode(params, patches, depth=2):
    """Patch embeddings of one image, [patches, embed] -> encoded patch tokens."""
    x = np.concatenate([params["cls"][0], patches])
    blocks = params["Transformer"]
    x = x + blocks["posembed_input"]["pos_embedding"][0]
    for number in range(depth):
        block = blocks[f"encoderblock_{number}"]
        y = layer_norm(x, block["LayerNorm_0"])
        x = x + attention(y, block["MultiHeadDotProductAttention_1"])
        y = layer_norm(x, block["LayerNorm_2"])
        mlp = block["MlpBlock_3"]
        y = gelu(y @ mlp["Dense_0"]["kernel"] + mlp["Dense_0"]["bias"])
        x = x + y @ mlp["Dense_1"]["kernel"] + mlp["Dense_1"]["bias"]
    return layer_norm(x, blocks["encoder_norm"])[1:]


def cut(image):
    """The patches [PATCH, PATCH, 3] of an image, row by row."""
    return [
        image[y : y + PATCH, x : x + PATCH]
        for y in range(0, SIDES[0], PATCH)
        for x in range(0, SIDES[1], PATCH)
    ]


def class_of_color(pixels) -> int:
    """The 3-bit mean colour of pixels from -1 to 1."""
    red, green, blue = ((pixels.mean((0, 1)) + 1) / 2 // (1 / 8)).clip(0, 7)
    return int(64 * red + 8 * green + blue)


def cross_entropy(logits, label: int) -> float:
    return -math.log(softmax(logits)[label])


def patch_loss(target: str, predicted, patch) -> float:
    if target == "mean_color":
        return cross_entropy(predicted, class_of_color(patch))
    if target == "pixels":
        return float(((predicted - patch.reshape(-1)) ** 2).mean())
    cell = PATCH // 4
    cells = [
        patch[cell * y : cell * (y + 1), cell * x : cell * (x + 1)]
        for y in range(4)
        for x in range(4)
    ]
    logits = predicted.reshape(16, 512)
    labels = map(class_of_color, cells)
    return sum(map(cross_entropy, logits, labels)) / 16


def image_loss(target, params, image, order, other) -> float:
    patches = cut(image)
    kernel = params["embedding"]["kernel"].reshape(-1, 16)
    clean = np.stack([p.reshape(-1) @ kernel + params["embedding"]["bias"] for p in patches])
    corrupted = clean.copy()
    for rank, patch in enumerate(order):
        if rank < 9:  # 80 % of 11 patches
            corrupted[patch] = params["mask"]
        elif rank < 10:  # 10 %
            corrupted[patch] = clean[other[patch]]
    tokens = encode(params, corrupted)
    head = params["patch_head"]
    return sum(
        patch_loss(target, tokens[i] @ head["kernel"] + head["bias"], patches[i]) for i in order
    ) / len(order)


@pytest.mark.parametrize("target", ["mean_color", "colors_4x4", "pixels"])
def test_the_loss_equals_that_of_plain_numpy(target):
    objective = make(target, ratio=0.9)
    assert objective.choice == Choice(corrupted=11, masked=9, replaced=1), "and one stays as it is"
    params = random_params(objective)
    batch = example_batch()
    with jax.default_matmul_precision("highest"):
        found, _ = jax.jit(objective.loss)(params, batch, jax.random.key(0), 0)
    key_of = masked_patches.keys(batch["seed"], masked_patches.CORRUPT)
    for number, image in enumerate(batch["image"]):
        order, other = objective.choice.draw(key_of[number], PATCHES)
        expected = image_loss(target, params, image, np.asarray(order), np.asarray(other))
        np.testing.assert_allclose(found[number], expected, rtol=1e-5)


def test_a_color_is_the_three_highest_bits_of_its_channels():
    values = np.arange(256)
    grey = color_class(np.repeat(values[:, None], 3, 1) / np.float32(255))
    np.testing.assert_array_equal(grey, (values >> 5) * 73)
    one = np.float32([[1.0, 0.0, 0.5]])
    assert color_class(one) == 7 * 64 + 4


@pytest.mark.parametrize("ratio", [0.15, 0.5, 0.9])
def test_every_image_has_the_shares_of_the_paper(ratio):
    patches = 196
    choice = Choice.of(patches, ratio)
    corrupted = round(ratio * patches)
    assert choice == Choice(corrupted, round(0.8 * corrupted), round(0.1 * corrupted))
    clean = jnp.repeat(jnp.arange(float(patches))[:, None], 2, 1)
    keys = jax.random.split(jax.random.key(0), 500)
    order, other = jax.vmap(lambda key: choice.draw(key, patches))(keys)
    corrupt = jax.vmap(choice.corrupt, (None, None, 0, 0))
    result = np.asarray(corrupt(clean, jnp.full(2, -1.0), order, other))[..., 0]
    masked = result == -1
    np.testing.assert_array_equal(masked.sum(1), choice.masked)
    moved = (result != np.arange(patches)) & ~masked
    np.testing.assert_array_equal(moved.sum(1), choice.replaced)
    chosen = np.zeros_like(masked)
    np.put_along_axis(chosen, np.asarray(order), True, 1)
    assert not (masked | moved)[~chosen].any()
    # Every patch is as likely, within five standard errors.
    share = chosen.mean(0)
    assert np.abs(share - corrupted / patches).max() < 5 * math.sqrt(0.25 / 500)
    # A patch is replaced by any of the others.
    offsets = (result[moved] - np.nonzero(moved)[1]) % patches
    assert offsets.min() >= 1 and len(set(offsets.tolist())) > patches / 2


def config_with(**changes):
    from vit_jax import config as configs

    config = configs.defaults()
    config.masked_patches.update(changes)
    return config


@pytest.mark.parametrize(
    "fields, changes, message",
    [
        (dict(pool="map"), {}, "trains neither attention pooling nor fc_norm"),
        (dict(patch_size=6), dict(target="colors_4x4"), "divided by 4, not 6 x 6"),
        ({}, dict(ratio=0.01), "ratio=0.01 of 12 patches masks none: raise it"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(fields, changes, message):
    model = make(**fields).model
    with pytest.raises(UserError, match=message):
        masked_patches.make(config_with(**changes), model, 10)


def test_a_hybrid_has_no_patches_to_predict():
    model = vit_jax.create_model("R50+B/16", num_classes=0, image_size=64)
    with pytest.raises(UserError, match="must be a plain ViT"):
        masked_patches.make(config_with(), model, 10)
