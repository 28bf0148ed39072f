"""A small ViT, ResNet and hybrid on `scattered_digits`, for the studies of laptop.py.

    python -m vit_jax.train --config=configs/studies/small_models.py:ViT --workdir=DIR

The learning rate of the ViT and of the hybrid is the better one of 0.001 and 0.003; for the ResNet
only 0.001 was tried.

Cost: six minutes of one CPU core (ViT), four (ResNet), seven (hybrid). Expected, three seeds: test
top-1 of 78 % ± 15 (ViT), 96 % ± 1 (ResNet) and 97 % ± 2 (hybrid).
"""

import ml_collections

from vit_jax.models import bit, vit

SIDE = 32  # pixels
ENCODER = dict(width=64, depth=4, mlp_dim=256, num_heads=4, pool="gap")


def resnet(num_classes: int, image_size) -> bit.ResNet:
    """Two stages of two bottlenecks, half as wide as a ResNet-50."""
    fields = dict(num_classes=num_classes, image_size=image_size)
    return bit.ResNet(units=(2, 2), width_factor=0.5, **fields)


def hybrid(num_classes: int, image_size) -> vit.VisionTransformer:
    """The ViT on the output of a ResNet's first stage, of two bottlenecks, which has as many
    positions as the ViT has patches.
    """
    size = (image_size, image_size)
    stem = dict(stem_units=(2,), stem_width=32, patch_size=(1, 1))
    return vit.VisionTransformer(num_classes=num_classes, image_size=size, **stem, **ENCODER)


LRS = {"ViT": 0.003, "ResNet": 0.001, "hybrid": 0.003}
MODELS = {
    "ViT": dict(variant="Ti/4", **ENCODER),
    "ResNet": dict(variant="small_models:resnet"),
    "hybrid": dict(variant="small_models:hybrid"),
}


def get_config(model: str = "ViT"):
    """`model`: ViT, ResNet or hybrid."""
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
