"""pilot"""

import ml_collections

from vit_jax.models import bit


def resnet(num_classes: int, image_size):
    return bit.ResNet(
        num_classes=num_classes, image_size=image_size, units=(2, 2), width_factor=0.5
    )


def get_config(model: str = "vit"):
    config = ml_collections.ConfigDict()
    config.total_steps = 1000
    config.image_size = 32
    config.log_every = 50
    vit = dict(variant="Ti/4", width=64, depth=4, mlp_dim=256, num_heads=4, pool="gap")
    config.model = vit if model == "vit" else dict(variant="laptop:resnet")
    config.data = dict(
        name="scattered_digits:split", split="train", batch_size=128, flip=False, crop="resize"
    )
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=100, wd=0.05, grad_clip_norm=1.0
    )
    config.evals = dict(val=dict(every=200, data=dict(split="val")))
    config.checkpoint = dict(every=1000, keep_last=1)
    return config
