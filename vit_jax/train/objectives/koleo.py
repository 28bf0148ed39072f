"""The KoLeo regularizer (arXiv 1806.03198; DINOv2, arXiv 2304.07193 section 4): features of
different images spread over the sphere.
"""

import jax
import jax.numpy as jnp

from vit_jax.models.dino import unit

GROUP = 16  # examples among which the nearest neighbour is searched
EPS = 1e-8


def group_size(batch_size: int) -> int:
    return min(GROUP, batch_size)


def of_group(x, mask):
    """-log of the distance of each to its nearest neighbour: [group, embed], mask [group] ->
    [group]; 0 if there is no other.
    """
    cosine = jnp.where(mask > 0, x @ x.T, -2.0)
    cosine = jnp.where(jnp.eye(len(x), dtype=bool), -2.0, cosine)
    nearest = jax.lax.stop_gradient(cosine).argmax(axis=1)
    distance = jnp.linalg.norm(x - x[nearest] + EPS, axis=-1)
    return jnp.where(cosine.max(axis=1) > -2.0, -jnp.log(distance + EPS), 0.0)


def koleo(features, mask):
    """The loss of each example: [batch, embed], mask [batch] -> [batch].

    Groups are those of equal remainder of the example's number, which is how microbatches are
    taken from a batch: as long as a microbatch is made of whole groups, it changes no number.
    """
    batch, embed = features.shape
    size = group_size(batch)
    groups = features.astype(jnp.float32).reshape(size, batch // size, embed)
    losses = jax.vmap(of_group, in_axes=1, out_axes=1)
    return losses(unit(groups, -1), mask.reshape(size, batch // size)).reshape(batch)
