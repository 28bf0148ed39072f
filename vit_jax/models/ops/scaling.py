"""The scale of dot-product attention."""

import jax.numpy as jnp


def scaled(query):
    """Queries [..., kv] divided by sqrt(kv) (arXiv 1706.03762 equation 1)."""
    return query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
