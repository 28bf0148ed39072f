"""Linear probing of masked autoencoders on ImageNet, arXiv 2111.06377 table 10: a head on the class
token, everything else frozen.

    python -m vit_jax.train --config=configs/mae_linear_probe.py:B/16 --config.init_from=mae_b16 \
        --workdir=gs://BUCKET/mae_b16_probe

The argument is VARIANT: B/16, L/16 or H/14; init_from is a run of configs/mae.py or any other
autoencoder that we load. The recipe is that of FINETUNE.md in facebookresearch/mae. Expected top-1
after 1600 epochs of pretraining, with their BatchNorm: B/16 68.0 % (their PyTorch code: 67.8 %),
L/16 75.8 % (76.0 %), H/14 76.6 % (77.2 %).

Cost: the forward pass of 90 epochs (B/16) or 50: B/16 4.1e18 FLOP, L/16 7.9e18, H/14 2.1e19.

Differences from theirs:
- There is no BatchNorm without parameters before the head. The function is the same, as such a
  BatchNorm is linear in evaluation; but it gives every model's features the same scale, so that one
  learning rate suits all. Here, try some of LR_GRID.
- The head starts at zero. LARS then takes the whole gradient in its first step, so the scale of
  this step is that of the learning rate.

Without training: an evaluation of type linear_probe fits the head by L-BFGS on features of
unaugmented images, which it standardises (docs/transfer.md).
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

EPOCHS = {"B/16": 90, "L/16": 50, "H/14": 50}
LR_GRID = (0.64, 2.0, 6.4, 20.0)  # theirs is 6.4: 0.1 for 256 images
DATASET = "imagenet2012"
BATCH_SIZE = 16_384
WARMUP_EPOCHS = 10


def get_config(arg="B/16"):
    """`arg`: VARIANT."""
    if arg not in EPOCHS:
        raise UserError(
            f"configs/mae_linear_probe.py has no recipe for {arg}: use one of {', '.join(EPOCHS)}"
        )
    examples = CATALOG[DATASET].examples["train"]

    config = ml_collections.ConfigDict()
    config.total_epochs = EPOCHS[arg]
    config.image_size = 224
    config.data = dict(name=DATASET, split="train", batch_size=BATCH_SIZE, flip=True)
    config.data.update(crop="torchvision", area_min=0.08, method="bicubic")
    config.model = dict(variant=arg, pool="tok", dtype="bfloat16")
    config.optim = dict(name="lars", lr=6.4, momentum=0.9, schedule="cosine", frozen="(?!head/).*")
    config.optim.warmup_steps = round(WARMUP_EPOCHS * examples / BATCH_SIZE)
    data = dict(split="validation", crop="central", fraction=0.875, method="bicubic")
    config.evals = dict(val=dict(every=500, data=data))
    config.checkpoint = dict(every=500)
    return config
