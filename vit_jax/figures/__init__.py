"""What a model has learned, as numbers and as pictures: filters, position embeddings, where it
looks, and what its tokens hold.

The functions here take and return arrays; `python -m vit_jax.figures` draws them for any weights.
"""

from vit_jax.figures.attention import mean_distance, rollout

__all__ = ["mean_distance", "rollout"]
