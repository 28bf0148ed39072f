"""Every shipped recipe against the tables of the papers, and every model that they name."""

import math
import re

import jax
import numpy as np
import pytest
from conftest import ROOT, golden
from test_models import COUNTS

from vit_jax import config as configs
from vit_jax.data.sources import catalog
from vit_jax.errors import UserError
from vit_jax.train import __main__ as train
from vit_jax.train import experiment, schedules
from vit_jax.train.objectives.make import make_objective
from vit_jax.train.schedules import make_schedule
from vit_jax.weights import adapt, names, scan_layout

CONFIGS = ROOT / "configs"

# arXiv 2010.11929 table 3: data set, variant, epochs, base learning rate, decay, weight decay,
# dropout. Where the table gives two lengths (7/14, 30/90) the longer one.
TABLE_3 = [
    ("jft300m", "B/16", 7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "B/32", 7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "L/32", 7, 6e-4, "linear", 0.1, 0.0),
    ("jft300m", "L/16", 14, 4e-4, "linear", 0.1, 0.0),
    ("jft300m", "H/14", 14, 3e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+B/16", 7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+B/32", 7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+L/32", 7, 2e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50+L/16", 14, 4e-4, "linear", 0.1, 0.0),
    ("jft300m", "R50x1", 7, 1e-3, "linear", 0.1, 0.0),
    ("jft300m", "R50x2", 7, 1e-3, "linear", 0.1, 0.0),
    ("jft300m", "R101x1", 7, 8e-4, "linear", 0.1, 0.0),
    ("jft300m", "R152x1", 7, 6e-4, "linear", 0.1, 0.0),
    ("jft300m", "R152x2", 7, 6e-4, "linear", 0.1, 0.0),
    ("imagenet21k", "B/16", 90, 1e-3, "linear", 0.03, 0.1),
    ("imagenet21k", "B/32", 90, 1e-3, "linear", 0.03, 0.1),
    ("imagenet21k", "L/16", 90, 1e-3, "linear", 0.03, 0.1),
    ("imagenet21k", "L/32", 90, 1e-3, "linear", 0.03, 0.1),
    ("imagenet2012", "B/16", 300, 3e-3, "cosine", 0.3, 0.1),
    ("imagenet2012", "B/32", 300, 3e-3, "cosine", 0.3, 0.1),
    ("imagenet2012", "L/16", 300, 3e-3, "cosine", 0.3, 0.1),
    ("imagenet2012", "L/32", 300, 3e-3, "cosine", 0.3, 0.1),
]
# arXiv 2010.11929 section 4.1: "ImageNet 1k classes and 1.3M images, ImageNet-21k with 21k classes
# and 14M images, JFT with 18k classes and 303M images".
DATA = {"imagenet2012": (1_000, 1.3e6), "imagenet21k": (21_843, 14e6), "jft300m": (18_291, 303e6)}

# arXiv 2010.11929 table 4: data set, steps, learning rates.
TABLE_4 = [
    ("imagenet2012", 20_000, (0.003, 0.01, 0.03, 0.06)),
    ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03)),
    ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03)),
    ("oxford_iiit_pet", 500, (0.001, 0.003, 0.01, 0.03)),
    ("oxford_flowers102", 500, (0.001, 0.003, 0.01, 0.03)),
    ("vtab", 2_500, (0.01,)),
]


# arXiv 2106.10270 by its authors' files, big_vision/configs/vit_i1k.py and vit_i21k.py: level ->
# mixup, operations of RandAugment, magnitude.
LEVELS = {
    "none": (0.0, 0, None),
    "light1": (0.0, 2, 0.0),
    "light2": (0.2, 2, 10.0),
    "medium1": (0.2, 2, 15.0),
    "medium2": (0.5, 2, 15.0),
    "strong1": (0.5, 2, 20.0),
    "strong2": (0.8, 2, 20.0),
}
# The same files: data set, variant, level.
AUGREG = [
    ("imagenet2012", "Ti/16", "light1"),
    ("imagenet2012", "S/32", "medium1"),
    ("imagenet2012", "S/16", "medium2"),
    ("imagenet2012", "B/32", "medium2"),
    ("imagenet2012", "B/16", "medium2"),
    ("imagenet2012", "L/16", "medium2"),
    ("imagenet21k", "Ti/16", "none"),
    ("imagenet21k", "S/32", "none"),
    ("imagenet21k", "S/16", "light1"),
    ("imagenet21k", "B/32", "light2"),
    ("imagenet21k", "B/16", "light2"),
    ("imagenet21k", "L/16", "medium2"),
]

# arXiv 2204.07118 by the commands in README_revenge.md of facebookresearch/deit: data set, variant,
# epochs, image size, learning rate, weight decay, stochastic depth; and millions of parameters at
# 224 with 1,000 classes, from its tables.
DEIT3 = [
    ("imagenet2012", "S/16", 800, 224, 4e-3, 0.05, 0.05, 22.0),
    ("imagenet2012", "B/16", 800, 192, 3e-3, 0.05, 0.2, 86.6),
    ("imagenet2012", "L/16", 800, 192, 3e-3, 0.05, 0.45, 304.4),
    ("imagenet2012", "H/14", 800, 160, 3e-3, 0.05, 0.6, 632.1),
    ("imagenet21k", "S/16", 240, 224, 1e-3, 0.02, 0.05, 22.0),
    ("imagenet21k", "B/16", 240, 224, 1e-3, 0.02, 0.1, 86.6),
    ("imagenet21k", "L/16", 240, 224, 1e-3, 0.02, 0.3, 304.4),
    ("imagenet21k", "H/14", 90, 128, 1e-3, 0.02, 0.5, 632.1),
]


def load(name: str, *arguments: str):
    return configs.load(str(CONFIGS / name), list(arguments))


def built(config):
    """The model of a recipe and the shapes of its parameters."""
    model = experiment.make_model(config, catalog.declared(config).num_classes)
    return model, adapt.abstract_params(model)


@pytest.mark.parametrize("row", TABLE_3, ids=lambda row: f"{row[1]},{row[0]}")
def test_pretraining_is_table_3(row):
    dataset, variant, epochs, lr, decay, wd, dropout = row
    config = load(f"pretrain.py:{variant},{dataset}")
    optim = config.optim
    assert (config.total_epochs, optim.lr, optim.schedule) == (epochs, lr, decay)
    assert (optim.wd, config.model.dropout) == (wd, dropout)
    # Caption of table 3 and section 4.1.
    assert (optim.name, optim.b1, optim.b2, optim.wd_times_lr) == ("adam", 0.9, 0.999, True)
    assert (config.data.batch_size, optim.warmup_steps, config.image_size) == (4096, 10_000, 224)
    assert optim.grad_clip_norm == (1.0 if dataset == "imagenet2012" else 0.0)
    # The authors' code: google-research/vision_transformer issues 2 and 34.
    multilabel = dataset != "imagenet2012"
    assert config.loss == ("sigmoid_xent" if multilabel else "softmax_xent")
    assert config.model.head_bias == (-10.0 if multilabel else 0.0)
    assert not multilabel or optim.end_lr == 1e-5
    is_vit = "/" in variant
    assert config.model.pre_logits is is_vit and config.model.pool == "tok"

    classes, examples = DATA[dataset]
    facts = catalog.declared(config)
    assert facts.num_classes == classes
    assert math.isclose(facts.num_examples, examples, rel_tol=0.02)
    model, params = built(config)
    assert model.num_classes == classes
    assert not is_vit or model.pre_logits == model.width
    if variant in COUNTS:
        head = model.width * classes + classes
        trunk = COUNTS[variant] - (model.width * 1000 + 1000)
        pre_logits = model.width * model.width + model.width
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == trunk + pre_logits + head


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: row[0])
@pytest.mark.parametrize("variant", ["B/16", "L/16", "H/14", "R50+B/16"])
def test_fine_tuning_is_table_4(row, variant):
    dataset, steps, grid = row
    recipes = configs.import_file(str(CONFIGS / "finetune.py"))
    assert recipes.LR_GRID[dataset] == grid
    name = "resisc45" if dataset == "vtab" else dataset  # any task of VTAB
    config = load(f"finetune.py:{variant},{name}")
    optim = config.optim
    assert config.total_steps == steps and optim.lr in grid
    # Caption of table 4 and appendix B.1.1.
    assert (optim.name, optim.momentum, optim.schedule) == ("sgd", 0.9, "cosine")
    assert (config.data.batch_size, optim.wd, optim.grad_clip_norm) == (512, 0.0, 1.0)
    assert optim.warmup_steps < steps and config.model.pre_logits is False
    # Table 2: ImageNet at 512 (L/16) and 518 (H/14) with Polyak averaging; everything else at 384.
    high = {"L/16": 512, "H/14": 518}.get(variant) if dataset == "imagenet2012" else None
    assert config.image_size == (high or 384)
    assert optim.ema_decay == (0.9999 if high else 0.0)


def test_held_out_shares_are_those_of_appendix_b():
    recipes = configs.import_file(str(CONFIGS / "finetune.py"))
    shares = dict(
        imagenet2012=0.01, cifar10=0.02, cifar100=0.02, oxford_iiit_pet=0.1, oxford_flowers102=0.1
    )
    assert shares == recipes.HELD_OUT


def test_plain_vit_is_arxiv_2205_01580():
    """Section 3 of the paper, and big_vision/configs/vit_s16_i1k.py."""
    config = load("plain_vit_s16.py")
    assert (config.model.variant, config.model.pool, config.model.posemb) == (
        "S/16",
        "gap",
        "sincos2d",
    )
    assert (config.total_epochs, config.data.batch_size, config.optim.warmup_steps) == (
        90,
        1024,
        10_000,
    )
    assert (config.optim.name, config.optim.lr, config.optim.schedule) == ("adam", 1e-3, "cosine")
    assert (config.optim.wd, config.optim.wd_times_lr, config.optim.grad_clip_norm) == (
        1e-4,
        False,
        1.0,
    )
    assert (config.mixup, config.data.randaug_layers, config.data.randaug_magnitude) == (
        0.2,
        2,
        10.0,
    )
    assert (
        config.data.split == "train[:99%]" and config.data.crop == "inception" and config.data.flip
    )
    _, params = built(config)
    # S/16 without class token and position embedding (22,050,664 - 197 * 384 - 384), and with
    # pre_logits.
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(params))
        == 22_050_664 - 198 * 384 + 384 * 384 + 384
    )


# Figures of the docstrings under "Cost".
COSTS = [
    ("vtab.py", "vit", "x 4.26e17 FLOP"),
    ("finetune.py", "B/16,cifar10", "1.7e18 FLOP"),
    ("pretrain.py", "B/16,imagenet2012", "4.1e19 FLOP"),
    ("deit.py", "Ti/16", "Ti/16 2.9e18 FLOP"),
    ("deit.py", "S/16", "S/16 1.1e19"),
    ("deit.py", "B/16", "B/16 4.1e19"),
    ("deit3.py", "S/16,imagenet2012", "S/16 2.8e19 FLOP"),
    ("deit3.py", "B/16,imagenet2012", "B/16 7.9e19"),
    ("deit3.py", "L/16,imagenet2012", "L/16 2.8e20"),
    ("deit3.py", "H/14,imagenet2012", "H/14 4.8e20"),
    ("deit3.py", "S/16,imagenet21k", "S/16 9.4e19"),
    ("deit3.py", "B/16,imagenet21k", "B/16 3.6e20"),
    ("deit3.py", "L/16,imagenet21k", "L/16 1.3e21"),
    ("deit3.py", "H/14,imagenet21k", "H/14 4.0e20"),
    ("mae.py", "B/16", "B/16 1.2e20 FLOP"),
    ("mae.py", "L/16", "L/16 2.6e20"),
    ("mae.py", "H/14", "H/14 6.0e20"),
    ("mae_finetune.py", "B/16", "B/16 1.35e19 FLOP"),
    ("mae_finetune.py", "L/16", "L/16 2.4e19"),
    ("mae_finetune.py", "H/14", "H/14 6.4e19"),
    ("mae_linear_probe.py", "B/16", "B/16 4.1e18 FLOP"),
    ("mae_linear_probe.py", "L/16", "L/16 7.9e18"),
    ("mae_linear_probe.py", "H/14", "H/14 2.1e19"),
]


@pytest.mark.parametrize(("file", "argument", "figure"), COSTS)
def test_costs_count_two_flops_per_multiplication_and_addition(file, argument, figure):
    words = " ".join(configs.import_file(str(CONFIGS / file)).__doc__.split())
    assert figure in words.partition("Cost")[2]
    config = load(f"{file}:{argument}")
    is_vtab = config.data.name == "vtab"  # whose head is padded for all tasks
    facts = catalog.Facts(0, 512) if is_vtab else catalog.declared(config)
    classes = facts.num_classes if configs.uses_labels(config) else 0
    model = experiment.make_model(config, classes)
    steps = schedules.plan_steps(config, facts.num_examples)
    flops = make_objective(config, model, steps).train_flops * config.data.batch_size * steps
    if config.optim.get("frozen"):  # all but the head: there is no backward pass
        flops /= 3
    (digits,) = re.findall(r"\d\.(\d+)e\d+", figure)
    assert f"{flops:.{len(digits)}e}".replace("+", "") in figure


@pytest.mark.parametrize("row", AUGREG, ids=lambda row: f"{row[1]},{row[0]}")
def test_augreg_is_arxiv_2106_10270(row):
    dataset, variant, level = row
    config = load(f"augreg.py:{variant},{dataset}")
    data, model, optim = config.data, config.model, config.optim
    assert (config.mixup, data.randaug_layers) == LEVELS[level][:2]
    assert data.to_dict().get("randaug_magnitude") == LEVELS[level][2]
    assert (config.total_epochs, data.batch_size, config.image_size) == (300, 4096, 224)
    assert (data.crop, data.area_min, data.flip, config.loss) == (
        "inception",
        0.05,
        True,
        "sigmoid_xent",
    )
    assert (optim.name, optim.lr, optim.momentum_dtype, optim.grad_clip_norm) == (
        "adam",
        1e-3,
        "bfloat16",
        1.0,
    )
    assert (optim.schedule, optim.warmup_steps, optim.wd, optim.wd_times_lr) == (
        "cosine",
        10_000,
        1e-4,
        False,
    )
    assert (model.variant, model.posemb, model.dropout, model.droppath) == (
        variant,
        "learn",
        0.0,
        0.0,
    )
    splits = {name: entry.data.split for name, entry in config.evals.items()}
    if dataset == "imagenet2012":
        assert (data.split, splits) == (
            "train[:99%]",
            dict(minival="train[99%:]", val="validation"),
        )
        assert (model.pool, model.pre_logits, model.head_bias) == ("tok", True, -6.9)
        assert catalog.declared(config).num_examples == 1_268_355
    else:
        assert (data.split, splits) == (
            "train[51200:]",
            dict(test="train[:25600]", val="train[25600:51200]"),
        )
        assert (model.pool, model.pre_logits, model.head_bias) == ("gap", False, -10.0)
        assert catalog.declared(config).num_examples == 14_197_122 - 51_200
    assert {(entry.data.crop, entry.data.fraction) for entry in config.evals.values()} == {
        ("central", 0.875)
    }
    built_model, params = built(config)
    assert built_model.num_classes == DATA[dataset][0]
    if variant in COUNTS:
        d, classes = built_model.width, built_model.num_classes
        own = (
            d * d + d if dataset == "imagenet2012" else -2 * d
        )  # pre_logits; without the class token and its row
        count = COUNTS[variant] + own + (d + 1) * (classes - 1000)
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


@pytest.mark.parametrize("level", LEVELS)
def test_augreg_takes_any_level_and_the_regularisation_of_the_paper(level):
    for argument, rate in (
        (f"R26+S/32,imagenet21k,{level}", 0.0),
        (f"Ti/16,imagenet2012,{level},reg", 0.1),
    ):
        config = load(f"augreg.py:{argument}")
        assert (config.mixup, config.data.randaug_layers) == LEVELS[level][:2]
        assert config.data.to_dict().get("randaug_magnitude") == LEVELS[level][2]
        assert (config.model.dropout, config.model.droppath, config.model.droppath_shape) == (
            rate,
            rate,
            "linear",
        )
    config = load("augreg.py:B/16,imagenet2012,reg")
    assert (config.mixup, config.model.dropout, config.model.droppath) == (0.5, 0.1, 0.1)


@pytest.mark.parametrize("row", DEIT3, ids=lambda row: f"{row[1]},{row[0]}")
def test_deit3_is_arxiv_2204_07118(row):
    dataset, variant, epochs, image_size, lr, wd, droppath, millions = row
    config = load(f"deit3.py:{variant},{dataset}")
    data, model, optim = config.data, config.model, config.optim
    assert (config.total_epochs, config.image_size, optim.lr, optim.wd) == (
        epochs,
        image_size,
        lr,
        wd,
    )
    # --opt fusedlamb, whose max_grad_norm is 1.0, with the --opt-eps of main.py; --sched cosine
    # --warmup-epochs 5.
    assert (optim.name, optim.b1, optim.b2, optim.eps, optim.grad_clip_norm) == (
        "lamb",
        0.9,
        0.999,
        1e-8,
        1.0,
    )
    assert optim.schedule == "cosine"
    examples = catalog.declared(config).num_examples
    assert abs(optim.warmup_steps - 5 * examples / data.batch_size) <= 0.5
    # models_v2.py: deit_*_patch*_LS, with one --drop-path for all blocks.
    assert (model.droppath, model.droppath_shape, model.layer_scale) == (droppath, "constant", 1e-4)
    assert (model.gelu, model.ln_eps, model.pool, model.head_std) == ("erf", 1e-6, "tok", 0.02)
    assert not model.pre_logits and not model.dropout
    # augment.py, --ThreeAugment --color-jitter 0.3 --reprob 0.0 --cutmix 1.0 --eval-crop-ratio 1.0.
    assert (data.three_augment, data.color_jitter, data.method, data.flip) == (
        True,
        0.3,
        "bicubic",
        True,
    )
    assert (data.erase, data.randaug_layers, config.cutmix) == (0.0, 0, 1.0)
    assert (model.mean, model.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (config.evals.val.data.crop, config.evals.val.data.fraction) == ("central", 1.0)
    if (
        dataset == "imagenet2012"
    ):  # --mixup .8 --smoothing 0.0 --bce-loss --repeated-aug, and 2048 images a batch
        assert (config.mixup, config.label_smoothing, config.loss) == (0.8, 0.0, "multilabel_xent")
        assert (data.crop, data.area_min, data.repeats, data.batch_size) == (
            "torchvision",
            0.08,
            3,
            2016,
        )
        assert examples == 1_281_167
    else:  # --mixup 0 --smoothing 0.1 --no-repeated-aug --src
        assert (config.mixup, config.label_smoothing, config.loss) == (0.0, 0.1, "softmax_xent")
        assert (data.crop, data.repeats, data.batch_size) == ("simple", 1, 2048)
        assert examples == 14_197_122 - 51_200
    built_model, params = built(config)
    assert params["Transformer"]["encoderblock_0"]["LayerScale_1"]["gamma"].shape == (
        built_model.width,
    )
    counted = adapt.abstract_params(built_model.clone(num_classes=1000, image_size=(224, 224)))
    assert sum(leaf.size for leaf in jax.tree.leaves(counted)) / 1e6 == pytest.approx(
        millions, abs=0.1
    )


@pytest.mark.parametrize(
    ("argument", "epochs", "largest"),
    [
        ("S/16,imagenet2012", 800, 0.35),
        ("B/16,imagenet2012", 800, 0.43),
        ("B/16,imagenet2012", 400, 0.73),
        ("B/16,imagenet21k", 240, 1.32),
        ("H/14,imagenet21k", 90, 3.41),
    ],
)
def test_the_learning_rate_of_deit3_differs_from_theirs_as_its_docstring_says(
    argument, epochs, largest
):
    """From timm's CosineLRScheduler, 0.3.2 and 1.0.31 alike, stepped after each epoch as in their
    main.py; `largest`: in percent of the peak, from epoch 6 on.
    """
    config = load(f"deit3.py:{argument}")
    peak = config.optim.lr
    theirs = golden("lr_deit3")[0][f"rates/{epochs},{peak}"]
    steps = catalog.declared(config).num_examples / config.data.batch_size  # of an epoch
    schedule = make_schedule("cosine", peak, round(epochs * steps), config.optim.warmup_steps)
    first = np.asarray(schedule(np.round(np.arange(epochs) * steps)))
    last = np.asarray(schedule(np.round(np.arange(1, epochs + 1) * steps) - 1))
    difference = np.maximum(abs(first - theirs), abs(last - theirs)) * 100 / peak
    assert difference[6:].max() == pytest.approx(largest, abs=0.005)
    assert difference[:6].max() == pytest.approx(40, abs=0.5)
    assert (last[:6] > theirs[:6]).all() and theirs[0] == theirs[1] == 1e-6
    assert last[-1] < 1e-9 and theirs[-1] == pytest.approx(1e-5, rel=0.13)
    assert f"{largest} %" in (CONFIGS / "deit3.py").read_text()


def test_masked_patches_are_those_of_appendix_b_1_2():
    config = load("masked_patches.py:B/16,jft300m")
    optim = config.optim
    assert (config.objective, config.masked_patches.target) == ("masked_patches", "mean_color")
    assert (config.masked_patches.ratio, config.total_steps) == (0.5, 1_000_000)
    assert (optim.name, optim.lr, optim.warmup_steps) == ("adam", 2e-4, 10_000)
    assert (optim.schedule, config.data.batch_size) == ("cosine", 4096)
    assert load("masked_patches.py:B/16,imagenet2012").total_steps == 100_000


@pytest.mark.parametrize("variant", ["B/16", "L/16", "H/14"])
def test_mae_is_arxiv_2111_06377(variant):
    """Table 8 of the paper, and PRETRAIN.md of facebookresearch/mae."""
    config = load(f"mae.py:{variant}")
    data, model, optim, mae = config.data, config.model, config.optim, config.mae
    assert (config.objective, config.total_epochs, config.image_size) == ("mae", 1600, 224)
    assert (mae.mask_ratio, mae.norm_pixels) == (0.75, True)
    assert (mae.decoder_width, mae.decoder_depth, mae.decoder_heads) == (512, 8, 16)
    assert (optim.name, optim.b1, optim.b2, optim.wd) == ("adam", 0.9, 0.95, 0.05)
    assert (optim.lr, data.batch_size) == (pytest.approx(1.5e-4 * 4096 / 256), 4096)
    assert (optim.schedule, optim.wd_times_lr, optim.grad_clip_norm) == ("cosine", True, 0.0)
    assert optim.warmup_steps == round(40 * 1_281_167 / 4096)
    # RandomResizedCrop(scale=(0.2, 1.0), interpolation=3) and RandomHorizontalFlip.
    assert (data.crop, data.area_min, data.method) == ("torchvision", 0.2, "bicubic")
    assert data.flip and not data.randaug_layers and not data.erase and not model.droppath
    assert (model.variant, model.pool, model.gelu, model.ln_eps) == (variant, "tok", "erf", 1e-6)
    assert (model.mean, model.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("variant", "epochs", "base_lr", "layer_decay", "droppath"),
    [("B/16", 100, 5e-4, 0.65, 0.1), ("L/16", 50, 1e-3, 0.75, 0.2), ("H/14", 50, 1e-3, 0.75, 0.3)],
)
def test_fine_tuning_of_mae_is_that_of_its_authors(variant, epochs, base_lr, layer_decay, droppath):
    """The commands in FINETUNE.md of facebookresearch/mae, and the defaults of their scripts."""
    config = load(f"mae_finetune.py:{variant}")
    data, model, optim = config.data, config.model, config.optim
    assert (config.total_epochs, data.batch_size) == (epochs, 1024)
    assert (optim.lr, optim.layer_decay) == (pytest.approx(base_lr * 1024 / 256), layer_decay)
    assert (optim.name, optim.b1, optim.b2, optim.wd) == ("adam", 0.9, 0.999, 0.05)
    assert (optim.schedule, optim.grad_clip_norm) == ("cosine", 0.0)
    assert optim.warmup_steps == round(5 * 1_281_167 / 1024)
    assert (config.mixup, config.cutmix, config.label_smoothing) == (0.8, 1.0, 0.1)
    assert (data.randaug_layers, data.randaug_magnitude, data.erase) == (2, 9.0, 0.25)
    assert (data.crop, data.area_min, data.method) == ("torchvision", 0.08, "bicubic")
    assert (model.droppath, model.head_std, model.pool) == (droppath, 2e-5, "gap")
    assert model.fc_norm and model.class_token
    assert config.evals.val.data.fraction == 224 / 256

    probe = load(f"mae_linear_probe.py:{variant}")
    assert probe.total_epochs == (90 if variant == "B/16" else 50)
    assert (probe.optim.name, probe.optim.lr) == ("lars", 0.1 * 16_384 / 256)
    assert (probe.data.batch_size, probe.optim.wd, probe.optim.momentum) == (16_384, 0.0, 0.9)
    _, params = built(probe)
    trained = [
        name for name in scan_layout.flatten(params) if not re.fullmatch(probe.optim.frozen, name)
    ]
    assert trained == ["head/bias", "head/kernel"]


@pytest.mark.parametrize(
    ("variant", "millions", "distilled"),
    [("Ti/16", 5.717, 5.911), ("S/16", 22.051, 22.436), ("B/16", 86.568, 87.338)],
)
def test_deit_is_arxiv_2012_12877(variant, millions, distilled):
    """Table 9 of the paper, main.py of the authors' code, and the parameters of their weights."""
    config = load(f"deit.py:{variant}")
    data, model, optim = config.data, config.model, config.optim
    assert (config.total_epochs, config.image_size, config.label_smoothing) == (300, 224, 0.1)
    assert (optim.name, optim.lr, optim.wd, optim.wd_times_lr) == ("adam", 1e-3, 0.05, True)
    assert (optim.schedule, optim.b1, optim.b2, optim.grad_clip_norm) == ("cosine", 0.9, 0.999, 0)
    assert abs(optim.warmup_steps - 5 * 1_281_167 / data.batch_size) <= 0.5
    assert (config.mixup, config.cutmix, data.erase, data.repeats) == (0.8, 1.0, 0.25, 3)
    assert (data.randaug_layers, data.randaug_magnitude) == (2, 9.0)
    assert (data.crop, data.area_min, data.method) == ("torchvision", 0.08, "bicubic")
    assert (model.dropout, model.droppath, model.droppath_shape) == (0.0, 0.1, "linear")
    assert (model.mean, model.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (config.evals.val.data.crop, config.evals.val.data.fraction) == ("central", 0.875)
    _, params = built(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6 == pytest.approx(
        millions, abs=6e-4
    )
    config = load(f"deit.py:{variant},R50x1")
    assert (config.objective, config.distill.kind, config.distill.weight) == (
        "distill",
        "hard",
        0.5,
    )
    assert config.model.distilled
    _, params = built(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6 == pytest.approx(
        distilled, abs=6e-4
    )


def test_the_teachers_of_deit_are_published_weights_whose_cost_the_docstring_says():
    recipes = configs.import_file(str(CONFIGS / "deit.py"))
    words = " ".join(recipes.__doc__.split())
    for variant, weights in recipes.TEACHERS.items():
        assert names.source_of(weights).startswith("https://")
        one = experiment.Experiment.declared(load(f"deit.py:B/16,{variant}"))
        assert one.teacher.model.image_size == (224, 224)
        cost = one.teacher.model.flops * one.config.data.batch_size * one.total_steps
        assert f"{cost:.1e}".replace("+", "") in words.partition("as a teacher")[2]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "deit.py:L/16",
            r"no recipe for L/16: write VARIANT\[,TEACHER\], with VARIANT one of Ti/16",
        ),
        ("deit.py:B/16,regnet", "no recipe for B/16,regnet: write .* TEACHER one of R50x1, R152x2"),
        ("augreg.py:H/14,imagenet2012", "gives no augmentation for H/14: write VARIANT,DATASET"),
        ("augreg.py:B/16,imagenet2012,strong3", "gives no augmentation for B/16"),
        ("augreg.py:B/16,cifar10", "has no recipe for cifar10: choose imagenet2012 or imagenet21k"),
        (
            "deit3.py:Ti/16,imagenet2012",
            "has no recipe for Ti/16,imagenet2012: use one of S/16,imagenet2012",
        ),
        ("mae.py:S/16", "has no recipe for S/16: use one of B/16, L/16, H/14"),
        ("mae_finetune.py:S/16", "has no recipe for S/16: use one of B/16, L/16, H/14"),
        ("mae_linear_probe.py:S/16", "has no recipe for S/16: use one of B/16, L/16, H/14"),
    ],
)
def test_recipes_name_what_they_have(recipe, message):
    with pytest.raises(UserError, match=message):
        load(recipe)


def all_recipes() -> list[str]:
    """Every config file; those with an argument for every data set that they name."""
    sets = [
        name
        for name, entry in catalog.CATALOG.items()
        if name != "digits" and "train" in entry.examples
    ]
    found = ["demo.py", "demo_finetune.py", "plain_vit_s16.py"]
    found += [
        f"{file}.py:S/16,{dataset}"
        for file in ("augreg", "deit3")
        for dataset in ("imagenet2012", "imagenet21k")
    ]
    found += [f"{file}.py:B/16" for file in ("mae", "mae_finetune", "mae_linear_probe")]
    found += ["demo_dino.py", "demo_distill.py", "demo_few_labels.py", "demo_unlabelled.py"]
    found += ["dino.py:l16", "masked_patches.py:B/16,imagenet2012"]
    found += [f"deit.py:{argument}" for argument in ("B/16", "Ti/16,R50x1", "B/16,B/16")]
    found += [f"pods.py:{variant},{chip}" for variant, chip in (("B/16", "v5e"), ("g/14", "v6e"))]
    found += [f"pretrain.py:{variant},{dataset}" for dataset, variant, *_ in TABLE_3]
    found += [f"finetune.py:B/16,{name}" for name in sets if name not in ("jft300m", "imagenet21k")]
    return found


def test_every_config_file_is_covered():
    others = {"evaluate.py", "step.py", "vtab.py"}  # of other commands than train, and their tests
    assert {path.name for path in CONFIGS.glob("*.py")} == {
        name.split(":")[0] for name in all_recipes()
    } | others


@pytest.mark.parametrize("recipe", all_recipes())
def test_dry_run_prints_the_plan_without_data(recipe, capsys):
    assert train.main([f"--config={CONFIGS / recipe}", "--dry_run"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "FLOPs", "shardings", "schedule", "learning rate by step", "mesh"):
        assert word in out


def test_dry_run_shows_shards_and_says_what_it_cannot_know(capsys):
    recipe = f"--config={CONFIGS}/pretrain.py:B/16,imagenet2012"
    assert train.main([recipe, "--dry_run", "--config.mesh.fsdp=4", "--config.mesh.tensor=2"]) == 0
    out = capsys.readouterr().out
    assert "86,567,656" not in out and "87,158,248 parameters" in out  # with pre_logits
    assert "Transformer/encoderblock_11/MlpBlock_3/Dense_0/kernel" in out and "'tensor'" in out
    assert train.main([f"--config={CONFIGS}/pretrain.py:B/16,resisc45", "--dry_run"]) == 2
    assert "set data.num_examples and model.num_classes" in capsys.readouterr().err
    counts = ["--config.data.num_examples=31500", "--config.model.num_classes=45"]
    assert train.main([f"--config={CONFIGS}/pretrain.py:B/16,resisc45", "--dry_run", *counts]) == 0
