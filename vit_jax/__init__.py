"""Pretrain, fine-tune and evaluate Vision Transformers in JAX, from one device to a pod."""

import sys

from vit_jax import errors

__version__ = "0.1.0"

# python -m vit_jax.COMMAND, whose imports follow
if sys.argv[:1] == ["-m"] and any(f"{word}.".startswith("vit_jax.") for word in sys.orig_argv):
    errors.end_on_signals()


def create_model(variant=None, num_classes=1000, image_size=224, **overrides):
    """Builds a model by name, such as "B/16" or "R50+B/16": see `vit_jax.models.create.create`."""
    from vit_jax.models import create

    return create.create(variant, num_classes, image_size, **overrides)


def from_pretrained(path, num_classes=None, image_size=None, grid=None, **overrides):
    """Loads (model, params) from weights of ours or published ones: see
    `vit_jax.weights.load.from_pretrained`.
    """
    from vit_jax.weights import load as pretrained

    return pretrained.from_pretrained(path, num_classes, image_size, grid, **overrides)


def features(model, params, image):
    """What the head reads, [batch, embed]: see `vit_jax.weights.load.features`."""
    from vit_jax.weights import load as pretrained

    return pretrained.features(model, params, image)
