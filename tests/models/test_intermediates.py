"""Tokens and attention weights against numpy in float64 and the peers, and that they do not depend
on how a model is run.
"""

import jax
import numpy as np
import pytest
from conftest import GOLDEN, applied

import vit_jax
from vit_jax.errors import UserError
from vit_jax.weights import scan_layout

SIZES = dict(
    width=32, depth=3, mlp_dim=64, num_heads=4, patch_size=4, image_size=(16, 12), num_classes=5
)


def drawn(**fields):
    """A small model and parameters with all entries random."""
    model = vit_jax.create_model(**(fields if "architecture" in fields else SIZES | fields))
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, *model.image_size, 3)).astype(np.float32)
    leaves = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), leaves)
    return model, params, image


def exactly(model, params, image) -> dict:
    with jax.default_matmul_precision("highest"):
        return jax.device_get(vit_jax.intermediates(model, params, image))


def shapes(model, params, image) -> dict:
    """The same without its numbers."""
    found = jax.eval_shape(lambda p, x: vit_jax.intermediates(model, p, x), params, image)
    return jax.tree.map(lambda leaf: leaf.shape, found)


def normalised(x, norm: dict) -> np.ndarray:
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * norm["scale"] + norm["bias"]


def attention_by_hand(tokens, layer: dict) -> np.ndarray:
    x = normalised(tokens, layer["LayerNorm_0"])
    parts = layer["MultiHeadDotProductAttention_1"]
    query, key = (
        np.einsum("bld,dhk->bhlk", x, np.float64(parts[name]["kernel"]))
        + parts[name]["bias"][:, None]
        for name in ("query", "key")
    )
    scores = np.einsum("bhqk,bhvk->bhqv", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_attention_tokens_and_pre_logits_equal_numpy():
    model, params, image = drawn()
    found = exactly(model, params, image)
    encoder = params["Transformer"]
    assert found["grid"] == (4, 3) and found["num_prefix"] == 1
    assert found["tokens"].shape == (4, 2, 13, 32)
    assert found["attention"].shape == (3, 2, 4, 13, 13)

    patches = image.reshape(2, 4, 4, 3, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 12, 48)
    kernel = np.float64(params["embedding"]["kernel"]).reshape(48, 32)
    embedded = patches @ kernel + params["embedding"]["bias"]
    first = np.concatenate([np.tile(params["cls"], (2, 1, 1)), embedded], axis=1)
    first += encoder["posembed_input"]["pos_embedding"]
    np.testing.assert_allclose(found["tokens"][0], first, atol=1e-5)

    for i in range(3):
        wanted = attention_by_hand(found["tokens"][i], encoder[f"encoderblock_{i}"])
        np.testing.assert_allclose(found["attention"][i], wanted, atol=2e-5)

    encoded = normalised(found["tokens"][-1], encoder["encoder_norm"])
    np.testing.assert_allclose(found["encoded"], encoded, atol=1e-5)
    np.testing.assert_allclose(found["pre_logits"], encoded[:, 0], atol=1e-5)
    logits = encoded[:, 0] @ np.float64(params["head"]["kernel"]) + params["head"]["bias"]
    np.testing.assert_allclose(found["logits"], logits, atol=1e-5)


# [layers, 2 images, heads, length, length] of timm 1.0.31 and transformers 5.24 in float64 for each
# golden folder and its first images; test_peers_attention.py computes them again.
with np.load(GOLDEN / "attention.npz", allow_pickle=False) as archive:
    OF_PEERS = dict(archive)
POOLING = "timm_map/pooling"


@pytest.mark.parametrize("name", sorted(OF_PEERS.keys() - {POOLING}))
def test_attention_weights_are_those_of_timm_and_transformers(name):
    image = np.load(GOLDEN / name / "expected.npz")["image"][:2]
    found = exactly(*vit_jax.from_pretrained(GOLDEN / name), image)
    np.testing.assert_allclose(found["attention"], OF_PEERS[name], atol=1e-5)
    if name == "timm_map":
        np.testing.assert_allclose(found["pooling_attention"], OF_PEERS[POOLING], atol=1e-5)


@pytest.mark.parametrize(
    "way",
    [
        dict(scan=True),
        dict(scan=True, remat="full"),
        dict(remat="dots"),
        dict(attention="splash"),
        dict(attention="blockwise"),
    ],
    ids=str,
)
def test_they_do_not_depend_on_how_the_model_runs(way):
    model, params, image = drawn()
    wanted = exactly(model, params, image)
    other = model.clone(**way)
    if other.scan:
        params = scan_layout.stack_blocks(params)
    found = exactly(other, params, image)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


def test_they_lead_to_the_features_and_logits_of_the_model():
    for fields in (dict(distilled=True), dict(pool="gap", fc_norm=True), dict(pre_logits=8)):
        model, params, image = drawn(depth=1, **fields)
        found = exactly(model, params, image)
        np.testing.assert_allclose(found["logits"], applied(model, params, image), atol=1e-5)
        with jax.default_matmul_precision("highest"):
            features = jax.jit(vit_jax.features, static_argnums=0)(model, params, image)
        np.testing.assert_allclose(found["pre_logits"], features, atol=1e-5)
        assert found["num_prefix"] == model.num_prefix
        assert found["tokens"].shape[2] == 12 + model.num_prefix


def test_what_other_architectures_have():
    model, params, image = drawn(depth=1, pool="map", posemb="sincos2d")
    larger = np.concatenate([image, image], axis=1)  # of another size than the model's
    found = exactly(model, params, larger)
    assert found["grid"] == (8, 3) and found["pooling_attention"].shape == (2, 4, 1, 24)
    np.testing.assert_allclose(found["pooling_attention"].sum(-1), 1, atol=1e-6)

    hybrid = dict(depth=1, stem_units=(1,), stem_width=32, patch_size=1)
    found = shapes(*drawn(**hybrid))
    assert found["stem"] == (2, 4, 3, 128) and found["attention"] == (1, 2, 4, 13, 13)

    sizes = dict(width=32, depth=2, patch_size=4, tokens_mlp_dim=8, channels_mlp_dim=64)
    found = shapes(*drawn(architecture="mixer", image_size=16, **sizes))
    assert found["tokens"] == (3, 2, 16, 32) and "attention" not in found

    found = shapes(*drawn(architecture="bit", units=(1, 1), width_factor=0.5, image_size=(40, 32)))
    assert found["stages"] == [(2, 10, 8, 128), (2, 5, 4, 256)]
    assert found["encoded"] == (2, 5, 4, 256) and found["pre_logits"] == (2, 256)


WRONG = [
    (np.zeros((2, 16, 12, 3), np.uint8), "is uint8, .* use model.normalize"),
    (np.zeros((2, 3, 16, 12), np.float32), r"shape \(2, 3, 16, 12\), .* channels come first"),
    (np.zeros((16, 12, 3), np.float32), r"add the batch axis, image\[None\]"),
    (np.zeros((2, 16, 12, 1), np.float32), "it is grey"),
    (np.zeros((2, 16, 12, 4), np.float32), "leave out the alpha channel"),
    (np.zeros((2, 16, 12, 5), np.float32), "three channels"),
    (np.zeros((2, 24, 24, 3), np.float32), "load the weights with image_size="),
]


@pytest.mark.parametrize(("image", "message"), WRONG, ids=[message for _, message in WRONG])
def test_images_that_a_model_does_not_take(image, message):
    model, params, _ = drawn()
    with pytest.raises(UserError, match=message):
        model.apply({"params": params}, image)
    with pytest.raises(UserError, match=message):
        vit_jax.intermediates(model, params, image)


def test_every_architecture_checks_its_images():
    for name in ("Mixer-S/16", "R50x1"):
        model = vit_jax.create_model(name, image_size=32)
        with pytest.raises(UserError, match="channels come first"):
            jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 3, 32, 32), np.float32))


def test_a_model_of_another_architecture_is_named():
    model, params, image = drawn()

    class Other(type(model)):
        architecture = "my_module:Other"

    other = Other(num_classes=5, image_size=(16, 12))
    with pytest.raises(UserError, match="what my_module:Other computes on the way is not known"):
        vit_jax.intermediates(other, params, image)
