"""Models against the published implementations' logits and gradients, and against exact parameter
counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import applied, below, features_of, golden

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import encoder, variants
from vit_jax.weights import adapt, scan_layout
from vit_jax.weights.formats.vision_transformer import LINEN_NAMES
from vit_jax.weights.formats.weights import POSEMB

VITS = ["vit_gap_norep", "vit_gap_rep", "vit_ti_width_p8_1layer", "vit_token_norep", "vit_token_p8_nonsquare",
        "vit_token_rep", "vit_token_unpooled", "vit_unpooled"]  # fmt: skip
HYBRIDS = ["hybrid_r26like_2111", "hybrid_r50like_122", "hybrid_rti_nostage"]
GRADS = ["grad_vit_token_norep", "grad_hybrid_11"]
POOLS = {"token": "tok", "gap": "gap", "unpooled": "unpooled", "token_unpooled": "tok_unpooled"}

# 1,000 classes at 224 with a class token. B to H: arXiv 2010.11929 table 1; g and G: arXiv
# 2106.04560 table 2.
COUNTS = {
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "G/14": 1_844_440_680,
}


def load(tmp_path, name, **overrides):
    """A golden case through the public loader: (arrays, config, model, params)."""
    arrays, config = golden(name)
    np.savez(tmp_path / "weights.npz", **below(arrays, "params"))
    if "unpooled" in config["classifier"]:
        overrides["pool"] = POOLS[config["classifier"]]
    size = arrays["inputs"].shape[1:3]
    return (
        arrays,
        config,
        *vit_jax.from_pretrained(tmp_path / "weights.npz", image_size=size, **overrides),
    )


@pytest.mark.parametrize("name", VITS + HYBRIDS + GRADS)
def test_logits_equal_the_published_implementation(name, tmp_path):
    arrays, config, model, params = load(tmp_path, name)
    logits = applied(model, params, arrays["inputs"])
    truth = arrays["logits_f64"]
    assert logits.dtype == jnp.float32 and logits.shape == truth.shape
    assert np.abs(logits - truth).max() <= 1e-5 * np.abs(truth).max() + 2e-5
    assert model.pool == POOLS[config["classifier"]]


@pytest.mark.parametrize("name", ["vit_token_rep", "vit_gap_norep", "hybrid_r50like_122"])
def test_features_are_what_the_head_reads(name, tmp_path):
    arrays, _, model, params = load(tmp_path, name)
    features = features_of(model, params, arrays["inputs"])
    assert np.abs(features - arrays["pre_logits"]).max() <= 2e-5


@pytest.mark.parametrize("name", GRADS)
def test_gradients_equal_the_published_implementation(name, tmp_path):
    arrays, config, model, params = load(tmp_path, name)

    def loss(params):
        logits = model.apply({"params": params}, arrays["inputs"])
        return optax.softmax_cross_entropy(logits, arrays["labels_onehot"]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(value - arrays["loss"]) <= 1e-5
    grads, truth = scan_layout.flatten(grads), below(arrays, "grads")
    assert grads.keys() == truth.keys()
    for key, wanted in truth.items():
        bound = 1e-5 if key in config["near_zero_grads"] else 1e-4 * np.abs(wanted).max()
        assert np.abs(grads[key] - wanted).max() <= bound, key


@pytest.mark.parametrize(
    "options",
    [dict(scan=True), dict(remat="full"), dict(remat="dots"), dict(scan=True, remat="full")],
)
def test_scan_and_remat_change_no_number(options, tmp_path):
    arrays, _, model, params = load(tmp_path, "grad_vit_token_norep")
    _, _, other, other_params = load(tmp_path, "grad_vit_token_norep", **options)

    def loss(params, model):
        logits = model.apply({"params": params}, arrays["inputs"])
        return optax.softmax_cross_entropy(logits, arrays["labels_onehot"]).mean()

    with_gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, grads = with_gradients(params, model)
    other_value, other_grads = with_gradients(other_params, other)
    assert abs(value - other_value) <= 1e-6
    other_grads = scan_layout.relayout(other_grads, False, np.stack)
    for key, wanted in scan_layout.flatten(grads).items():
        assert np.abs(scan_layout.flatten(other_grads)[key] - wanted).max() <= 1e-5 * max(
            np.abs(wanted).max(), 1e-1
        ), key


def test_scan_draws_the_same_dropout_and_droppath_masks():
    sizes = dict(
        width=32, depth=3, mlp_dim=64, num_heads=2, patch_size=8, image_size=16, num_classes=5
    )
    model = vit_jax.create_model(**sizes, dropout=0.3, droppath=0.3)
    image = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
    params = jax.jit(model.init)(jax.random.key(0), image)["params"]
    params["head"]["kernel"] = jax.random.normal(jax.random.key(2), (32, 5))
    rngs = {"dropout": jax.random.key(3)}
    noisy = applied(model, params, image, train=True, rngs=rngs)
    scanned = applied(
        model.clone(scan=True), scan_layout.stack_blocks(params), image, train=True, rngs=rngs
    )
    quiet = applied(model, params, image)
    np.testing.assert_allclose(noisy, scanned, atol=1e-5)
    assert np.abs(noisy - quiet).max() > 0.1
    other = applied(model, params, image, train=True, rngs={"dropout": jax.random.key(4)})
    assert np.abs(noisy - other).max() > 0.1


@pytest.mark.parametrize(
    "options", [{}, dict(scan=True), dict(remat="full"), dict(scan=True, remat="full")]
)
def test_layer_scale_multiplies_what_the_branches_add(options):
    """A model without it whose last kernels are multiplied has the same logits."""
    sizes = dict(
        width=32,
        depth=2,
        mlp_dim=64,
        num_heads=2,
        patch_size=8,
        image_size=16,
        num_classes=5,
        head_std=0.5,
    )
    model, image = (
        vit_jax.create_model(**sizes, layer_scale=0.25),
        jax.random.normal(jax.random.key(1), (4, 16, 16, 3)),
    )
    params = scan_layout.flatten(jax.jit(model.init)(jax.random.key(0), image)["params"])
    gammas = {name for name in params if "LayerScale" in name}
    assert gammas == {
        f"Transformer/encoderblock_{i}/LayerScale_{part}/gamma" for i in (0, 1) for part in (1, 3)
    }
    assert all((params[name] == np.full(32, 0.25)).all() for name in gammas)
    for number, name in enumerate(sorted(gammas)):
        params[name] = jax.random.normal(jax.random.key(number), (32,))
    folded = {name: value for name, value in params.items() if name not in gammas}
    last = {
        "LayerScale_1": "MultiHeadDotProductAttention_1/out",
        "LayerScale_3": "MlpBlock_3/Dense_1",
    }
    for name in gammas:
        block, scale, _ = name.rsplit("/", 2)
        for leaf in ("kernel", "bias"):
            folded[f"{block}/{last[scale]}/{leaf}"] *= params[name]
    truth = applied(vit_jax.create_model(**sizes), scan_layout.unflatten(folded), image)
    params = scan_layout.relayout(scan_layout.unflatten(params), "scan" in options, jnp.stack)
    logits = applied(model.clone(**options), params, image)
    np.testing.assert_allclose(logits, truth, atol=1e-5)
    assert np.abs(truth).max() > 0.1


def test_rates_of_stochastic_depth_grow_linearly_or_are_all_the_same():
    sizes = dict(depth=3, mlp_dim=8, num_heads=1, droppath=0.2)
    for shape, wanted in (("linear", [0.0, 0.1, 0.2]), ("constant", [0.2, 0.2, 0.2])):
        noise = encoder.Encoder(**sizes, droppath_shape=shape).noise(jax.random.key(0))
        np.testing.assert_allclose(noise["droppath"], wanted, rtol=1e-6)


def test_stochastic_depth_of_one_constant_block_drops_each_branch_at_its_rate():
    """Without its attention a block adds an MLP, or nothing, or twice the MLP's part at a rate of
    one half.
    """
    sizes = dict(
        width=16,
        depth=1,
        mlp_dim=32,
        num_heads=2,
        patch_size=8,
        image_size=8,
        num_classes=0,
        fc_norm=False,
    )
    model = vit_jax.create_model(**sizes, pool="gap", droppath=0.5, droppath_shape="constant")
    image = jnp.tile(jax.random.normal(jax.random.key(1), (1, 8, 8, 3)), (400, 1, 1, 1))
    params = jax.jit(model.init)(jax.random.key(0), image)["params"]
    attention = params["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
    attention["out"] = jax.tree.map(jnp.zeros_like, attention["out"])
    found = applied(model, params, image, train=True, rngs={"dropout": jax.random.key(3)})
    assert len(np.unique(np.round(found, 4), axis=0)) == 2
    kept = np.abs(found - found[0]).max(axis=1) < 1e-4
    assert 0.4 < kept.mean() < 0.6  # 4 standard deviations of 400 coins
    linear = applied(
        model.clone(droppath_shape="linear"),
        params,
        image,
        train=True,
        rngs={"dropout": jax.random.key(3)},
    )
    np.testing.assert_allclose(linear, applied(model, params, image), atol=1e-6)


def test_the_head_starts_at_zero_or_as_wide_as_it_is_told():
    for std in (0.0, 0.02):
        model = vit_jax.create_model("Ti/16", depth=1, image_size=16, head_std=std)
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
        head = params["head"]["kernel"]
        np.testing.assert_allclose(head.std(), std, rtol=0.02)


@pytest.mark.parametrize(("variant", "count"), COUNTS.items())
def test_parameter_counts_are_exact(variant, count):
    params = adapt.abstract_params(vit_jax.create_model(variant))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_every_hybrid_has_the_grid_of_its_name():
    for stem, stride in variants.STEMS:
        model = vit_jax.create_model(f"{stem}+S/{stride}", image_size=224)
        tokens = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))[
            "params"
        ]["Transformer"]
        length = tokens["posembed_input"]["pos_embedding"].shape[1]
        assert length == 1 + model.grid[0] * model.grid[1]
        # The published "R+Ti/16" has patches of 8 behind a stem of stride 4.
        assert model.grid[0] == 224 // (32 if stem == "R" else stride)


@pytest.mark.parametrize("scan", [False, True])
def test_attention_maps_and_intermediates_are_there_when_asked_for(scan, tmp_path):
    arrays, _, model, params = load(tmp_path, "vit_token_norep", scan=scan)
    logits, held = applied(model, params, arrays["inputs"], mutable=["intermediates"])
    held = held["intermediates"]
    encoder = held["Transformer"]
    block = encoder["encoderblock"] if scan else encoder["encoderblock_0"]
    weights, output = block["MultiHeadDotProductAttention_1"]["weights"][0], block["output"][0]
    if scan:
        assert weights.shape[0] == output.shape[0] == model.depth
        weights, output = weights[0], output[0]
    assert weights.shape == (3, 4, 17, 17)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    assert np.abs(output - arrays["inter/Transformer/encoderblock_0"]).max() <= 2e-5
    assert np.abs(held["encoded"][0] - arrays["inter/Transformer"]).max() <= 2e-5
    np.testing.assert_allclose(logits, applied(model, params, arrays["inputs"]), atol=1e-5)


def test_intermediates_cost_nothing_when_not_asked_for(tmp_path):
    arrays, _, model, params = load(tmp_path, "vit_token_norep")
    lowered = jax.jit(lambda p, x: model.apply({"params": p}, x)).lower(params, arrays["inputs"])
    outputs = jax.tree.leaves(lowered.out_info)
    assert len(outputs) == 1


def test_bfloat16_compute_keeps_float32_parameters_and_stays_close(tmp_path):
    arrays, _, model, params = load(tmp_path, "vit_token_norep", dtype="bfloat16")
    logits = applied(model, params, arrays["inputs"])
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    assert logits.dtype == jnp.float32
    # 8 bits of mantissa: about 2^-8 relative per operation, a few operations deep.
    assert np.abs(logits - arrays["logits"]).max() <= 0.05 * np.abs(arrays["logits"]).max()


def test_map_pooling_equals_big_vision():
    arrays, config = golden("bv_map_learn")
    flat = {key.removeprefix("params/"): value for key, value in below(arrays, "params").items()}
    for old, new in LINEN_NAMES.items():
        flat = {
            k.replace(f"/{old}/", f"/{new}/") if "encoderblock" in k else k: v
            for k, v in flat.items()
        }
    flat[POSEMB] = flat.pop("pos_embedding")
    model = vit_jax.create_model(
        num_classes=6,
        image_size=32,
        patch_size=8,
        width=48,
        depth=1,
        num_heads=4,
        mlp_dim=192,
        pool="map",
    )
    assert config["pool_type"] == "map"
    logits = applied(model, scan_layout.unflatten(flat), arrays["inputs"])
    assert np.abs(logits - arrays["logits"]).max() <= 2e-5


def test_an_image_of_another_length_is_an_error(tmp_path):
    _, _, model, params = load(tmp_path, "vit_token_norep")
    with pytest.raises(
        UserError, match=r"gives 6 x 6 patch tokens.* \(1, 37, 48\), but .* \(1, 17, 48\)"
    ):
        applied(model, params, np.zeros((1, 48, 48, 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(variant="X/16"), "unknown variant 'X/16'"),
        (dict(variant="B16"), "unknown variant 'B16'"),
        (dict(variant="B/0"), "unknown variant"),
        (dict(variant="R26+B/16"), "unknown stem"),
        (dict(variant="B/16", pool="mean"), "pool 'mean' is unknown"),
        (dict(variant="B/16", posemb="rope"), "posemb 'rope' is unknown"),
        (
            dict(variant="B/16", droppath_shape="square"),
            "droppath_shape 'square' is unknown: use one of linear",
        ),
        (dict(variant="B/16", num_heads=7), "not divisible by num_heads 7"),
        (dict(variant="B/16", image_size=8), "smaller than one patch"),
        (dict(variant="B/16", heads=3), "unknown model field 'heads'"),
        (dict(variant="B/16", depth=10**9), "depth=1000000000 is more than 4,096: correct it"),
        (dict(variant="B/16", width=2**40, num_heads=2**40), "width=1099511627776 is more than"),
        (dict(variant="B/16", num_classes=10**9), "num_classes=1000000000 is more than"),
        (dict(variant="B/16", image_size=(224, 2**30)), "image_size=1073741824 is more than"),
        (dict(variant="Mixer-B/16", tokens_mlp_dim=10**9), "tokens_mlp_dim=1000000000 is more"),
        (dict(variant="R50x1", units=(3, 10**9)), "units=1000000000 is more than 4,096"),
    ],
)
def test_bad_models_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model(**arguments)
