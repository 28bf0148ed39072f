"""What tokens hold: their norms, how alike patches are, and principal components as colours."""

import numpy as np

from vit_jax.figures.attention import namespace
from vit_jax.figures.vectors import cosine_similarity, finite_vectors, principal_components


def token_norms(tokens):
    """Lengths of tokens. A few that are far longer than the others hold what is true of the whole
    image (arXiv 2309.16588, section 2), unless registers do.

    Args:
      tokens: [..., embed], such as the outputs of layers; NumPy's or JAX's.

    Returns:
      [...].
    """
    tokens, xp = namespace(tokens)
    return xp.sqrt((tokens * tokens).sum(axis=-1))


def principal_colors(features) -> np.ndarray:
    """The three principal components of patch features as red, green and blue (as in arXiv
    2304.07193, figure 1, but without a threshold): parts that are alike have the same colour in all
    images.

    Args:
      features: [images, h, w, embed].

    Returns:
      [images, h, w, 3] from 0, for the least of a component in all images, to 1 for the largest. A
      component that is missing, or is the same everywhere, is 0.5.

    Raises:
      ValueError: there are none, or they are not finite.
    """
    features = np.asarray(features)
    vectors = finite_vectors(features.reshape(-1, features.shape[-1]))
    centred = vectors - vectors.mean(axis=0)
    found = centred @ principal_components(vectors, 3).T
    found = np.pad(found, ((0, 0), (0, 3 - found.shape[1])))
    low = found.min(axis=0)
    span = found.max(axis=0) - low
    is_flat = span <= 1e-9 * np.abs(vectors).max()
    colors = np.where(is_flat, 0.5, (found - low) / np.where(is_flat, 1, span))
    return colors.reshape(*features.shape[:-1], 3)


def patch_similarity(features, queries) -> np.ndarray:
    """Cosine similarity of chosen patches with all patches of their image.

    Args:
      features: [images, h, w, embed].
      queries: (row, column) of each chosen patch, the same in every image.

    Returns:
      [images, queries, h, w], -1 to 1; 0 for features of zeros.

    Raises:
      ValueError: the features are not finite.
    """
    features = np.asarray(features)
    rows, columns = np.transpose(queries)
    similar = [
        cosine_similarity(image[rows, columns], image.reshape(-1, image.shape[-1]))
        for image in features
    ]
    return np.reshape(similar, (len(features), len(rows), *features.shape[1:3]))


def spread_queries(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """(row, column) of the centre patch, and of one in each quarter; each once."""
    places = [(2, 2), (1, 1), (1, 3), (3, 1), (3, 3)]  # in quarters of the sides
    found = [(grid[0] * y // 4, grid[1] * x // 4) for y, x in places]
    return list(dict.fromkeys(found))
