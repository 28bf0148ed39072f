"""Pretraining without labels on scikit-learn's scanned digits, small enough for a laptop.

    python -m vit_jax.train --config=configs/demo_unlabelled.py:mae --workdir=/tmp/vit_mae

then configs/demo_few_labels.py fine-tunes it. Expected: see docs/objectives.md.
"""

import ml_collections


def get_config(objective: str = "mae"):
    """`objective`: mae or masked_patches."""
    config = ml_collections.ConfigDict()
    config.objective = objective
    config.total_epochs = 100
    config.image_size = 24
    config.model = dict(
        variant="Ti/4", width=96, depth=4, mlp_dim=384, num_heads=3, pool="gap", posemb="learn"
    )
    config.data = dict(
        name="digits", split="train", batch_size=128, crop="inception", area_min=0.7, flip=False
    )
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=100, wd=0.05, grad_clip_norm=1.0
    )
    if objective == "mae":
        config.mae = dict(decoder_width=64, decoder_depth=2, decoder_heads=2)
    config.evals = dict(knn=dict(type="knn", every=420, data=dict(split="val")))
    config.pictures_every = 421
    config.checkpoint = dict(keep_last=1)
    return config
