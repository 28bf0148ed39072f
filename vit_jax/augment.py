"""What happens to images on the device: normalisation and mixing."""

import jax
import jax.numpy as jnp
import numpy as np


def normalize(image, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)):
    """uint8 [batch, H, W, 3] -> float32 (image / 255 - mean) / std; the defaults give [-1, 1]."""
    mean, std = np.asarray(mean), np.asarray(std)
    return image.astype(jnp.float32) / jnp.asarray(255 * std, jnp.float32) - jnp.asarray(mean / std, jnp.float32)


def mix(x, lam):
    """Convex combination of every row with the one before it: x [batch, ...]."""
    return lam * x + (1.0 - lam) * jnp.roll(x, 1, axis=0)


def mixup(key, alpha: float, image, label, mask):
    """mixup (arXiv 1710.09412) as in big_vision: one lambda >= 1/2 per batch, partner is the row before.

    Args:
      key: PRNG key of the step.
      alpha: both parameters of the Beta distribution.
      image: [batch, H, W, 3] float.
      label: [batch, classes] float.
      mask: [batch]; a pair counts only when both images do.

    Returns:
      (image, label, mask) of the same shapes.
    """
    lam = jax.random.beta(key, alpha, alpha)
    lam = jnp.maximum(lam, 1.0 - lam)
    return mix(image, lam), mix(label, lam), mask * jnp.roll(mask, 1)
