"""Masked patch prediction of the ViT paper, arXiv 2010.11929 sections 4.6 and B.1.2: pretraining
without labels.

    python -m vit_jax.train --config=configs/masked_patches.py:B/16,jft300m \
        --workdir=gs://BUCKET/mpp_b16

The argument is VARIANT,DATASET. Expected for B/16 on JFT-300M: 79.9 % top-1 on ImageNet after
configs/finetune.py:B/16,imagenet2012, 2 % more than from scratch and 4 % less than after supervised
pretraining. The paper says that more than 100,000 steps add little, and that pretraining on
ImageNet gains about as much: other data sets than jft300m have these 100,000 steps.

Its variants: --config.masked_patches.target=colors_4x4 or pixels (somewhat worse), and
--config.masked_patches.ratio=0.15 (slightly worse). They were ranked by few-shot accuracy, which
`evals` measures with 5 and 10 images per class. What the paper leaves open is decided in
vit_jax/train/objectives/masked_patches.py.

Cost: B/16, 1,000,000 steps: 4.3e20 FLOP.
"""

import ml_collections

BATCH_SIZE = 4096


def get_config(arg="B/16,imagenet2012"):
    """`arg`: VARIANT,DATASET."""
    variant, dataset = arg.split(",", 1)

    config = ml_collections.ConfigDict()
    config.objective = "masked_patches"
    config.masked_patches = dict(ratio=0.5, target="mean_color")
    config.total_steps = 1_000_000 if dataset == "jft300m" else 100_000
    config.image_size = 224
    config.data = dict(
        name=dataset, split="train", batch_size=BATCH_SIZE, crop="inception", flip=True
    )
    config.model = dict(variant=variant, pool="tok", dtype="bfloat16")
    config.optim = dict(name="adam", b1=0.9, b2=0.999, lr=2e-4, schedule="cosine", wd=0.1)
    config.optim.update(warmup_steps=10_000, momentum_dtype="bfloat16", wd_times_lr=True)
    few = dict(name="imagenet2012", split="validation", train_split="train", crop="central")
    config.evals = dict(few=dict(type="fewshot", every=25_000, shots=(5, 10), data=few))
    config.pictures_every = 5000
    config.checkpoint = dict(every=1000)
    return config
