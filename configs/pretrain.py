"""Pretraining of the ViT paper, arXiv 2010.11929 table 3: B/16, L/32, H/14, R50+B/16, ..., and its
ResNets.

    python -m vit_jax.train --config=configs/pretrain.py:B/16,imagenet2012 --workdir=gs://BUCKET/b16

Data sets: imagenet2012, imagenet21k and jft300m have the paper's recipes; any other (a TFDS name,
folder:PATH) has that of imagenet2012. Expected validation top-1 on ImageNet at 224 after 300 epochs
on ImageNet alone, as the authors report for these settings (google-research/vision_transformer
issue 62): B/16 74.79 %, B/32 69.19 %, L/16 72.59 %, L/32 66.90 %. ImageNet-21k at the end of
pretraining: B/16 47.88 %, B/32 44.04 %, L/16 49.90 %, H/14 49.06 %.

Cost: B/16 on ImageNet is 300 epochs of 1.28 M images at 105 GFLOP each, 4.1e19 FLOP.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.models import variants

# Rows of table 3 by data set: variant -> (epochs, base learning rate). For rows with two training
# lengths, 7/14 or 30/90, the longer one; --config.total_epochs=7 is the other.
JFT300M = {
    "B/16": (7, 8e-4),
    "B/32": (7, 8e-4),
    "L/32": (7, 6e-4),
    "L/16": (14, 4e-4),
    "H/14": (14, 3e-4),
    "R50+B/16": (7, 8e-4),
    "R50+B/32": (7, 8e-4),
    "R50+L/32": (7, 2e-4),
    "R50+L/16": (14, 4e-4),
    "R50x1": (7, 1e-3),
    "R50x2": (7, 1e-3),
    "R101x1": (7, 8e-4),
    "R152x1": (7, 6e-4),
    "R152x2": (7, 6e-4),
}
IMAGENET21K = {"B/16": (90, 1e-3), "B/32": (90, 1e-3), "L/16": (90, 1e-3), "L/32": (90, 1e-3)}
WARMUP_ELSEWHERE = 100
# "ViT-*" in the table.
IMAGENET2012 = (300, 3e-3)


def epochs_and_lr(variant: str, dataset: str) -> tuple[int, float]:
    """The row of table 3; for a model without a row, that of the most similar one (H/14 on
    ImageNet-21k takes that of L/16).
    """
    if dataset == "jft300m":
        return JFT300M.get(variant, (14, 3e-4))
    if dataset == "imagenet21k":
        return IMAGENET21K.get(variant, (90, 1e-3))
    return IMAGENET2012


def get_config(arg="B/16,imagenet2012"):
    """`arg`: VARIANT,DATASET."""
    variant, dataset = arg.split(",", 1)
    epochs, lr = epochs_and_lr(variant, dataset)
    is_multilabel = dataset in ("jft300m", "imagenet21k")

    config = ml_collections.ConfigDict()
    config.total_epochs = epochs
    config.image_size = 224
    config.data = dict(name=dataset, split="train", batch_size=4096, crop="inception", flip=True)
    config.model = dict(variant=variant, dtype="bfloat16")
    if variants.decode(variant).get("architecture", "vit") == "vit":
        config.model.update(
            pool="tok", pre_logits=True, dropout=0.0 if dataset == "jft300m" else 0.1
        )
    # Section 4.1: Adam with betas 0.9 and 0.999. Table 3's caption: warm-up of 10k steps.
    config.optim = dict(name="adam", b1=0.9, b2=0.999, lr=lr, warmup_steps=10_000)
    config.optim.update(momentum_dtype="bfloat16", wd_times_lr=True)
    if is_multilabel:
        # Loss, head bias and the end of the linear decay follow the authors' code (their issues 2
        # and 34).
        config.loss = "sigmoid_xent"
        config.model.head_bias = -10.0
        config.optim.update(schedule="linear", end_lr=1e-5, wd=0.03)
    else:
        config.optim.update(schedule="cosine", wd=0.3, grad_clip_norm=1.0)
    if dataset == "jft300m":
        config.optim.wd = 0.1

    if dataset not in ("jft300m", "imagenet21k", "imagenet2012"):
        config.optim.warmup_steps = WARMUP_ELSEWHERE  # most of these runs have fewer than 10k steps

    known = CATALOG.get(dataset)
    if known and known.test != "train":
        config.evals = dict(val=dict(every=5000, data=dict(split=known.test, crop="central")))
    config.checkpoint = dict(every=1000)
    return config
