"""DeiT III, arXiv 2204.07118: plain ViTs on ImageNet alone, or pretraining on ImageNet-21k.

    python -m vit_jax.train --config=configs/deit3.py:B/16,imagenet2012 --workdir=gs://BUCKET/b16

The argument is VARIANT,DATASET: S/16, B/16, L/16 or H/14, and imagenet2012 (800 epochs;
--config.total_epochs=400 is the paper's shorter run) or imagenet21k. The recipe follows the
commands in the authors' README_revenge.md and their code. Expected validation top-1 at the training
resolution, from the last lines of their logs. imagenet2012: S/16 at 224 81.4 %, B/16 at 192 82.8 %,
L/16 at 192 84.0 %, H/14 at 160 83.5 %; after fine-tuning at 224, which is a separate run, B/16
83.8 %, L/16 84.9 %, H/14 85.2 %. imagenet21k, on their held-out part: S/16 54.1 %, B/16 56.5 %,
L/16 57.4 %, H/14 at 128 58.0 %.

Cost: imagenet2012: S/16 2.8e19 FLOP, B/16 7.9e19, L/16 2.8e20, H/14 4.8e20. imagenet21k: S/16
9.4e19, B/16 3.6e20, L/16 1.3e21, H/14 4.0e20.

Differences from theirs:
- The batch size with three copies of each image is 2016 (672 images), not 2048.
- Mixup and CutMix draw one value and pair images over the whole batch, not over the 64 to 256
  images of each GPU.
- The learning rate changes with every step, from 0 and to 0. Theirs (the cosine of timm 0.3.2,
  unchanged in 1.0.31) changes after every epoch, from 1e-6 and to 1e-5: epochs 0 and 1 have 1e-6,
  and epoch e has the rate of time e - 1, on a cosine that counts from epoch 0, not from the end of
  the warm-up. In the warm-up, ours is higher by up to 40 % of the peak; from epoch 6 on, they
  differ by at most 0.43 % of the peak in 800 epochs (S/16: 0.35 %), 0.73 % in 400, 1.32 % in 240
  and 3.41 % in 90.
- LAMB's trust ratio is computed separately for query, key and value; theirs are one array.
- The class token has a row in the position embedding, so the sum of both is learned twice as fast.
- Kernels have Xavier initialisation; theirs are normal with a standard deviation of 0.02, as only
  the head is here, unless --config.model.weight_init=timm.
- bfloat16 instead of float16, also in the residual stream, which is float32 in theirs. They also
  average parameters (0.99996), but never evaluate the average.
- Evaluation images are resized by area, not bicubically.
- imagenet21k has our 21,843 classes and the held-out images of configs/augreg.py.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

# Data set -> variant -> (epochs, image size, base learning rate, weight decay, stochastic depth).
RECIPES = {
    "imagenet2012": {
        "S/16": (800, 224, 4e-3, 0.05, 0.05),
        "B/16": (800, 192, 3e-3, 0.05, 0.2),
        "L/16": (800, 192, 3e-3, 0.05, 0.45),
        "H/14": (800, 160, 3e-3, 0.05, 0.6),
    },
    "imagenet21k": {
        "S/16": (240, 224, 1e-3, 0.02, 0.05),
        "B/16": (240, 224, 1e-3, 0.02, 0.1),
        "L/16": (240, 224, 1e-3, 0.02, 0.3),
        "H/14": (90, 128, 1e-3, 0.02, 0.5),
    },
}
WARMUP_EPOCHS = 5
HELD_OUT = 51_200  # images of imagenet21k


def get_config(arg="B/16,imagenet2012"):
    """`arg`: VARIANT,DATASET."""
    variant, dataset = arg.split(",")
    if variant not in RECIPES.get(dataset, {}):
        known = ", ".join(
            f"{variant},{dataset}" for dataset, row in RECIPES.items() for variant in row
        )
        raise UserError(f"configs/deit3.py has no recipe for {arg}: use one of {known}")
    epochs, image_size, lr, wd, droppath = RECIPES[dataset][variant]

    config = ml_collections.ConfigDict()
    config.total_epochs = epochs
    config.image_size = image_size
    config.cutmix = 1.0
    config.data = dict(
        name=dataset, flip=True, method="bicubic", three_augment=True, color_jitter=0.3
    )
    config.model = dict(
        variant=variant, pool="tok", gelu="erf", layer_scale=1e-4, head_std=0.02, dtype="bfloat16"
    )
    config.model.update(droppath=droppath, droppath_shape="constant")
    config.model.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    # Apex's FusedLAMB clips the gradient to 1.0 by default, and their main.py sets Adam's epsilon.
    config.optim = dict(
        name="lamb", lr=lr, wd=wd, schedule="cosine", b1=0.9, b2=0.999, eps=1e-8, grad_clip_norm=1.0
    )
    examples = CATALOG[dataset].examples["train"]
    if dataset == "imagenet2012":
        config.loss = "multilabel_xent"
        config.mixup = 0.8
        config.data.update(
            split="train", batch_size=2016, repeats=3, crop="torchvision", area_min=0.08
        )
        split = "validation"
    else:
        config.label_smoothing = 0.1
        config.data.update(split=f"train[{HELD_OUT}:]", batch_size=2048, crop="simple")
        split = f"train[:{HELD_OUT}]"
        examples -= HELD_OUT
    config.optim.warmup_steps = round(WARMUP_EPOCHS * examples / config.data.batch_size)
    # The full shorter side: --eval-crop-ratio 1.0.
    config.evals = dict(val=dict(every=2500, data=dict(split=split, crop="central", fraction=1.0)))
    config.checkpoint = dict(every=1000)
    return config
