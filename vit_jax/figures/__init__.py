"""What a model has learned, as numbers and as pictures: filters, position embeddings, where it
looks, and what its tokens hold.

The functions here take and return arrays; `python -m vit_jax.figures` draws them for any weights.
"""

from vit_jax.figures.attention import attention_map, head_maps, mean_distance, rollout
from vit_jax.figures.embeddings import filters, first_kernel, position_similarity
from vit_jax.figures.tokens import patch_similarity, principal_colors, token_norms

__all__ = [
    "attention_map",
    "filters",
    "first_kernel",
    "head_maps",
    "mean_distance",
    "patch_similarity",
    "position_similarity",
    "principal_colors",
    "rollout",
    "token_norms",
]
