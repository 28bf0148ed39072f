"""ViTMAEForPreTraining of transformers in both directions: loss, mask, pixels and gradients of the
same parameters, images and noise.

    pip install -e '.[dev,peers]' && python -m pytest -m peers
"""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from test_peers import images_of, perturb, save_in_memory, torch, transformers  # noqa: F401

import vit_jax
from vit_jax import convert
from vit_jax.models import create
from vit_jax.models.mae import MaskedAutoencoder
from vit_jax.train.objectives import mae
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats.weights import Weights
from vit_jax.weights.scan_layout import flatten

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOLERANCE = 2e-5
SMALL = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16
)
SMALL |= dict(patch_size=4, decoder_hidden_size=16, decoder_num_hidden_layers=1)
SMALL |= dict(decoder_num_attention_heads=2, decoder_intermediate_size=64)
CASES = {
    "small": {},
    "normalised": dict(norm_pix_loss=True),
    "half": dict(mask_ratio=0.5, norm_pix_loss=True),
    "odd grid": dict(image_size=35, patch_size=7, mask_ratio=0.6),
    "deep and wide": dict(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=200,
        decoder_hidden_size=48,
        decoder_num_hidden_layers=3,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=100,
        norm_pix_loss=True,
    ),
    "tanh": dict(hidden_act="gelu_new", layer_norm_eps=1e-3),
    "no bias": dict(qkv_bias=False, norm_pix_loss=True),
    "few patches": dict(image_size=32, patch_size=16, mask_ratio=0.5),
}


def autoencoder(torch, transformers, **changes):  # noqa: F811
    config = transformers.ViTMAEConfig(**SMALL | changes)
    return perturb(torch, transformers.ViTMAEForPreTraining(config))


def inputs_of(model) -> tuple[np.ndarray, np.ndarray]:
    """(images, noise)."""
    config = model.config
    patches = (config.image_size // config.patch_size) ** 2
    noise = np.random.default_rng(2).uniform(size=(3, patches)).astype(np.float32)
    return images_of(config.image_size, 3), noise


def theirs(torch, model, images, noise):  # noqa: F811
    """(output, the model with its gradients) in float64."""
    exact = model.double()
    for parameter in exact.parameters():
        parameter.requires_grad_(True)
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).double()
    output = exact(pixels, noise=torch.from_numpy(noise).double())
    output.loss.backward()
    return output, exact


def gradients_of(folder, model) -> dict:
    """Those of a model of transformers by our names: they are read as if they were its weights."""
    from safetensors.torch import save_file

    shutil.copytree(folder, folder / "gradients")
    arrays = {name: leaf.grad.contiguous().float() for name, leaf in model.named_parameters()}
    save_file(arrays, folder / "gradients/model.safetensors")
    weights = pretrained.read(folder / "gradients")
    return weights.params | weights.extra


@pytest.mark.parametrize("case", CASES)
def test_loss_mask_pixels_and_gradients(transformers, torch, tmp_path, record_property, case):  # noqa: F811
    peer = autoencoder(torch, transformers, **CASES[case])
    peer.save_pretrained(tmp_path)
    images, noise = inputs_of(peer)
    model, params = vit_jax.from_pretrained(tmp_path, objective="mae")
    assert (model.mask_ratio, model.norm_pixels) == (
        peer.config.mask_ratio,
        peer.config.norm_pix_loss,
    )

    def forward(params):
        loss, prediction, mask = mae.forward(model, params, images, noise)
        return loss, (prediction, mask)

    with jax.default_matmul_precision("highest"):
        run = jax.jit(jax.value_and_grad(forward, has_aux=True))
        (loss, (prediction, mask)), grads = run(params)
    output, peer = theirs(torch, peer, images, noise)
    np.testing.assert_array_equal(mask, output.mask.numpy())
    pixels = output.logits.detach().numpy()
    assert np.abs(pixels).max() > 0.1
    difference = np.abs(prediction - pixels).max() / max(1.0, np.abs(pixels).max())
    record_property("difference", float(difference))
    assert difference <= TOLERANCE
    assert abs(loss - float(output.loss)) <= TOLERANCE * max(1.0, float(output.loss))
    grads, wanted = flatten(grads), gradients_of(tmp_path, peer)
    assert grads.keys() == wanted.keys()
    for name, value in wanted.items():
        if case == "no bias" and name.endswith(("query/bias", "key/bias", "value/bias")):
            continue  # theirs has none
        scale = np.abs(value).max()
        bound = 1e-6 if name.endswith("key/bias") else 1e-4 * scale
        assert np.abs(grads[name] - value).max() <= bound, name


def test_both_names_and_the_encoder_alone(transformers, torch, tmp_path):  # noqa: F811
    peer = autoencoder(torch, transformers)
    peer.save_pretrained(tmp_path / "hub")
    save_in_memory(peer, tmp_path / "memory")
    peer.vit.save_pretrained(tmp_path / "encoder")
    hub = pretrained.read(tmp_path / "hub")
    memory = pretrained.read(tmp_path / "memory")
    alone = pretrained.read(tmp_path / "encoder")
    assert hub.fields == memory.fields == alone.fields and not alone.extra
    for found, wanted in (
        (memory.params | memory.extra, hub.params | hub.extra),
        (alone.params, hub.params),
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_new_one_has_their_positions(transformers):  # noqa: F811
    """Theirs, as `initialize_weights` of encoder and decoder turns them: columns first."""
    from transformers.models.vit_mae import modeling_vit_mae as peer

    vit = create.create(None, 0, width=32, depth=1, num_heads=4, patch_size=4, image_size=16)
    model = MaskedAutoencoder.build(vit, dict(width=16, depth=1, mlp_dim=64, num_heads=2))
    params = jax.jit(model.init)(jax.random.key(0))
    for part, width in ((params, 32), (params["decoder"], 16)):
        rows = peer.build_2d_sinusoidal_position_embedding(4, 4, width, cls_token=True).numpy()
        wanted = np.roll(rows, width // 2, axis=1)[None]
        found = part["Transformer"]["posembed_input"]["pos_embedding"]
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_transformers_opens_ours(transformers, torch, tmp_path, record_property):  # noqa: F811
    """A run of ours, by the command: no key is missing or unexpected, and both compute the same."""
    sizes = dict(width=48, depth=2, mlp_dim=100, num_heads=4, patch_size=8, image_size=32)
    vit = create.create(None, 0, **sizes, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    decoder = dict(width=24, depth=2, mlp_dim=96, num_heads=3)
    model = MaskedAutoencoder.build(vit, decoder, mask_ratio=0.6)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    flat = flatten(params)
    extra = {name: flat.pop(name) for name in list(flat) if name.startswith("decoder/")}
    settings = dict(mask_ratio=0.6, norm_pixels=True)
    weights = Weights(flat, create.fields(vit), objective="mae", settings=settings, extra=extra)
    convert.write(weights, vit, tmp_path / "ours", "ours")
    there = tmp_path / "there"
    assert convert.main([str(tmp_path / "ours"), str(there), "--format=hf"]) == 0
    peer, info = transformers.AutoModelForPreTraining.from_pretrained(
        there, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert json.loads((there / "config.json").read_text())["norm_pix_loss"] is True
    images, noise = inputs_of(peer)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(functools.partial(mae.forward, model))
        loss, prediction, mask = run(params, images, noise)
    output, _ = theirs(torch, peer, images, noise)
    np.testing.assert_array_equal(mask, output.mask.numpy())
    pixels = output.logits.detach().numpy()
    assert np.abs(prediction - pixels).max() <= TOLERANCE * max(1.0, np.abs(pixels).max())
    assert abs(loss - float(output.loss)) <= TOLERANCE
