"""What happens to images on the device: normalisation, mirroring, erasing and mixing."""

import jax
import jax.numpy as jnp

from vit_jax.data.augment import erase


def smooth(label, share: float):
    """Takes `share` of each label [batch, classes] and gives it to all classes alike (arXiv
    1512.00567 section 7).
    """
    return label * (1.0 - share) + share / label.shape[-1] if share else label


def mix(x, lam):
    """Convex combination of every row with the one before it: x [batch, ...]."""
    return lam * x + (1.0 - lam) * jnp.roll(x, 1, axis=0)


def mixup(key, alpha: float, image, label, mask):
    """mixup (arXiv 1710.09412) as in big_vision: one lambda >= 1/2 per batch, partner is the row
    before.

    timm doesn't ask for lambda >= 1/2. As pairs are made without regard to their order, the
    mixtures are as likely.

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


def cut_box(key, lam, height: int, width: int):
    """The box (top, bottom, left, right) that CutMix replaces: share 1 - lam of each image, cut at
    its border.

    As in timm the sides are whole even numbers, and the centre is a pixel drawn uniformly.
    """
    size = jnp.array([height, width])
    half = (size * jnp.sqrt(1.0 - lam)).astype(jnp.int32) // 2
    centre = jax.random.randint(key, [2], 0, size)
    (top, left), (bottom, right) = jnp.maximum(centre - half, 0), jnp.minimum(centre + half, size)
    return top, bottom, left, right


def cutmix(key, alpha: float, image, label, mask):
    """CutMix (arXiv 1905.04899) as in timm: one box per batch, filled from the partner, which is
    the row before.

    Labels are mixed by the area that the box really has. Arguments and results as for `mixup`.
    """
    lam_key, box_key = jax.random.split(key)
    height, width = image.shape[1:3]
    cut = erase.inside(
        cut_box(box_key, jax.random.beta(lam_key, alpha, alpha), height, width), height, width
    )
    image = jnp.where(cut[:, :, None], jnp.roll(image, 1, axis=0), image)
    return image, mix(label, 1.0 - cut.mean()), mask * jnp.roll(mask, 1)


def mix_batch(key, image, label, mask, mixup_alpha: float, cutmix_alpha: float):
    """mixup or CutMix, by a coin per batch where both parameters are above 0, as in DeiT; nothing
    where both are 0.

    Arguments and results as for `mixup`.
    """
    if not cutmix_alpha:
        return mixup(key, mixup_alpha, image, label, mask) if mixup_alpha else (image, label, mask)
    if not mixup_alpha:
        return cutmix(key, cutmix_alpha, image, label, mask)
    coin_key, key = jax.random.split(key)
    ways = [
        lambda *batch: mixup(key, mixup_alpha, *batch),
        lambda *batch: cutmix(key, cutmix_alpha, *batch),
    ]
    return jax.lax.cond(jax.random.bernoulli(coin_key), *ways, image, label, mask)
