"""The pretraining of `make demo`: a small ViT on scikit-learn's scanned digits.

python -m vit_jax.train --config=configs/demo.py --workdir=/tmp/vit_demo

Expected: about 97.5 % validation top-1. Cost: a minute on two CPU cores.
"""

import ml_collections


def get_config():
    """A ViT of 4 blocks and width 96 with 4 x 4 patches on images of 24 x 24 pixels."""
    config = ml_collections.ConfigDict()
    config.total_epochs = 50
    config.mixup = 0.3
    config.image_size = 24
    config.log_every = 10
    config.pictures_every = 211
    config.model = dict(
        variant="Ti/4", width=96, depth=4, mlp_dim=384, num_heads=3, pool="tok", posemb="learn"
    )
    config.data = dict(
        name="digits", split="train", batch_size=128, crop="inception", area_min=0.9, flip=False
    )
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=50, wd=0.05, grad_clip_norm=1.0
    )
    config.evals = dict(val=dict(every=60, data=dict(split="val")))
    config.checkpoint = dict(every=84, keep_last=1)
    return config
