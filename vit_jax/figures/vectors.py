"""Principal components and cosine similarity of vectors, in float64."""

import numpy as np


def finite_vectors(vectors) -> np.ndarray:
    """float64 [count, width]; a ValueError unless all numbers are finite."""
    vectors = np.asarray(vectors, np.float64)
    if vectors.ndim != 2 or not vectors.size:
        raise ValueError(f"vectors {vectors.shape}: give [count, width], and at least one")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors have numbers that are not finite")
    return vectors


def principal_components(vectors, count: int) -> np.ndarray:
    """Directions in which vectors differ most, as scikit-learn's PCA: the largest entry of each is
    positive.

    Args:
      vectors: [vectors, width].
      count: how many; there are at most as many as vectors, or as their width.

    Returns:
      [components, width], each of length 1, the most important first.

    Raises:
      ValueError: the vectors have another shape, or are not finite.
    """
    vectors = finite_vectors(vectors)
    centred = vectors - vectors.mean(axis=0)
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    components = components[:count]
    largest = np.abs(components).argmax(axis=1)
    signs = np.sign(components[np.arange(len(components)), largest])
    return components * signs[:, None]


def cosine_similarity(vectors, others) -> np.ndarray:
    """Cosine of the angle between all pairs: [count, width], [other, width] -> [count, other].

    It is 0 for a vector of zeros, as in scikit-learn.

    Raises:
      ValueError: the vectors have another shape, or are not finite.
    """
    return unit(finite_vectors(vectors)) @ unit(finite_vectors(others)).T


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1 in the same directions; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)
