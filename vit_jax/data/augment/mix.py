"""mixup and CutMix on the device: images and labels are mixed with those of the row before."""

import jax
import jax.numpy as jnp

from vit_jax.data.augment import erase


def mix(x, lam):
    """Convex combination of every row with the one before it: x [batch, ...]."""
    return lam * x + (1.0 - lam) * jnp.roll(x, 1, axis=0)


def mixup(key, alpha: float, image, label, mask):
    """mixup (arXiv 1710.09412) as in big_vision: one lambda >= 1/2 per batch; the partner of an
    image is the row before.

    timm (0.3.2 to 1.0.31) does not require lambda >= 1/2. As the order of a pair is random, the
    distribution of the mixtures is the same.

    Args:
      key: PRNG key of the step.
      alpha: both parameters of the Beta distribution.
      image: [batch, H, W, 3] float.
      label: [batch, classes] float.
      mask: [batch]; a pair counts only if both images do.

    Returns:
      (image, label, mask) of the same shapes.
    """
    lam = jax.random.beta(key, alpha, alpha)
    lam = jnp.maximum(lam, 1.0 - lam)
    return mix(image, lam), mix(label, lam), mask * jnp.roll(mask, 1)


def cut_box(key, lam, height: int, width: int):
    """The box (top, bottom, left, right) that CutMix replaces: a share of 1 - lam of each image,
    clipped at its border.

    As in timm 0.3.2 to 1.0.28, the sides are even numbers of pixels, an odd one being rounded down
    (not so from 1.0.29 on), and the centre is a pixel drawn uniformly.
    """
    size = jnp.array([height, width])
    half = (size * jnp.sqrt(1.0 - lam)).astype(jnp.int32) // 2
    centre = jax.random.randint(key, [2], 0, size)
    top, left = jnp.maximum(centre - half, 0)
    bottom, right = jnp.minimum(centre + half, size)
    return top, bottom, left, right


def cutmix(key, alpha: float, image, label, mask):
    """CutMix (arXiv 1905.04899) as in timm 0.3.2 to 1.0.28: one box per batch, filled from the
    partner, which is the row before.

    Labels are mixed by the area of the clipped box. Arguments and results as for `mixup`.
    """
    lam_key, box_key = jax.random.split(key)
    height, width = image.shape[1:3]
    box = cut_box(box_key, jax.random.beta(lam_key, alpha, alpha), height, width)
    cut = erase.inside(box, height, width)
    image = jnp.where(cut[:, :, None], jnp.roll(image, 1, axis=0), image)
    return image, mix(label, 1.0 - cut.mean()), mask * jnp.roll(mask, 1)


def mix_batch(key, image, label, mask, mixup_alpha: float, cutmix_alpha: float):
    """mixup or CutMix. If both parameters are above 0, each has probability 0.5 for a batch, as in
    DeiT; if both are 0, nothing changes.

    Arguments and results as for `mixup`.
    """
    if not mixup_alpha and not cutmix_alpha:
        return image, label, mask
    if not cutmix_alpha:
        return mixup(key, mixup_alpha, image, label, mask)
    if not mixup_alpha:
        return cutmix(key, cutmix_alpha, image, label, mask)
    coin_key, key = jax.random.split(key)

    def by_mixup(*batch):
        return mixup(key, mixup_alpha, *batch)

    def by_cutmix(*batch):
        return cutmix(key, cutmix_alpha, *batch)

    coin = jax.random.bernoulli(coin_key)
    return jax.lax.cond(coin, by_mixup, by_cutmix, image, label, mask)
