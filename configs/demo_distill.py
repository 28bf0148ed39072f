"""Distillation on scikit-learn's scanned digits: a small student learns from 50 labels, or from a
teacher that has seen all labels, without any of its own.

    python -m vit_jax.train --config=configs/demo.py --workdir=/tmp/vit_demo
    python -m vit_jax.train --config=configs/demo_distill.py --workdir=/tmp/vit_alone
    python -m vit_jax.train --config=configs/demo_distill.py:/tmp/vit_demo --workdir=/tmp/vit_taught

The argument is the teacher. Expected: see docs/objectives.md. Cost: half a minute on two CPU cores.
"""

import ml_collections


def get_config(teacher=""):
    """A ViT of 2 blocks and width 64 with 4 x 4 patches on images of 16 x 16 pixels."""
    config = ml_collections.ConfigDict()
    config.total_steps = 800
    config.image_size = 16
    config.model = dict(
        variant="Ti/4", width=64, depth=2, mlp_dim=256, num_heads=2, pool="tok", posemb="learn"
    )
    config.data = dict(
        name="digits", split="train", batch_size=50, crop="inception", area_min=0.7, flip=False
    )
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=20, wd=0.05, grad_clip_norm=1.0
    )
    if teacher:
        config.objective = "distill"
        config.distill = dict(teacher=teacher, kind="soft", weight=1.0, temperature=1.0)
    else:
        config.data.subset = "50"
    config.evals = dict(test=dict(data=dict(split="test")))
    config.checkpoint = dict(keep_last=1)
    return config
