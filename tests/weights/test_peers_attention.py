"""Attention weights of timm and transformers, and ours of the same parameters.

    pip install -e '.[dev,peers]' && python -m pytest -m peers

The golden weights, tests/golden/attention.npz, are computed again, and those of other models are
compared, too.
"""

import json

import jax
import numpy as np
import pytest
from conftest import GOLDEN
from test_peers import images_of, perturb, save_timm, timm, torch, transformers  # noqa: F401

import vit_jax

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOLERANCE = 1e-5
FOLDERS = sorted(path.name for path in GOLDEN.glob("*/") if not path.name.startswith("mae_"))
SMALL = dict(embed_dim=48, depth=3, num_heads=3, img_size=(32, 24), patch_size=8, num_classes=7)
OF_TIMM = {
    "deit_base_distilled_patch16_224": {},
    "vit_base_patch16_224": dict(reg_tokens=4, global_pool="avg"),
    "vit_base_patch16_siglip_224": {},
    "vit_giant_patch14_reg4_dinov2": {},
}


def weights_of_timm(torch, model, images: np.ndarray) -> dict[str, np.ndarray]:  # noqa: F811
    """By the names of `vit_jax.intermediates`, in float64."""
    seen = {"attention": []}
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(
            lambda module, given, output: seen["attention"].append(output)
        )
    pool = getattr(model, "attn_pool", None)
    parts = {}
    if pool is not None:
        pool.q_norm.register_forward_hook(lambda module, given, output: parts.update(q=output))
        pool.k_norm.register_forward_hook(lambda module, given, output: parts.update(k=output))
    with torch.no_grad():
        model.double()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).double())
    found = {"attention": torch.stack(seen["attention"]).numpy()}
    if pool is not None:
        scores = pool.scale * parts["q"] @ parts["k"].transpose(-2, -1)
        found["pooling_attention"] = scores.softmax(-1).numpy()
    return found


def weights_of_transformers(torch, model, images: np.ndarray) -> dict[str, np.ndarray]:  # noqa: F811
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).double()
    with torch.no_grad():
        output = model.double().eval()(pixels, output_attentions=True)
    return {"attention": torch.stack(output.attentions).numpy()}


def of_folder(folder, torch, timm, transformers, images):  # noqa: F811
    """What the library of a golden folder computes with it."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    if "architecture" in config:
        sizes = config["model_args"] | dict(num_classes=config["num_classes"])
        model = timm.create_model(config["architecture"], **sizes)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return weights_of_timm(torch, model.eval(), images)
    kind = getattr(transformers, config["architectures"][0])
    model = kind.from_pretrained(folder, attn_implementation="eager")
    return weights_of_transformers(torch, model, images)


def assert_ours_are(wanted: dict, folder, images: np.ndarray, record) -> None:
    model, params = vit_jax.from_pretrained(folder)
    with jax.default_matmul_precision("highest"):
        found = vit_jax.intermediates(model, params, images)
    for name, value in wanted.items():
        difference = np.abs(np.asarray(found[name]) - value).max()
        record("difference", float(difference))
        assert difference <= TOLERANCE and np.ptp(value) > 1e-3


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_weights_are_computed_again(torch, timm, transformers, record_property, name):  # noqa: F811
    folder = GOLDEN / name
    images = np.load(folder / "expected.npz")["image"][:2]
    wanted = of_folder(folder, torch, timm, transformers, images)
    with np.load(GOLDEN / "attention.npz", allow_pickle=False) as golden:
        np.testing.assert_allclose(wanted["attention"], golden[name], atol=1e-6)
        if "pooling_attention" in wanted:
            pooling = golden[f"{name}/pooling"]
            np.testing.assert_allclose(wanted["pooling_attention"], pooling, atol=1e-6)
    assert_ours_are(wanted, folder, images, record_property)


@pytest.mark.parametrize("name", OF_TIMM)
def test_weights_of_other_models_of_timm(torch, timm, tmp_path, record_property, name):  # noqa: F811
    model = perturb(torch, timm.create_model(name, **SMALL | OF_TIMM[name]))
    save_timm(timm, model, tmp_path)
    images = images_of(SMALL["img_size"])
    wanted = weights_of_timm(torch, model, images)
    assert_ours_are(wanted, tmp_path, images, record_property)


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2"])
def test_weights_of_other_models_of_transformers(
    torch, transformers, tmp_path, record_property, kind  # noqa: F811
):  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=40, patch_size=8
    )
    config._attn_implementation = "eager"
    model = perturb(torch, getattr(transformers, f"{kind}Model")(config))
    model.save_pretrained(tmp_path)
    images = images_of(40)
    wanted = weights_of_transformers(torch, model, images)
    assert_ours_are(wanted, tmp_path, images, record_property)
