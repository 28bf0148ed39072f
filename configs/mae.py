"""Masked autoencoders, arXiv 2111.06377: pretraining on the images of ImageNet, without labels.

    python -m vit_jax.train --config=configs/mae.py:L/16 --workdir=gs://BUCKET/mae_l16

The argument is VARIANT: B/16, L/16 or H/14. The recipe is that of the paper's table 8 and of
PRETRAIN.md in facebookresearch/mae: 1600 epochs (--config.total_epochs=800 is the length of their
ablations). Expected top-1 of ImageNet after configs/mae_finetune.py: B/16 83.6 %, L/16 85.9 %, H/14
86.9 %; after 800 epochs L/16 85.4 %. After configs/mae_linear_probe.py: B/16 68.0 %, L/16 75.8 %,
H/14 76.6 %. With --config.mae.norm_pixels=False, whose pixels look better, fine-tuning reaches
83.3 %, 85.1 % and 86.2 %.

Your own images: --config.data.name=folder:PATH and --config.evals={}, with
--config.optim.warmup_steps of a fortieth of the run. --config.init_from continues from published
autoencoders, and from encoders with a new decoder.

Cost: 1600 epochs: B/16 1.2e20 FLOP, L/16 2.6e20, H/14 6.0e20.

Differences from theirs:
- Query, key and value have Xavier initialisation each, as in the paper's TensorFlow code; in their
  PyTorch code they are one matrix.
- bfloat16 instead of float16 for matrix products and in the residual stream.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError

VARIANTS = ("B/16", "L/16", "H/14")
DATASET = "imagenet2012"
BATCH_SIZE = 4096
BASE_LR = 1.5e-4  # for 256 images
WARMUP_EPOCHS = 40


def get_config(arg="B/16"):
    """`arg`: VARIANT."""
    if arg not in VARIANTS:
        raise UserError(f"configs/mae.py has no recipe for {arg}: use one of {', '.join(VARIANTS)}")
    examples = CATALOG[DATASET].examples["train"]

    config = ml_collections.ConfigDict()
    config.objective = "mae"
    config.mae = dict(mask_ratio=0.75, norm_pixels=True)
    config.mae.update(decoder_width=512, decoder_depth=8, decoder_heads=16)
    config.total_epochs = 1600
    config.image_size = 224
    config.data = dict(name=DATASET, split="train", batch_size=BATCH_SIZE, flip=True)
    config.data.update(crop="torchvision", area_min=0.2, method="bicubic")
    config.model = dict(variant=arg, pool="tok", gelu="erf", ln_eps=1e-6, dtype="bfloat16")
    config.model.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config.optim = dict(name="adam", b1=0.9, b2=0.95, schedule="cosine", wd=0.05)
    config.optim.update(
        lr=BASE_LR * BATCH_SIZE / 256,
        warmup_steps=round(WARMUP_EPOCHS * examples / BATCH_SIZE),
        wd_mults=((".*/kernel|cls|decoder/mask", 1.0),),
    )
    near = dict(split="validation", train_split="train[:10%]", crop="central")
    config.evals = dict(near=dict(type="knn", every=25_000, data=near))
    config.pictures_every = 25_000
    config.checkpoint = dict(every=1000)
    return config
