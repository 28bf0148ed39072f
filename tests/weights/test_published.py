"""Names of weights: which address or repository each one means, what is said of those that are not
known, and that the documentation lists them all.
"""

import re

import pytest
from conftest import ROOT, last_error

from references import check
from references import published as tables
from vit_jax import predict
from vit_jax.errors import UserError
from vit_jax.weights import load as pretrained
from vit_jax.weights import names, published

PAGE = (ROOT / "docs/published_weights.md").read_text()
BEGIN = "<!-- python -m references.published -->\n"
END = "\n<!-- end of the tables -->"
STORE = "https://storage.googleapis.com"

# As the READMEs of vision_transformer, big_transfer and big_vision write them.
ADDRESSES = {
    "imagenet21k/ViT-B_16": f"{STORE}/vit_models/imagenet21k/ViT-B_16.npz",
    "imagenet21k+imagenet2012/ViT-B_16-224": (
        f"{STORE}/vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz"
    ),
    "sam/ViT-L_32": f"{STORE}/vit_models/sam/ViT-L_32.npz",
    "sam/Mixer-B_32": f"{STORE}/mixer_models/sam/Mixer-B_32.npz",
    "gsam/Mixer-S_8": f"{STORE}/mixer_models/gsam/Mixer-S_8.npz",
    "imagenet1k/Mixer-L_16": f"{STORE}/mixer_models/imagenet1k/Mixer-L_16.npz",
    "bit_models/BiT-M-R50x1": f"{STORE}/bit_models/BiT-M-R50x1.npz",
    "bit_models/BiT-M-R50x1-ILSVRC2012": f"{STORE}/bit_models/BiT-M-R50x1-ILSVRC2012.npz",
    "bit_models/distill/R50x1_160": f"{STORE}/bit_models/distill/R50x1_160.npz",
    "big_vision/vit_s16_i1k_150ep": f"{STORE}/big_vision/vit_s16_i1k_150ep.npz",
    "big_vision/flexivit/flexivit_l_i1k": f"{STORE}/big_vision/flexivit/flexivit_l_i1k.npz",
    "big_vision/flexivit/vit_b30_i21k_300ep": (
        f"{STORE}/big_vision/flexivit/vit_b30_i21k_300ep.npz"
    ),
}
# The table of AugReg in vision_transformer's README: settings, and the fine-tuning's learning rate.
AUGREG = {
    "L_16": ("aug_strong1-wd_0.1-do_0.0-sd_0.0", 0.01),
    "B_16": ("aug_medium1-wd_0.1-do_0.0-sd_0.0", 0.03),
    "S_16": ("aug_light1-wd_0.03-do_0.0-sd_0.0", 0.03),
    "R50_L_32": ("aug_medium1-wd_0.1-do_0.1-sd_0.1", 0.01),
    "R26_S_32": ("aug_light1-wd_0.1-do_0.0-sd_0.0", 0.01),
    "Ti_16": ("aug_none-wd_0.03-do_0.0-sd_0.0", 0.03),
    "B_32": ("aug_light1-wd_0.1-do_0.0-sd_0.0", 0.01),
    "S_32": ("aug_none-wd_0.1-do_0.0-sd_0.0", 0.01),
    "R_Ti_16": ("aug_none-wd_0.03-do_0.0-sd_0.0", 0.03),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_names_mean_the_published_addresses(name):
    path = ADDRESSES[name].removeprefix(f"{STORE}/")
    for spelling in (name, f"{name}.npz", path, path.removesuffix(".npz")):
        assert names.source_of(spelling) == ADDRESSES[name]


@pytest.mark.parametrize("model", AUGREG)
def test_short_names_of_augreg_are_the_recommended_files(model):
    settings, lr = AUGREG[model]
    address = f"{STORE}/vit_models/augreg/{model}-i21k-300ep-lr_0.001-{settings}"
    assert names.source_of(f"augreg/{model}") == f"{address}.npz"
    tuned = f"{address}--imagenet2012-steps_20k-lr_{lr}-res_384.npz"
    assert names.source_of(f"augreg/{model}-384") == tuned


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (
            "augreg/B_16-i1k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.1-sd_0.1--cifar100-steps_10k-lr_0.01-res_224",
            "vit_models/augreg/{}",
        ),
        ("R_Ti_16-i21k-30ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "vit_models/augreg/{}"),
        ("bit_models/vtab/BiT-M-R101x3-run2-dsprites-xpos", "bit_models/vtab/{}"),
        ("big_vision/siglip/webli_en_b16_224_63724782.npz", "big_vision/siglip/{}"),
        ("vit_s16_i1k_90ep", "big_vision/{}"),
        ("ViT-H_14", "vit_models/imagenet21k/{}"),
    ],
)
def test_every_file_that_is_named_by_the_rules_has_an_address(name, path):
    file = name.split("/")[-1].removesuffix(".npz")
    assert names.source_of(name) == f"{STORE}/{path.format(file)}.npz"


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("vit_base_patch16_224.augreg_in21k_ft_in1k", None),
        ("vit_large_patch14_clip_224.laion2b", None),
        ("deit3_small_patch16_384.fb_in22k_ft_in1k", None),
        ("vit_base_patch16_224", "vit_base_patch16_224.augreg2_in21k_ft_in1k"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224.fb_in1k"),
        ("flexivit_small", "flexivit_small.1200ep_in1k"),
    ],
)
def test_names_of_timm_are_on_the_hub(name, repository):
    assert names.source_of(name) == f"hf:timm/{repository or name}"


@pytest.mark.parametrize(
    "word",
    ["B/16", "B_16", "ViT-B/16", "ViT-B_16", "vit_b_16", "ViTB16", "vit-base-16"],
)
def test_a_model_is_answered_with_its_weights(word):
    with pytest.raises(UserError, match=f"^{word} is the name of a model, not of weights") as error:
        pretrained.read(word)
    for name in ("imagenet21k/ViT-B_16", "augreg/B_16", "augreg/B_16-384", "sam/ViT-B_16"):
        assert f" {name}" in str(error.value)


def test_a_missing_file_with_the_name_of_a_model():
    with pytest.raises(UserError, match=r"^B_16.npz does not exist as a file.* augreg/B_16,"):
        pretrained.read("B_16.npz")


@pytest.mark.parametrize(
    ("word", "listed"),
    [
        ("R50+L/32", "imagenet21k/R50+ViT-L_32, augreg/R50_L_32, augreg/R50_L_32-224"),
        ("Mixer-B/16", "imagenet1k/Mixer-B_16, imagenet21k/Mixer-B_16, sam/Mixer-B_16"),
        ("R152x4", "bit_models/BiT-S-R152x4, bit_models/BiT-M-R152x4"),
        ("FlexiViT-S", "big_vision/flexivit/flexivit_s_i1k, big_vision/flexivit/flexivit_s_i1k_90ep"),
    ],
)  # fmt: skip
def test_other_models_are_answered_too(word, listed):
    with pytest.raises(UserError, match=re.escape(f"choose one of {listed}")):
        pretrained.read(word)


def test_a_model_with_one_file_is_that_file():
    for word in ("H/14", "ViT-H/14", "ViT-Huge/14", "ViT-H_14"):
        assert names.source_of(word) == f"{STORE}/vit_models/imagenet21k/ViT-H_14.npz"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("google/vit-base-patch16-224", "of the Hugging Face hub, give hf:google/vit-base-patch16-224"),
        ("timm/vit_base_patch16_224.dino", "hub, give hf:timm/vit_base_patch16_224.dino"),
        ("imagenet21k/ViT-B_61", "names of weights are imagenet21k/ViT-B_16"),
        ("augreg/B16", "names of weights are augreg/B_16"),
        ("vit_base_patch16_244", "names of weights are vit_base_patch16_224"),
        ("big_vision/vit_s16_i1k_91ep", "names of weights are big_vision/vit_s16_i1k_90ep"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest_ones(word, hint, capsys):
    assert predict.main([f"--checkpoint={word}", "x.jpg"]) == 2
    line = last_error(capsys)
    assert line.startswith(f"error: {word} does not exist: give a workdir, ")
    assert hint in line


@pytest.mark.parametrize(
    "word",
    ["./B_16", "../ViT-H_14", "/B/16", "~/H/14", "runs/ViT-H_14.npz", "vit_base_patch16_224.pth"],
)
def test_paths_are_not_names(word):
    with pytest.raises(UserError, match="does not exist: give a workdir"):
        pretrained.read(word)


def test_the_page_lists_every_name_and_accuracy(monkeypatch):
    """Without counting parameters, which takes long."""

    def uncounted(text: str) -> str:
        return re.sub(r"\| [\d,]* \|", "| |", text)

    monkeypatch.setattr(tables, "count", lambda model: 0)
    shown = PAGE.split(BEGIN)[1].split(END)[0]
    assert uncounted(shown) == uncounted(tables.tables())
    listed = set(re.findall(r"\[`([^`]+)`\]\(https://storage", shown))
    assert listed == set(published.PATHS) and len(listed) == 104
    rows = [row for row in check.read_table(check.IMAGENET) if row["data"] == "imagenet2012"]
    assert shown.count(" |\n") >= len(rows)


@pytest.mark.slow
def test_the_page_has_the_parameters():
    assert PAGE.split(BEGIN)[1].split(END)[0] == tables.tables()


# MiB of files in the list of vision_transformer's vit_jax.ipynb: a little more than 4 bytes for
# each parameter.
SIZES = {
    "vit_models/imagenet21k/ViT-B_16": 393.69,
    "vit_models/imagenet21k/ViT-B_8": 393.72,
    "vit_models/imagenet21k/R26+ViT-B_32": 450.23,
    "vit_models/imagenet21k/R50+ViT-B_16": 439.85,
    "vit_models/imagenet21k+imagenet2012/ViT-B_16": 331.40,
    "vit_models/imagenet21k+imagenet2012/ViT-B_16-224": 330.29,
    "vit_models/imagenet21k+imagenet2012/ViT-B_8": 334.78,
    "vit_models/imagenet21k+imagenet2012/R50+ViT-B_16": 377.57,
    "vit_models/sam/ViT-B_32": 336.61,
    "mixer_models/imagenet1k/Mixer-B_16": 228.47,
    "mixer_models/imagenet21k/Mixer-B_16": 289.61,
    "mixer_models/gsam/Mixer-S_8": 78.79,
}


@pytest.mark.parametrize("path", SIZES)
def test_parameters_are_those_of_the_published_files(path):
    size = 4 * tables.count(tables.model_of(path)) / 2**20
    assert 0 < SIZES[path] - size < 0.15
