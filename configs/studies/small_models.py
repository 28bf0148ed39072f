"""A small ViT and a small ResNet on `scattered_digits`, for the studies of laptop.py.

    python -m vit_jax.train --config=configs/studies/small_models.py:ViT --workdir=DIR

The ViT's learning rate is the better one of 0.001 and 0.003; for the ResNet only 0.001 was tried.

Cost: six minutes of one CPU core (ViT), four (ResNet). Expected, three seeds: test top-1 of 78 %
± 15 (ViT) and 96 % ± 1 (ResNet).
"""

import ml_collections

from vit_jax.models import bit

SIDE = 32  # pixels


def resnet(num_classes: int, image_size) -> bit.ResNet:
    """Two stages of two bottlenecks, half as wide as a ResNet-50."""
    fields = dict(num_classes=num_classes, image_size=image_size)
    return bit.ResNet(units=(2, 2), width_factor=0.5, **fields)


LRS = {"ViT": 0.003, "ResNet": 0.001}
MODELS = {
    "ViT": dict(variant="Ti/4", width=64, depth=4, mlp_dim=256, num_heads=4, pool="gap"),
    "ResNet": dict(variant="small_models:resnet"),
}


def get_config(model: str = "ViT"):
    """`model`: ViT or ResNet."""
    config = ml_collections.ConfigDict()
    config.total_steps = 1500
    config.image_size = SIDE
    config.log_every = 50
    config.model = MODELS[model]
    config.data = dict(name="scattered_digits:ScatteredDigits", split="train", batch_size=128)
    config.data.update(crop="resize", flip=False)
    config.optim = dict(name="adam", lr=LRS[model], schedule="cosine", warmup_steps=100)
    config.optim.update(wd=0.05, grad_clip_norm=1.0)
    config.evals = {split: dict(every=250, data=dict(split=split)) for split in ("val", "test")}
    config.checkpoint = dict(every=250, keep_last=1)
    return config
