"""Fine-tuning with 100 labels of scikit-learn's scanned digits.

    python -m vit_jax.train --config=configs/demo_few_labels.py --workdir=/tmp/vit_100 \
        --config.init_from=/tmp/vit_mae

Without `init_from` it starts from fresh parameters, as a comparison. Expected: see
docs/objectives.md.
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.total_steps = 200
    config.image_size = 24
    config.model = dict(
        variant="Ti/4", width=96, depth=4, mlp_dim=384, num_heads=3, pool="gap", posemb="learn"
    )
    config.data = dict(
        name="digits", split="train", subset="100", batch_size=50, crop="inception", area_min=0.7
    )
    config.data.flip = False
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=20, wd=0.05, grad_clip_norm=1.0
    )
    config.evals = dict(test=dict(data=dict(split="test")))
    config.checkpoint = dict(keep_last=1)
    return config
