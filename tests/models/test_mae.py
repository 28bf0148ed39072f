"""The masked autoencoder against transformers' ViTMAEForPreTraining: loss, pixels, gradients; its
FLOPs against XLA's.

golden/mae_public*: random weights, images and noise, and what transformers 5.23 computes in
float64. golden/mae_grads: gradients of these losses by torch's autograd in float64, at most 128
entries of each parameter, at equal distances.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import GOLDEN, below, build_experiment, golden

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.models.mae import MaskedAutoencoder
from vit_jax.train import optim
from vit_jax.train.objectives import mae
from vit_jax.weights.scan_layout import flatten

CASES = ("mae_public", "mae_public_raw")
SIZES = dict(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=4, image_size=(16, 24))
DECODER = dict(width=16, depth=1, mlp_dim=64, num_heads=2)


def make(fields=SIZES, decoder=DECODER, **options) -> MaskedAutoencoder:
    return MaskedAutoencoder.build(create.create(None, 0, **fields), decoder, **options)


def expected(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / case / "expected.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("case", CASES)
def test_loss_pixels_mask_and_gradients_are_those_of_transformers(case):
    model, params = vit_jax.from_pretrained(GOLDEN / case, objective="mae")
    truth = expected(case)

    def forward(params):
        loss, prediction, mask = mae.forward(model, params, truth["image"], truth["noise"])
        return loss, (prediction, mask)

    with jax.default_matmul_precision("highest"):
        (loss, (prediction, mask)), grads = jax.jit(jax.value_and_grad(forward, has_aux=True))(
            params
        )
    assert abs(loss - truth["loss"]) <= 2e-5
    assert np.abs(prediction - truth["prediction"]).max() <= 2e-5
    np.testing.assert_array_equal(mask, truth["mask"])
    grads = flatten(grads)
    wanted = below(golden("mae_grads")[0], case)
    assert grads.keys() == wanted.keys()
    for name, value in wanted.items():
        found = np.asarray(grads[name]).reshape(-1)
        found = found[:: -(-found.size // 128)]
        bound = 1e-7 if name.endswith("key/bias") else 1e-4 * np.abs(value).max()
        assert np.abs(found - value).max() <= bound, name


def published_positions(grid, width: int) -> np.ndarray:
    """get_2d_sincos_pos_embed of facebookresearch/mae, written again: columns come first."""
    rates = 10_000.0 ** -(np.arange(width // 4) / (width / 4))
    rows = []
    for y in range(grid[0]):
        for x in range(grid[1]):
            waves = [np.sin(x * rates), np.cos(x * rates), np.sin(y * rates), np.cos(y * rates)]
            rows.append(np.concatenate(waves))
    return np.stack(rows)


def test_a_new_autoencoder_starts_as_the_published_one():
    model = make(SIZES | dict(depth=1))
    params = jax.jit(model.init)(jax.random.key(0))
    for part, width in ((params, 32), (params["decoder"], 16)):
        rows = part["Transformer"]["posembed_input"]["pos_embedding"][0]
        np.testing.assert_array_equal(rows[0], 0)
        np.testing.assert_allclose(rows[1:], published_positions((4, 6), width), atol=1e-6)
    limit = np.sqrt(6 / (4 * 4 * 3 + 32))  # Xavier's, of the patch embedding as a matrix
    kernel = np.abs(params["embedding"]["kernel"])
    assert 0.95 * limit < kernel.max() <= limit
    assert 0.01 < params["cls"].std() < 0.03 and 0.01 < params["decoder"]["mask"].std() < 0.03
    assert not params["embedding"]["bias"].any() and not params["decoder"]["head"]["bias"].any()


def test_every_image_hides_the_patches_with_the_most_noise():
    noise = jnp.asarray([[0.3, 0.1, 0.2, 0.9], [0.0, 1.0, 0.5, 0.6]])
    order, rank = mae.ranks(noise)
    np.testing.assert_array_equal(order, [[1, 2, 0, 3], [0, 2, 3, 1]])
    np.testing.assert_array_equal(rank, [[2, 0, 1, 3], [0, 3, 1, 2]])


def test_hidden_pixels_do_not_reach_the_prediction():
    model = make(SIZES | dict(depth=1), norm_pixels=False)
    params = jax.jit(model.init)(jax.random.key(0))
    image = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype(np.float32)
    noise = np.tile(np.arange(24, dtype=np.float32), (2, 1))  # the first six patches are seen
    other = image.copy()
    other[:, 4:] += 1
    forward = jax.jit(functools.partial(mae.forward, model))
    loss, prediction, _ = forward(params, image, noise)
    other_loss, same_prediction, _ = forward(params, other, noise)
    np.testing.assert_array_equal(prediction, same_prediction)
    assert other_loss != loss


def xla_flops(function, *arguments) -> float:
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


B16 = dict(image_size=224, patch_size=16, width=768, depth=12, mlp_dim=3072, num_heads=12)


@pytest.mark.parametrize(
    ("fields", "decoder"),
    [
        (SIZES | dict(image_size=64, width=128, mlp_dim=512), DECODER | dict(width=64)),
        (B16, dict(width=512, depth=8, mlp_dim=2048, num_heads=16)),
    ],
    ids=["small", "B/16"],
)
def test_flops_are_those_of_xla(fields, decoder):
    """Blocks of the encoder cost what the visible tokens cost."""
    model = make(fields, decoder)
    params = jax.eval_shape(model.init, jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *model.vit.image_size, 3), np.float32)
    noise = jax.ShapeDtypeStruct((1, model.num_patches), np.float32)
    found = xla_flops(lambda *args: mae.forward(model, *args)[0], params, image, noise)
    assert model.flops == pytest.approx(found, rel=0.05)

    keep = jax.ShapeDtypeStruct((1, model.num_kept), np.int32)
    encoder = {name: value for name, value in params.items() if name != "decoder"}

    def encode(params, image, keep):
        return model.encoder.apply({"params": params}, image, keep=keep)

    d, m, length = fields["width"], fields["mlp_dim"], model.num_kept + 1
    block = 2 * length * (4 * d * d + 2 * d * m) + 4 * length * length * d
    patches = 2 * model.num_patches * 3 * fields["patch_size"] ** 2 * d
    truth = patches + fields["depth"] * block
    assert xla_flops(encode, encoder, image, keep) == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "decoder", "options", "message"),
    [
        ({}, {}, dict(mask_ratio=0.99), "mask_ratio=0.99 of 24 patches must hide some"),
        ({}, {}, dict(mask_ratio=float("nan")), "mask_ratio=nan"),
        ({}, dict(num_heads=3), {}, "decoder_width=16 is not divisible by mae.decoder_heads=3"),
        (dict(pool="map"), {}, {}, "attention pooling"),
        (dict(distilled=True), {}, {}, "no distillation token"),
        (dict(posemb="relative"), {}, {}, "not relative at stem"),
        (dict(stem_units=(1,), patch_size=1), {}, {}, "must be a plain ViT"),
        ({}, dict(width=18), {}, "decoder_width=18 is not a multiple of 4"),
    ],
)
def test_what_has_no_autoencoder_is_a_user_error(fields, decoder, options, message):
    with pytest.raises(UserError, match=message):
        make(SIZES | fields, DECODER | decoder, **options)


def test_an_encoder_of_another_architecture_is_a_user_error():
    with pytest.raises(UserError, match="must be a plain ViT"):
        MaskedAutoencoder.build(create.create("Mixer-S/16", 0, 32), DECODER)


def test_layer_decay_leaves_the_decoder_as_it_is():
    """Its blocks follow those of the encoder, and do not count as layers."""
    params = jax.eval_shape(make().init, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)
    assert optim.num_blocks(params) == 2
    scaled, _ = optim.scale_by_layer(0.5, 2).update(ones, optax.EmptyState(), ones)
    factors = {name: float(leaf.ravel()[0]) for name, leaf in flatten(scaled).items()}
    assert {value for name, value in factors.items() if name.startswith("decoder/")} == {1.0}
    assert factors["Transformer/encoderblock_0/LayerNorm_0/scale"] == 0.25


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(mesh=dict(tensor=4)), r"mesh\.tensor=4 does not divide .* decoder_heads=2"),
        (dict(optim=dict(frozen="encoder/x")), r"optim\.frozen: 'encoder/x' matches no parameter"),
    ],
)
def test_what_does_not_fit_a_run_is_a_user_error(more, message):
    config = vit_jax.load_config(
        dict(
            objective="mae",
            total_steps=1,
            image_size=16,
            mae=dict(decoder_width=16, decoder_depth=1, decoder_heads=2),
            model=dict(variant="Ti/4", depth=1, num_heads=4),
            data=dict(batch_size=8),
            **more,
        )
    )
    with pytest.raises(UserError, match=message):
        build_experiment(config)
