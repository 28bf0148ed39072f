"""How to train your ViT (AugReg), arXiv 2106.10270: training from scratch, with augmentation chosen
by level and model size.

    python -m vit_jax.train --config=configs/augreg.py:B/16,imagenet2012 --workdir=gs://BUCKET/b16

The argument is VARIANT,DATASET[,AUG][,reg]. DATASET: imagenet2012 or imagenet21k. AUG: none,
light1, light2, medium1, medium2, strong1, strong2. The default is big_vision's choice for the
model, a compromise between 30 and 300 epochs. reg: the paper's dropout and stochastic depth, which
help B/32, B/16 and L/16 on imagenet2012 (figure 4).

The recipe is the authors' own, from big_vision's vit_i1k.py and vit_i21k.py. Expected validation
top-1, measured by timm for the authors' checkpoints after fine-tuning on ImageNet at 224
(results-imagenet.csv; the settings are in the file names): S/16,imagenet2012: 78.8 %;
B/32,imagenet2012,reg: 74.9 %; B/16,imagenet2012,strong2,reg: 79.2 %; B/16,imagenet21k,medium1:
84.5 %; L/16,imagenet21k,medium1,reg: 85.9 %; with --config.optim.wd=3e-5 Ti/16,imagenet21k: 75.5 %;
S/32,imagenet21k,light1: 76.0 %; S/16,imagenet21k: 81.4 %. One difference: the authors' imagenet21k
checkpoints use a class token, but big_vision's recipe the mean of the patches.

Cost, 300 epochs: S/16 1.0e19 FLOP on imagenet2012 and 1.2e20 on imagenet21k, B/16 4.0e19 and
4.5e20, L/16 1.4e20 and 1.6e21. --config.model.dtype=bfloat16 is faster on devices that, unlike
TPUs, do not compute float32 products in bfloat16 anyway.
"""

import ml_collections

from vit_jax.errors import UserError

# Level -> (mixup, RandAugment layers, their magnitude); light1 has layers of magnitude 0.
AUGMENTATION = {
    "none": (0.0, 0, 0),
    "light1": (0.0, 2, 0),
    "light2": (0.2, 2, 10),
    "medium1": (0.2, 2, 15),
    "medium2": (0.5, 2, 15),
    "strong1": (0.5, 2, 20),
    "strong2": (0.8, 2, 20),
}
# Data set -> variant -> level. For other models see figure 4 of the paper.
DEFAULT = {
    "imagenet2012": {
        "Ti/16": "light1",
        "S/32": "medium1",
        "S/16": "medium2",
        "B/32": "medium2",
        "B/16": "medium2",
        "L/16": "medium2",
    },
    "imagenet21k": {
        "Ti/16": "none",
        "S/32": "none",
        "S/16": "light1",
        "B/32": "light2",
        "B/16": "light2",
        "L/16": "medium2",
    },
}


def read_argument(arg: str) -> tuple[str, str, str, bool]:
    """(variant, data set, level, whether to regularise) of VARIANT,DATASET[,AUG][,reg]."""
    variant, dataset, *options = arg.split(",")
    if dataset not in DEFAULT:
        raise UserError(
            f"configs/augreg.py has no recipe for {dataset}: choose {' or '.join(DEFAULT)}"
        )
    level, *others = [option for option in options if option != "reg"] or [
        DEFAULT[dataset].get(variant)
    ]
    if level not in AUGMENTATION or others:
        raise UserError(
            f"configs/augreg.py:{arg} gives no augmentation for {variant}: write "
            f"VARIANT,DATASET[,AUG][,reg] with AUG one of {', '.join(AUGMENTATION)}"
        )
    return variant, dataset, level, "reg" in options


def get_config(arg="B/16,imagenet2012"):
    """`arg`: VARIANT,DATASET[,AUG][,reg]."""
    variant, dataset, level, regularised = read_argument(arg)
    mixup, layers, magnitude = AUGMENTATION[level]

    config = ml_collections.ConfigDict()
    config.total_epochs = 300
    config.image_size = 224
    config.loss = "sigmoid_xent"
    config.mixup = mixup
    config.data = dict(
        name=dataset, batch_size=4096, crop="inception", flip=True, randaug_layers=layers
    )
    if layers:
        config.data.randaug_magnitude = magnitude
    config.model = dict(variant=variant, posemb="learn")
    if regularised:
        config.model.update(dropout=0.1, droppath=0.1)  # droppath grows linearly with depth
    config.optim = dict(name="adam", momentum_dtype="bfloat16", grad_clip_norm=1.0)
    config.optim.update(lr=1e-3, schedule="cosine", warmup_steps=10_000, wd=1e-4, wd_times_lr=False)
    if dataset == "imagenet2012":
        config.model.update(pool="tok", pre_logits=True, head_bias=-6.9)
        config.data.split = "train[:99%]"
        splits = dict(minival="train[99%:]", val="validation")
        every = 2500
    else:
        config.model.update(pool="gap", head_bias=-10.0)
        config.data.split = "train[51200:]"
        splits = dict(test="train[:25600]", val="train[25600:51200]")
        every = 1000
    config.evals = {
        name: dict(every=every, data=dict(split=split, crop="central"))
        for name, split in splits.items()
    }
    config.checkpoint = dict(every=1000)
    return config
