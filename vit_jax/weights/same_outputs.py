"""Whether two files have the same model: what it computes of random images."""

import jax
import numpy as np

from vit_jax.weights import autoencoder, load
from vit_jax.weights.formats.weights import Weights

# Largest difference of the logits in a correct conversion, relative to the largest logit.
TOLERANCE = 1e-4


def logits(weights: Weights, image) -> np.ndarray:
    """Output of the model that the weights are for, in full float32: [batch, classes].

    If all heads are zero, which would hide every error, it is their input. Of an autoencoder, it is
    what its decoder predicts.
    """
    if weights.objective == "mae" and weights.extra:
        return predicted_pixels(weights, image)
    model, params = load.build(weights)
    heads = [weights.params.get(name) for name in ("head/kernel", "head_dist/kernel")]
    has_head = any(head is not None and head.any() for head in heads)

    def apply(params, image):
        if has_head:
            return model.apply({"params": params}, image)
        return load.features(model, params, image)

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(apply)(params, image))


def predicted_pixels(weights: Weights, image) -> np.ndarray:
    """Of a masked autoencoder, for random patches: [batch, patches, h * w * 3]."""
    model, params = autoencoder.build(weights)
    noise = np.random.default_rng(0).uniform(size=(len(image), model.num_patches))
    order = noise.argsort(axis=1)
    with jax.default_matmul_precision("highest"):
        keep = order[:, : model.num_kept]
        return np.asarray(jax.jit(model.apply)(params, image, keep, order.argsort(axis=1)))


def difference(weights, converted, model) -> tuple[float, float]:
    """(largest difference of the logits on two random images, tolerance)."""
    image = np.random.default_rng(0).uniform(-1, 1, (2, *model.image_size, 3)).astype(np.float32)
    before = logits(weights, image)
    after = logits(converted, image)
    if before.shape != after.shape:
        return float("inf"), 0.0
    return float(np.abs(before - after).max()), TOLERANCE * float(np.abs(before).max())
