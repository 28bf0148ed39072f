"""What the student of DINO learns from: the teacher's outputs, sharpened and kept from collapsing.

Two ways to spread them over the prototypes: centring (DINO, arXiv 2104.14294 section 3.1) and
Sinkhorn-Knopp (SwAV, arXiv 2006.09882; DINOv2, arXiv 2304.07193 section 4).
"""

import math

import jax
import jax.numpy as jnp

from vit_jax.models.dino import unit

CENTER_MOMENTUM = 0.9
ITERATIONS = 3  # of Sinkhorn-Knopp
TINY = 1e-30


def weighted_mean(x, weight):
    """Over all axes but the last: [..., n], weight [...] -> [n]."""
    axes = tuple(range(weight.ndim))
    return (x * weight[..., None]).sum(axes) / jnp.maximum(weight.sum(), 1.0)


def centered(logits, center, temperature):
    """[..., prototypes], [prototypes] -> probabilities [..., prototypes]."""
    return jax.nn.softmax((logits - center) / temperature)


def next_center(center, logits, weight):
    """The running mean of the logits, for the next step; weight [...]: 0 for those that do not
    count.
    """
    mean = weighted_mean(logits, weight)
    return center * CENTER_MOMENTUM + mean * (1 - CENTER_MOMENTUM)


def sinkhorn_knopp(logits, weight, temperature):
    """Probabilities [..., prototypes] with which every prototype is used equally often.

    Args:
      logits: [..., prototypes].
      weight: [...], 1 or 0; those with 0 do not count, and become 0.
    """
    axes = tuple(range(weight.ndim))
    q = weight[..., None] * jnp.exp((logits - logits.max()) / temperature)
    for _ in range(ITERATIONS):
        q = q / jnp.maximum(q.sum(axes), TINY)
        q = q / jnp.maximum(q.sum(-1, keepdims=True), TINY)
    return q


def collapse_metrics(probabilities, features, weight) -> dict:
    """Numbers that show a collapse.

    teacher_entropy: mean entropy of the outputs, and teacher_mean_entropy: entropy of the mean
    output, both as shares of log(prototypes). Their difference falls to 0 in a collapse, to one
    prototype or to all equally, since all images have the same output then. teacher_std: the
    standard deviation of the normalised features, times sqrt(embed): 1 if they are spread over the
    whole sphere, 0 if all are the same.

    Args:
      probabilities: [batch, 2, prototypes].
      features: [batch, 2, embed].
      weight: [batch, 2], 0 for what does not count.
    """
    largest = math.log(probabilities.shape[-1])
    entropy = jax.scipy.special.entr(probabilities).sum(-1, keepdims=True)
    mean = weighted_mean(probabilities, weight)
    features = unit(features, -1)
    variance = weighted_mean(jnp.square(features - weighted_mean(features, weight)), weight)
    return dict(
        teacher_entropy=weighted_mean(entropy, weight)[0] / largest,
        teacher_mean_entropy=jax.scipy.special.entr(mean).sum() / largest,
        teacher_std=jnp.sqrt(variance).mean() * math.sqrt(features.shape[-1]),
    )
