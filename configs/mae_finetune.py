"""Fine-tuning of masked autoencoders on ImageNet, arXiv 2111.06377.

    python -m vit_jax.train --config=configs/mae_finetune.py:B/16 --config.init_from=mae_b16 \
        --workdir=gs://BUCKET/mae_b16_finetuned

The argument is VARIANT: B/16, L/16 or H/14; init_from is a run of configs/mae.py or any other
autoencoder that we load. The recipe is that of FINETUNE.md in facebookresearch/mae, which differs
from the paper's table 9 for B/16 (base learning rate 1e-3, layer decay 0.75), for L/16 and H/14
(stochastic depth 0.1 and 0.2), in random erasing, and in the mean of the patch tokens in place of
the class token. Expected top-1 after 1600 epochs of pretraining: B/16 83.6 % (their four runs:
83.63, 83.66, 83.52, 83.46), L/16 85.9 % (85.95, 85.87, 85.76, 85.88), H/14 86.9 %.

Cost: B/16 1.35e19 FLOP, L/16 2.4e19, H/14 6.4e19.

Differences from theirs:
- RandAugment has the operations of big_vision at a fixed magnitude. Theirs is timm's, which costs
  more on TPUs: --config.data.randaug_ops=timm_inc --config.data.randaug_std=0.5.
- Mixup and CutMix draw one value and pair images over the whole batch, not over the images of each
  GPU.
- The learning rate ends at 0, not at 1e-6.
- bfloat16 instead of float16 for matrix products and in the residual stream.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

# Variant -> (epochs, base learning rate for 256 images, layer decay, stochastic depth).
RECIPES = {
    "B/16": (100, 5e-4, 0.65, 0.1),
    "L/16": (50, 1e-3, 0.75, 0.2),
    "H/14": (50, 1e-3, 0.75, 0.3),
}
DATASET = "imagenet2012"
BATCH_SIZE = 1024
WARMUP_EPOCHS = 5


def get_config(arg="B/16"):
    """`arg`: VARIANT."""
    if arg not in RECIPES:
        raise UserError(
            f"configs/mae_finetune.py has no recipe for {arg}: use one of {', '.join(RECIPES)}"
        )
    epochs, base_lr, layer_decay, droppath = RECIPES[arg]
    examples = CATALOG[DATASET].examples["train"]

    config = ml_collections.ConfigDict()
    config.total_epochs = epochs
    config.image_size = 224
    config.mixup = 0.8
    config.cutmix = 1.0
    config.label_smoothing = 0.1
    config.data = dict(name=DATASET, split="train", batch_size=BATCH_SIZE, flip=True)
    config.data.update(crop="torchvision", area_min=0.08, method="bicubic")
    config.data.update(randaug_layers=2, randaug_magnitude=9.0, erase=0.25)
    # The mean of the patches has a LayerNorm of its own, and the encoder's last one is left out.
    config.model = dict(variant=arg, pool="gap", class_token=True, fc_norm=True, head_std=2e-5)
    config.model.update(droppath=droppath, dtype="bfloat16")
    config.init_allow = "fc_norm|encoder_norm"
    config.optim = dict(name="adam", b1=0.9, b2=0.999, schedule="cosine", wd=0.05)
    config.optim.update(
        lr=base_lr * BATCH_SIZE / 256,
        layer_decay=layer_decay,
        warmup_steps=round(WARMUP_EPOCHS * examples / BATCH_SIZE),
    )
    data = dict(split="validation", crop="central", fraction=0.875, method="bicubic")
    config.evals = dict(val=dict(every=2500, data=data))
    config.checkpoint = dict(every=1000)
    return config
