"""Weights of timm and of transformers, in both directions: the same parameters give the same
logits.

    pip install -e '.[dev,peers]' && python -m pytest -m peers

The peers compute in float64. Every leaf is random, and embeddings are small, so that LayerNorm's
epsilon shows.
"""

import copy
import json
import math
import re

import jax
import numpy as np
import pytest

from vit_jax import convert
from vit_jax.errors import UserError
from vit_jax.models import create
from vit_jax.weights import load as pretrained
from vit_jax.weights import published, timm_tags
from vit_jax.weights.adapt import abstract_params
from vit_jax.weights.formats import safetensors_folder
from vit_jax.weights.formats import timm as timm_format
from vit_jax.weights.formats.weights import POSEMB, Weights
from vit_jax.weights.scan_layout import flatten

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOLERANCE = 2e-5  # of max(1, largest logit)


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.set_num_threads(2)
    return torch


@pytest.fixture(scope="module")
def timm(torch):
    import timm

    return timm


@pytest.fixture(scope="module")
def transformers(torch):
    import transformers

    return transformers


def perturb(torch, model, seed: int = 0):
    """Makes every leaf random; `model` itself, to evaluate."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, leaf in model.named_parameters():
            noise = torch.randn(leaf.shape, generator=generator)
            embedding = re.search(r"embed|token$|latent|probe", name) is not None
            center = 1.0 if leaf.ndim == 1 and name.endswith("weight") else 0.0
            leaf.copy_(
                center
                + noise
                * (0.02 if embedding else 1.2 / math.sqrt(leaf.shape[1]) if leaf.ndim > 1 else 0.1)
            )
    return model.eval()


def images_of(size, count: int = 2) -> np.ndarray:
    """[count, H, W, 3] float32."""
    return (
        np.random.default_rng(1).uniform(-1, 1, (count, *create.pair(size), 3)).astype(np.float32)
    )


def exactly(torch, model, images: np.ndarray, read=lambda output: output) -> np.ndarray:
    """What a peer computes in float64."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        return read(exact(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).double())).numpy()


def logits_of(model, params, images: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(
            model.apply({"params": params}, images)
        )  # without jit: operations are compiled once for all


def assert_same(found: np.ndarray, expected: np.ndarray, record) -> None:
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 0.1  # of something
    difference = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
    record("difference", float(difference))
    assert difference <= TOLERANCE


def assert_reads(path, images, expected, record, **settings):
    """from_pretrained gives the logits, and the model that gave them."""
    model, params = pretrained.from_pretrained(path, **settings)
    assert_same(logits_of(model, params, images), expected, record)
    return model


def test_names_without_a_tag_are_those_that_timm_takes(timm):
    for model, tag in timm_tags.TAGS.items():
        cfg = timm.get_pretrained_cfg(model)
        assert (cfg.tag, cfg.hf_hub_id) == (tag, f"timm/{model}.{tag}")


def test_files_of_augreg_at_224_are_those_that_timm_copied(timm):
    names = dict(Ti="tiny", S="small", B="base", L="large")
    count = 0
    for name in published.AUGREG:
        match = re.fullmatch(r"(\w+)_(16|32)-224", name)
        if match and match[1] in names:
            model = f"vit_{names[match[1]]}_patch{match[2]}_224.augreg_in21k_ft_in1k"
            path = published.address(published.PATHS[f"augreg/{name}"])
            assert timm.get_pretrained_cfg(model).url == path
            count += 1
    assert count == 6


# timm -> ours

SMALL = dict(
    embed_dim=48, depth=2, num_heads=4, mlp_ratio=2.5, img_size=32, patch_size=8, num_classes=7
)
B16, NO_SCALE = "vit_base_patch16_224", dict(init_values=0.0)
HEADLESS = dict(num_classes=0)
FROM_TIMM = {
    "tok": (B16, {}),
    "tok-fc_norm": (B16, dict(fc_norm=True)),
    "gap": (B16, dict(global_pool="avg")),
    "gap-norm-first": (B16, dict(global_pool="avg", fc_norm=False)),
    "gap-no-cls": (B16, dict(global_pool="avg", class_token=False)),
    "no-pool": (B16, dict(global_pool="")),
    "entry-reg4-gap": ("vit_base_patch16_reg4_gap_256", {}),
    "entry-medium-reg4-gap": ("vit_medium_patch16_reg4_gap_256", NO_SCALE),
    "entry-flexivit": ("flexivit_small", {}),
    "reg4": (B16, dict(reg_tokens=4)),
    "reg4-no-embed": (B16, dict(reg_tokens=4, no_embed_class=True)),
    "reg5-rows-a-square": (
        B16,
        dict(reg_tokens=5, class_token=False, global_pool="avg", img_size=16),
    ),
    "no-embed": (B16, dict(no_embed_class=True)),
    "no-embed-wide": (B16, dict(no_embed_class=True, img_size=(16, 40))),
    "no-positions": (B16, dict(pos_embed="none")),
    "no-qkv-bias": ("vit_base_patch16_224_miil", {}),
    "map": ("vit_base_patch16_siglip_224", {}),
    "map-tanh": ("vit_base_patch16_siglip_224", dict(act_layer="gelu_tanh")),
    "map-tanh-by-name": ("vit_so400m_patch16_siglip_256", {}),
    "map-erf-by-args": ("vit_so400m_patch16_siglip_256", dict(act_layer="gelu")),
    "map-reg4": ("vit_so150m_patch16_reg4_map_256", {}),
    "siglip-gap": ("vit_base_patch16_siglip_gap_224", {}),
    "siglip-gap-tanh-by-name": ("vit_giantopt_patch16_siglip_gap_256", {}),
    "wide": (B16, dict(img_size=(24, 48), patch_size=(8, 12))),
    "border": (B16, dict(img_size=(35, 45))),
    "deit": ("deit_tiny_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "layer-scale": (B16, dict(init_values=1e-3)),
    "dinov2": ("vit_small_patch14_dinov2", HEADLESS),
    "dinov2-reg4": ("vit_small_patch14_reg4_dinov2", HEADLESS),
    "dinov2-giant": ("vit_giant_patch14_dinov2", HEADLESS),
    "dinov2-giant-reg4": ("vit_giant_patch14_reg4_dinov2", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "distilled-wide": ("deit_tiny_distilled_patch16_224", dict(img_size=(16, 40))),
    "headless": (B16, dict(num_classes=0)),
    "headless-gap": (B16, dict(num_classes=0, global_pool="avg")),
    "headless-distilled": ("deit_tiny_distilled_patch16_224", dict(num_classes=0)),
    "no-effect": (
        B16,
        dict(dynamic_img_size=True, dynamic_img_pad=True, drop_rate=0.1, drop_path_rate=0.1),
    ),
    "heads-of-the-entry": (B16, dict(num_heads=12)),
}


def save_timm(timm, model, folder, without_args: bool = False, **changes):
    """As timm publishes; without_args: only what files of before 2025 say."""
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    if without_args:
        del config["model_args"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", FROM_TIMM)
def test_timm_is_read(timm, torch, tmp_path, record_property, case):
    name, args = FROM_TIMM[case]
    args = SMALL | args
    if case == "heads-of-the-entry":
        del args["num_heads"]
    model = perturb(torch, timm.create_model(name, **args))
    images = images_of(args["img_size"])
    save_timm(timm, model, tmp_path)
    assert_reads(tmp_path, images, exactly(torch, model, images), record_property)


BY_NAME = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
BY_NAME_SHORT = [  # one block each, to save time
    "vit_base_patch16_gap_224",
    "vit_base_patch32_siglip_256",
    "vit_base_patch16_reg4_gap_256",
    "flexivit_small",
    "deit3_small_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
]


@pytest.mark.parametrize("name", BY_NAME + BY_NAME_SHORT)
def test_timm_is_read_by_name_alone(timm, torch, tmp_path, record_property, name):
    model = perturb(
        torch, timm.create_model(name, **dict(depth=1) if name in BY_NAME_SHORT else {})
    )
    size = model.pretrained_cfg["input_size"][1:]
    images = images_of(size, 1)
    save_timm(timm, model, tmp_path, without_args=True)
    found = assert_reads(tmp_path, images, exactly(torch, model, images), record_property)
    theirs = timm.data.resolve_model_data_config(model)
    assert (found.mean, found.std, found.interpolation) == (
        theirs["mean"],
        theirs["std"],
        theirs["interpolation"],
    )
    assert found.image_size == tuple(size)


def test_timm_old_config_and_lone_file(timm, torch, tmp_path, record_property):
    """One object for everything, names by number; and no config at all."""
    model = perturb(torch, timm.create_model(B16, **SMALL | dict(global_pool="avg", reg_tokens=4)))
    images = images_of(32)
    expected = exactly(torch, model, images)
    save_timm(timm, model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    flat = config["pretrained_cfg"] | dict(
        architecture=B16, label_names={str(i): f"class {i}" for i in range(7)}
    )
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert pretrained.read(tmp_path, num_heads=4).class_names == tuple(
        f"class {i}" for i in range(7)
    )
    assert_reads(tmp_path, images, expected, record_property, num_heads=4)
    (tmp_path / "config.json").unlink()
    assert_reads(tmp_path / "model.safetensors", images, expected, record_property, num_heads=4)


def test_timm_labels(timm, torch, tmp_path):
    model = timm.create_model(B16, **SMALL)
    names = [f"class {i}" for i in range(7)]
    save_timm(timm, model, tmp_path, label_names=names)
    assert pretrained.read(tmp_path).class_names == tuple(names)


UNKNOWN_TO_US = {
    "qk-norm": (B16, dict(qk_norm=True), "qk_norm"),
    "clip": ("vit_base_patch16_clip_224", {}, "pre_norm"),
    "quick-gelu": (B16, dict(act_layer="quick_gelu"), "quick_gelu"),
    "rms-norm": (B16, dict(norm_layer="rmsnorm"), "norm_layer"),
    "gated-gelu": ("vit_giant_patch14_dinov2", dict(act_layer="gelu"), "act_layer='gelu'"),
    "differential": ("vit_dwee_patch16_reg1_gap_256", NO_SCALE, ""),
    "prefix-in-the-mean": (
        B16,
        dict(global_pool="avg", pool_include_prefix=True),
        "pool_include_prefix",
    ),
    "prefix-in-the-mean-by-name": ("test_vit3", NO_SCALE, "pool_include_prefix"),
    "avgmax": (B16, dict(global_pool="avgmax"), "avgmax"),
    "prr": (B16, dict(global_pool="prr"), "prr"),
    "no-final-norm": (B16, dict(final_norm=False), "norm.bias in the file"),
    "no-proj-bias": (B16, dict(proj_bias=False), "bias in the file"),
    "distilled-fc_norm": (
        "deit_tiny_distilled_patch16_224",
        dict(fc_norm=True),
        "fc_norm in a distilled model",
    ),
    "padding": (
        B16,
        dict(img_size=36, dynamic_img_size=True, dynamic_img_pad=True),
        "dynamic_img_pad",
    ),
    "one-channel": (B16, dict(in_chans=1), "images of 1 channels"),
    "relative": ("vit_relpos_small_patch16_224", NO_SCALE, ""),
    "rotary": ("vit_small_patch16_rope_224", {}, ""),
    "beit": ("beit_base_patch16_224", {}, ""),
}


@pytest.mark.parametrize("case", UNKNOWN_TO_US)
def test_timm_what_is_unknown_is_refused(timm, torch, tmp_path, case):
    name, args, message = UNKNOWN_TO_US[case]
    with torch.device("meta"):
        model = timm.create_model(name, **SMALL | args).to_empty(device="cpu")
    save_timm(timm, model, tmp_path)
    with pytest.raises(UserError, match=message):
        pretrained.from_pretrained(tmp_path)


def zeros_of(model) -> dict[str, np.ndarray]:
    """Arrays of a model without its numbers, at next to no memory."""
    return {
        name: np.broadcast_to(np.uint8(0), tuple(leaf.shape))
        for name, leaf in model.state_dict().items()
    }


MLPS = dict(GELU="gelu", GELUTanh="gelu", SiLU="swiglu")  # by activation


def what_differs(theirs, ours) -> list[str]:
    """What of a model of timm no array shows, and `ours` has otherwise."""
    block = theirs.blocks[0]
    tanh = "Tanh" in type(block.mlp.act).__name__
    epsilons = {
        layer.eps for layer in theirs.modules() if type(layer).__name__.endswith("LayerNorm")
    }
    facts = dict(
        gelu=("tanh" if tanh else "erf", ours.gelu),
        ln_eps=(epsilons, {ours.ln_eps}),
        num_heads=(block.attn.num_heads, ours.num_heads),
        pool=(timm_format.POOLS.get(theirs.global_pool), ours.pool),
        class_token=(theirs.has_class_token, "cls" in dict(ours.prefix)),
        patch_size=(tuple(theirs.patch_embed.patch_size), ours.patch_size),
        grid=(tuple(theirs.patch_embed.grid_size), ours.grid),
        pool_include_prefix=(bool(theirs.pool_include_prefix), False),
        mlp=(MLPS.get(type(block.mlp.act).__name__), ours.mlp),
        gate_last=(getattr(block.mlp, "gate_last", False), False),
    )
    return [f"{name}: {a} is read as {b}" for name, (a, b) in facts.items() if a != b]


def test_every_entry_of_timm_is_read_right_or_refused(timm, torch, monkeypatch):
    """A config.json of only a name must not hide what the name stands for."""
    for name in dir(torch.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            monkeypatch.setattr(torch.nn.init, name, lambda leaf, *_, **__: leaf)
    names = [
        name
        for module in ("vision_transformer", "deit")
        for name in timm.list_models(module=module)
    ]
    wrong, read = {}, []
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name, depth=1)
        config = dict(
            architecture=name,
            pretrained_cfg=json.loads(json.dumps(model.pretrained_cfg, default=str)),
        )
        config |= dict(global_pool=model.global_pool) if getattr(model, "global_pool", "") else {}
        try:
            ours, _ = pretrained.build(timm_format.read(zeros_of(model), config, name))
        except UserError:
            continue
        read.append(name)
        if found := what_differs(model, ours):
            wrong[name] = found
    assert not wrong
    assert len(names) > 150 and len(read) > 60, (len(names), read)
    assert {
        B16,
        "deit_base_distilled_patch16_384",
        "vit_so400m_patch16_siglip_512",
        "vit_huge_patch14_224",
        "vit_giant_patch14_reg4_dinov2",
    } <= set(read)


# transformers -> ours

TINY = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32
)
TINY |= dict(patch_size=8)
SEVEN = dict(num_labels=7)
SWIGLU = dict(use_swiglu_ffn=True)
WITH_REGISTERS = "Dinov2WithRegistersConfig"
FROM_HF = {
    "vit": ("ViTForImageClassification", "ViTConfig", SEVEN, "logits"),
    "vit-names": (
        "ViTForImageClassification",
        "ViTConfig",
        dict(id2label={i: f"c{i}" for i in range(7)}),
        "logits",
    ),
    "vit-gelu_new": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="gelu_new"),
        "logits",
    ),
    "vit-tanh": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="gelu_pytorch_tanh"),
        "logits",
    ),
    "vit-gelu_fast": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="gelu_fast"),
        "logits",
    ),
    "vit-gelu_python": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="gelu_python"),
        "logits",
    ),
    "vit-eps": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(layer_norm_eps=1e-3),
        "logits",
    ),
    "vit-wide": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(image_size=[24, 48], patch_size=[8, 12]),
        "logits",
    ),
    "vit-no-qkv-bias": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(qkv_bias=False),
        "logits",
    ),
    "vit-headless": ("ViTForImageClassification", "ViTConfig", dict(num_labels=0), "logits"),
    "vit-pooler": ("ViTModel", "ViTConfig", {}, "pooler_output"),
    "vit-pooler-narrow": ("ViTModel", "ViTConfig", dict(pooler_output_size=20), "pooler_output"),
    "vit-msn": ("ViTMSNForImageClassification", "ViTMSNConfig", SEVEN, "logits"),
    "deit": ("DeiTForImageClassification", "DeiTConfig", SEVEN, "logits"),
    "deit-distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", SEVEN, "logits"),
    "deit-distilled-wide": (
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        SEVEN | dict(image_size=[16, 40]),
        "logits",
    ),
    "deit-pooler": ("DeiTModel", "DeiTConfig", {}, "pooler_output"),
    "dinov2": ("Dinov2Model", "Dinov2Config", {}, "pooler_output"),
    "dinov2-wide-mlp": ("Dinov2Model", "Dinov2Config", dict(mlp_ratio=6), "pooler_output"),
    "dinov2-swiglu": ("Dinov2Model", "Dinov2Config", SWIGLU, "pooler_output"),
    "dinov2-no-qkv-bias": ("Dinov2Model", "Dinov2Config", dict(qkv_bias=False), "pooler_output"),
    "dinov2-classes": ("Dinov2ForImageClassification", "Dinov2Config", SEVEN, "logits"),
    "dinov2-registers": ("Dinov2WithRegistersModel", WITH_REGISTERS, {}, "pooler_output"),
    "dinov2-registers-classes-swiglu": (
        "Dinov2WithRegistersForImageClassification",
        WITH_REGISTERS,
        SEVEN | SWIGLU | dict(num_register_tokens=3, layer_norm_eps=1e-3),
        "logits",
    ),
    "siglip-tower": ("SiglipVisionModel", "SiglipVisionConfig", {}, "pooler_output"),
    "siglip-tower-erf": (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        dict(hidden_act="gelu", layer_norm_eps=1e-4),
        "pooler_output",
    ),
}


def hf_model(torch, transformers, model_class: str, config_class: str, args: dict):
    config = getattr(transformers, config_class)(**TINY | args)
    return perturb(torch, getattr(transformers, model_class)(config))


def save_in_memory(model, folder) -> None:
    """With the names that transformers has in memory, which its save_pretrained translates to the
    hub's.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(
        {name: leaf.contiguous() for name, leaf in model.state_dict().items()},
        folder / "model.safetensors",
    )
    model.config.save_pretrained(folder)


@pytest.mark.parametrize("case", FROM_HF)
def test_huggingface_is_read(transformers, torch, tmp_path, record_property, case):
    model_class, config_class, args, output = FROM_HF[case]
    model = hf_model(torch, transformers, model_class, config_class, args)
    images = images_of(args.get("image_size", 32))
    expected = exactly(torch, model, images, lambda found: found[output])
    model.save_pretrained(tmp_path / "hub")
    found = assert_reads(tmp_path / "hub", images, expected, record_property)
    assert found.ln_eps == model.config.layer_norm_eps
    weights = pretrained.read(tmp_path / "hub")
    assert weights.class_names == (tuple(args["id2label"].values()) if "id2label" in args else ())
    save_in_memory(model, tmp_path / "memory")
    again = pretrained.read(tmp_path / "memory")
    assert again.fields == weights.fields
    assert_equal_params(again.params, weights.params)


def assert_equal_params(found: dict, expected: dict) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


@pytest.mark.parametrize(
    "heads", [4, 12]
)  # 12 is the default, which a config of two towers leaves out
def test_both_towers_of_siglip(transformers, torch, tmp_path, record_property, heads):
    text = dict(
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=50,
    )
    config = transformers.SiglipConfig(
        text_config=text, vision_config=TINY | dict(num_attention_heads=heads)
    )
    model = perturb(torch, transformers.SiglipModel(config))
    images = images_of(32)
    expected = exactly(torch, model.vision_model, images, lambda found: found.pooler_output)
    model.save_pretrained(tmp_path / "hub")
    assert_reads(tmp_path / "hub", images, expected, record_property)
    save_in_memory(model, tmp_path / "memory")
    assert_reads(tmp_path / "memory", images, expected, record_property)


def test_classifier_of_siglip(transformers, torch, tmp_path, record_property):
    """It reads the mean of the tokens, and has an attention pooling that nothing reads."""
    names = {i: f"class {i}" for i in range(5)}
    config = transformers.SiglipConfig(
        vision_config=TINY, text_config=dict(num_hidden_layers=1), id2label=names
    )
    model = perturb(torch, transformers.SiglipForImageClassification(config))
    images = images_of(32)
    expected = exactly(torch, model, images, lambda found: found.logits)
    model.save_pretrained(tmp_path / "hub")
    found = assert_reads(tmp_path / "hub", images, expected, record_property)
    assert found.pool == "gap" and pretrained.read(tmp_path / "hub").class_names == tuple(
        names.values()
    )


def test_dino_of_huggingface(transformers, torch, tmp_path, record_property):
    """A ViT without a head and a pooler, as facebook/dino-vits16."""
    config = transformers.ViTConfig(**TINY)
    model = perturb(torch, transformers.ViTModel(config, add_pooling_layer=False))
    images = images_of(32)
    expected = exactly(torch, model, images, lambda found: found.last_hidden_state[:, 0])
    model.save_pretrained(tmp_path / "hub")
    found = assert_reads(tmp_path / "hub", images, expected, record_property)
    assert (found.pool, found.num_classes, found.pre_logits) == ("tok", 0, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_and_shards(transformers, torch, tmp_path, record_property, dtype):
    model = hf_model(torch, transformers, "ViTForImageClassification", "ViTConfig", SEVEN).to(
        getattr(torch, dtype)
    )
    images = images_of(32)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    expected = exactly(torch, model, images, lambda found: found.logits)
    assert_reads(tmp_path / "whole", images, expected, record_property)
    assert_equal_params(
        pretrained.read(tmp_path / "shards").params, pretrained.read(tmp_path / "whole").params
    )
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="fetch the whole folder again"):
        pretrained.read(tmp_path / "shards")


HF_UNKNOWN = {
    "relu": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="relu"),
        "hidden_act",
    ),
    "quick-gelu": (
        "ViTForImageClassification",
        "ViTConfig",
        SEVEN | dict(hidden_act="quick_gelu"),
        "hidden_act",
    ),
    "pooler": ("ViTModel", "ViTConfig", dict(pooler_act="relu"), "pooler_act"),
    "beit": ("BeitForImageClassification", "BeitConfig", SEVEN, ""),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {}, ""),
}


@pytest.mark.parametrize("case", HF_UNKNOWN)
def test_huggingface_what_is_unknown_is_refused(transformers, torch, tmp_path, case):
    *what, message = HF_UNKNOWN[case]
    hf_model(torch, transformers, *what).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        pretrained.from_pretrained(tmp_path)


def test_processor_of_huggingface(transformers, torch, tmp_path):
    hf_model(torch, transformers, "ViTForImageClassification", "ViTConfig", SEVEN).save_pretrained(
        tmp_path
    )
    processor = transformers.DeiTImageProcessor(
        size=dict(height=40, width=40),
        crop_size=dict(height=32, width=32),
        image_mean=[0.1, 0.2, 0.3],
        resample=3,
    )
    processor.save_pretrained(tmp_path)
    found, _ = pretrained.from_pretrained(tmp_path)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), tuple(processor.image_std))
    assert (found.crop, found.interpolation) == (0.8, "bicubic")


# ours -> timm and transformers

OURS = dict(width=48, depth=2, mlp_dim=100, num_heads=4, patch_size=8, image_size=32, num_classes=7)
TO_BOTH = {
    "tok-tanh": {},
    "tok-erf": dict(gelu="erf", interpolation="bicubic", crop=0.8),
    "wide": dict(image_size=(24, 48), patch_size=(8, 12)),
    "border": dict(image_size=(35, 45)),
    "distilled": dict(distilled=True, gelu="erf"),
    "sincos2d": dict(posemb="sincos2d"),
    "no-positions": dict(posemb="none"),
}
TO_TIMM = TO_BOTH | {
    "tok-fc_norm": dict(fc_norm=True),
    "gap": dict(pool="gap", gelu="erf"),
    "gap-cls": dict(pool="gap", class_token=True),
    "gap-cls-fc_norm": dict(pool="gap", class_token=True, fc_norm=True),
    "map": dict(pool="map"),
    "reg-gap": dict(registers=4, pool="gap", fc_norm=True),
    "headless": dict(num_classes=0, pool="map", gelu="erf"),
    "distilled-sincos2d": dict(distilled=True, posemb="sincos2d"),
    "unpooled": dict(pool="unpooled"),
    "layer-scale": dict(layer_scale=0.1, gelu="erf"),
    "distilled-layer-scale": dict(layer_scale=0.1, distilled=True),
    "swiglu": dict(mlp="swiglu", gelu="erf"),
    "swiglu-reg": dict(mlp="swiglu", gelu="erf", layer_scale=0.1, registers=4, num_classes=0),
}
DINOV2 = dict(layer_scale=0.1, gelu="erf", mlp_dim=96, num_classes=0)
TO_HF = TO_BOTH | {
    "eps": dict(ln_eps=1e-4),
    "pre_logits": dict(pre_logits=20, num_classes=0),
    "dinov2": DINOV2,
    "dinov2-border": DINOV2 | dict(image_size=35, ln_eps=1e-4, gelu="tanh"),
    "dinov2-classes": DINOV2 | dict(pool="tok_gap", num_classes=7, posemb="sincos2d"),
    "dinov2-registers": DINOV2 | dict(registers=4, interpolation="bicubic", crop=0.8),
    "dinov2-registers-swiglu-classes": DINOV2
    | dict(mlp="swiglu", pool="tok_gap", num_classes=7, registers=1),
}


def make_ours(folder, overrides: dict):
    """Writes a checkpoint of ours with random weights: (model, params, class names)."""
    fields = OURS | dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)) | overrides
    model, rng = create.create(**fields), np.random.default_rng(0)
    params = {}
    for name, leaf in flatten(abstract_params(model)).items():
        small = re.search(r"embedding|cls$|dist$|reg$|probe", name)
        scale = 0.02 if small else 0.2 if len(leaf.shape) > 1 else 0.1
        params[name] = (name.endswith("scale") + scale * rng.normal(size=leaf.shape)).astype(
            np.float32
        )
    names = tuple(f"class {i}" for i in range(model.num_classes))
    weights = Weights(params, create.fields(model), names, "softmax_xent")
    convert.write(weights, model, folder, "ours")
    return model, params, names


def export(model, params: dict, tmp_path, target: str) -> None:
    """Converts to `target`, and compares what is read there with what was written."""
    there = str(tmp_path / "there")
    assert convert.main([str(tmp_path / "ours"), there, f"--format={target}"]) == 0
    found = pretrained.read(there)
    fields = create.fields(model) | dict(pixels_of=dict(timm="timm", hf="transformers")[target])
    if target == "timm" and model.crop is None:
        fields["resize"] = "squash"  # the same, without a crop
    if model.posemb != "learn":
        fields["posemb"] = "learn"  # its rows are learned now
    assert create.fields(create.create(**found.fields)) == fields
    assert_equal_params({name: found.params[name] for name in params}, params)
    assert found.params.keys() - params.keys() <= ({POSEMB} if model.posemb != "learn" else set())


def assert_computes_the_same(torch, model, tmp_path, theirs, read, record) -> None:
    _, params = pretrained.from_pretrained(tmp_path / "ours")
    images = images_of(model.image_size)
    assert_same(logits_of(model, params, images), exactly(torch, theirs, images, read), record)


@pytest.mark.parametrize("case", TO_TIMM)
def test_timm_opens_ours(timm, torch, tmp_path, record_property, case):
    model, params, names = make_ours(tmp_path / "ours", TO_TIMM[case])
    export(model, params, tmp_path, "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True)
    assert_computes_the_same(torch, model, tmp_path, theirs, lambda found: found, record_property)
    data = timm.data.resolve_model_data_config(theirs)
    assert (tuple(data["mean"]), tuple(data["std"])) == (model.mean, model.std)
    assert data["interpolation"] == model.interpolation
    assert tuple(data["input_size"]) == (3, *model.image_size) and data["crop_pct"] == (
        model.crop or 1.0
    )
    assert data["crop_mode"] == ("center" if model.crop else "squash")
    assert tuple(theirs.pretrained_cfg.get("label_names") or ()) == names


def as_huggingface(params: dict, registers: int) -> dict:
    """Register tokens have no position there: what they had is added to them."""
    if not registers:
        return params
    rows = params[POSEMB].copy()
    own = rows[:, 1 : 1 + registers].copy()
    rows[:, 1 : 1 + registers] = 0
    return params | {"reg": params["reg"] + own, POSEMB: rows}


@pytest.mark.parametrize("case", TO_HF)
def test_transformers_opens_ours(transformers, torch, tmp_path, record_property, case):
    model, params, names = make_ours(tmp_path / "ours", TO_HF[case])
    export(model, as_huggingface(params, model.registers), tmp_path, "hf")
    headless = not model.num_classes
    auto = transformers.AutoModel if headless else transformers.AutoModelForImageClassification
    theirs, info = auto.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    output = "pooler_output" if headless else "logits"
    assert_computes_the_same(
        torch, model, tmp_path, theirs, lambda found: found[output], record_property
    )
    if not headless:
        assert tuple(theirs.config.id2label[i] for i in range(model.num_classes)) == names
    assert_processor(transformers, model, tmp_path / "there")


def assert_processor(transformers, model, folder) -> None:
    """The processor of transformers does what `model.preprocess` says."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == (model.mean, model.std)
    assert safetensors_folder.read_json(folder / "preprocessor_config.json")["resample"] == int(
        processor.resample
    )
    assert bool(processor.do_center_crop) == bool(model.crop)
    pixels = np.random.default_rng(2).integers(0, 256, (*model.image_size, 3), np.uint8)
    found = np.asarray(processor(images=pixels, return_tensors="np")["pixel_values"])[0].transpose(
        1, 2, 0
    )
    if not model.crop:  # nothing to resize
        np.testing.assert_allclose(found, (pixels / 255.0 - model.mean) / model.std, atol=1e-5)
    assert found.shape[:2] == model.image_size


def test_there_and_back_by_command(tmp_path):
    """ours -> timm -> hf -> ours keeps every bit."""
    _, params, names = make_ours(tmp_path / "0", dict(gelu="erf"))
    for step, target in enumerate(("timm", "hf", "ours")):
        assert (
            convert.main(
                [str(tmp_path / str(step)), str(tmp_path / str(step + 1)), f"--format={target}"]
            )
            == 0
        )
    found = pretrained.read(tmp_path / "3")
    assert_equal_params(found.params, params)
    assert found.class_names == names
