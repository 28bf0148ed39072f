r"""The fine-tuning of `make demo`: the pretrained ViT of configs/demo.py at a higher resolution.

    python -m vit_jax.train --config=configs/demo_finetune.py --config.init_from=/tmp/vit_demo \
        --workdir=/tmp/vit_32

Expected: about 98.5 % validation and test top-1. Cost: less than a minute on two CPU cores.
"""

import ml_collections


def get_config():
    """32 x 32 instead of 24 x 24 pixels: 64 instead of 36 patches, and a new head."""
    config = ml_collections.ConfigDict()
    config.total_epochs = 20
    config.mixup = 0.3
    config.image_size = 32
    config.log_every = 10
    config.pictures_every = 84
    config.model = dict(
        variant="Ti/4", width=96, depth=4, mlp_dim=384, num_heads=3, pool="tok", posemb="learn"
    )
    config.data = dict(
        name="digits", split="train", batch_size=128, crop="inception", area_min=0.9, flip=False
    )
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=10, wd=0.05, grad_clip_norm=1.0
    )
    config.evals = dict(val=dict(every=20, data=dict(split="val")))
    config.checkpoint = dict(every=50, keep_last=1)
    return config
