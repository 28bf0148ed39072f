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
    components = leading_directions(centred, count)
    largest = np.abs(components).argmax(axis=1)
    signs = np.sign(components[np.arange(len(components)), largest])
    return components * signs[:, None]


def leading_directions(centred: np.ndarray, count: int) -> np.ndarray:
    """The first right singular vectors of a matrix, in rows."""
    length, width = centred.shape
    if length <= width:
        return np.linalg.svd(centred, full_matrices=False)[2][:count]
    # By svd, thousands of patches take a minute; this takes seconds.
    import scipy.linalg  # takes 0.3 s

    first = max(0, width - count)
    centred = centred / (np.abs(centred).max() or 1)  # its squares must be finite
    _, found = scipy.linalg.eigh(centred.T @ centred, subset_by_index=(first, width - 1))
    return found.T[::-1]


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
