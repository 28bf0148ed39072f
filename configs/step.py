"""The default of `vit_jax.benchmark step|checkpoint|startup`: supervised training of a plain ViT at
224 pixels.

    python -m vit_jax.benchmark step --models=Ti/16:16,S/16:8

Cost: a minute per model on two CPU cores. It is not meant to reach any accuracy: it has as many
classes as ImageNet-1k, but its images are scanned digits.
"""

import ml_collections


def get_config(variant: str = "Ti/16"):
    """The model and optimizer of big_vision's plain ViT baseline, in bfloat16, with a batch for a
    CPU.
    """
    config = ml_collections.ConfigDict()
    config.total_steps = 1000
    config.image_size = 224
    config.model = dict(
        variant=variant, num_classes=1000, pool="gap", posemb="sincos2d", dtype="bfloat16"
    )
    config.data = dict(name="digits", split="train", batch_size=16)
    config.optim = dict(
        name="adam", lr=1e-3, schedule="cosine", warmup_steps=100, wd=1e-4, wd_times_lr=False
    )
    config.optim.update(momentum_dtype="bfloat16", grad_clip_norm=1.0)
    return config
