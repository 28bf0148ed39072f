"""DINO, arXiv 2104.14294, and DINOv2, arXiv 2304.07193: pretraining on the images of ImageNet,
without labels.

    python -m vit_jax.train --config=configs/dino.py:s16 --workdir=gs://BUCKET/dino_s16

The argument names a run whose settings and result are published:
- s16: S/16, the 100 epochs in the README of facebookresearch/dino: k-NN 69.3 %, linear 74.0 %.
- b16: B/16, the 400 epochs of the published weights, whose settings are quoted here at second hand:
  k-NN 76.1 %, linear 78.2 %.
- l16: L/16 with iBOT and KoLeo, dinov2/configs/train/vitl16_short.yaml of facebookresearch/dinov2,
  125,000 steps: k-NN 81.6 %, linear 82.9 %.
All are top-1 of ImageNet's validation images by features of the teacher. The run ends with k-NN of
20 neighbours as theirs; "linear" is a classifier that they train with augmentation.

Your own images: --config.data.name=folder:PATH and --config.evals={}, with fewer steps of warm-up
in optim and dino. With batches of 256, they recommend --config.optim.ema_decay=0.9995.

Cost: s16 1.5e19 FLOP, b16 2.4e20, l16 4.0e20.

Differences from theirs:
- Gradients are clipped by the norm of all; DINO clips each array, DINOv2 backbone and heads.
- Learning rates rise from 0 and end at 0, not at 1e-6 or 2e-6.
- Kernels have Xavier initialisation, class tokens are 0; theirs are normal with a standard
  deviation of 0.02, as kernels are with --config.model.weight_init=timm.
- Positions of local crops are resampled bicubically with antialiasing; theirs without.
- bfloat16 instead of float16 (B/16: float32).
- l16: one of the two global views of each image has hidden patches; theirs are half of all views.
  KoLeo looks for neighbours among 16 images, not 64, and prototypes keep norm 1.
"""

import dataclasses
import math

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

DATASET = "imagenet2012"


@dataclasses.dataclass(frozen=True)
class Recipe:
    variant: str
    batch_size: int
    epoch_steps: int
    epochs: int
    lr: float
    momentum: float
    clip: float
    droppath: float
    temperature: float
    temperature_epochs: int  # of its warm-up
    freeze_epochs: int  # of the last layer
    global_area: tuple[float, float]
    local_area: tuple[float, float]
    local_count: int


EXAMPLES = CATALOG[DATASET].examples["train"]
RECIPES = {
    "s16": Recipe(
        variant="S/16",
        batch_size=512,
        epoch_steps=EXAMPLES // 512,
        epochs=100,
        lr=5e-4 * 512 / 256,
        momentum=0.996,
        clip=3.0,
        droppath=0.1,
        temperature=0.04,
        temperature_epochs=0,
        freeze_epochs=1,
        global_area=(0.4, 1.0),
        local_area=(0.05, 0.4),
        local_count=8,
    ),
    "b16": Recipe(
        variant="B/16",
        batch_size=1024,
        epoch_steps=EXAMPLES // 1024,
        epochs=400,
        lr=7.5e-4 * 1024 / 256,
        momentum=0.996,
        clip=0.3,
        droppath=0.1,
        temperature=0.07,
        temperature_epochs=50,
        freeze_epochs=3,
        global_area=(0.25, 1.0),
        local_area=(0.05, 0.25),
        local_count=10,
    ),
    "l16": Recipe(
        variant="L/16",
        batch_size=2048,
        epoch_steps=1250,
        epochs=100,
        lr=4e-3 * math.sqrt(2048 / 1024),
        momentum=0.992,
        clip=3.0,
        droppath=0.3,
        temperature=0.07,
        temperature_epochs=30,
        freeze_epochs=1,
        global_area=(0.32, 1.0),
        local_area=(0.05, 0.32),
        local_count=8,
    ),
}
WARMUP_EPOCHS = 10


def get_config(arg="s16"):
    """`arg`: s16, b16 or l16."""
    if arg not in RECIPES:
        raise UserError(f"configs/dino.py has no recipe {arg}: use one of {', '.join(RECIPES)}")
    recipe = RECIPES[arg]
    epoch = recipe.epoch_steps

    config = ml_collections.ConfigDict()
    config.objective = "dino"
    config.total_steps = recipe.epochs * epoch
    config.image_size = 224
    config.data = dict(name=DATASET, split="train", batch_size=recipe.batch_size, flip=True)
    config.data.views = dict(
        global_area=recipe.global_area,
        local_area=recipe.local_area,
        local_count=recipe.local_count,
        local_size=96,
    )
    config.dino = dict(
        prototypes=65_536,
        head_width=2048,
        bottleneck=256,
        centering="centering",
        teacher_temperature=recipe.temperature,
        temperature_warmup_steps=recipe.temperature_epochs * epoch,
        freeze_last_layer=recipe.freeze_epochs * epoch,
    )
    config.model = dict(variant=recipe.variant, pool="tok", gelu="erf", droppath=recipe.droppath)
    config.model.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), dtype="bfloat16")
    config.optim = dict(name="adam", lr=recipe.lr, schedule="cosine", b1=0.9, b2=0.999)
    config.optim.update(
        warmup_steps=WARMUP_EPOCHS * epoch,
        wd=0.04,
        wd_end=0.4,
        wd_mults=((".*/kernel|cls|mask|.*/pos_embedding", 1.0),),
        grad_clip_norm=recipe.clip,
        ema_decay=recipe.momentum,
    )
    if arg == "l16":
        config.dino.update(ibot=True, shared_head=True, koleo=0.1)
        config.model.update(layer_scale=1e-5, droppath_shape="constant")
        config.optim.update(layer_decay=0.9, lr_mults=(("embedding/.*", 0.2),))
    else:
        config.dino.update(ibot=False, koleo=0.0)
    near = dict(split="validation", train_split="train[:10%]", crop="central")
    whole = near | dict(train_split="train")
    config.evals = dict(near=dict(type="knn", every=12_500, data=near))
    config.evals.knn = dict(type="knn", data=whole)
    config.checkpoint = dict(every=1000)
    return config
