"""Whether probabilities are what they say: reliability diagram and expected calibration error
(arXiv 1706.04599, section 2).
"""

import numpy as np

BINS = 15  # of that paper's tables


def bins(confidence: np.ndarray, correct: np.ndarray, num_bins: int = BINS) -> dict:
    """Images by the probability of their predicted class, in bins of equal width.

    A bin is (low, high] as in the paper: a probability exactly on an edge belongs to the bin below
    it, and 0 to the first bin.

    Args:
      confidence: float32 [N], the probability of the predicted class, 0 to 1.
      correct: bool [N].

    Returns:
      `low`, `high`, `count`, `confidence` and `accuracy` (means, NaN for an empty bin), [num_bins]
      each.
    """
    confidence = np.asarray(confidence)
    edges = np.arange(num_bins + 1) / num_bins
    # In their own precision, in which 0.2 lies on the edge 3 / 15. More than 1 comes of rounding.
    which = np.searchsorted(edges[1:].astype(confidence.dtype), confidence)
    which = np.minimum(which, num_bins - 1)
    count = np.bincount(which, minlength=num_bins)
    total = np.bincount(which, weights=confidence, minlength=num_bins)
    right = np.bincount(which, weights=correct, minlength=num_bins)
    share = np.where(count, 1 / np.maximum(count, 1), np.nan)
    means = dict(confidence=total * share, accuracy=right * share)
    return dict(low=edges[:-1], high=edges[1:], count=count) | means


def expected_error(found: dict) -> float:
    """ECE: the mean difference of confidence and accuracy over the bins, weighted by their images;
    NaN without images.

    Args:
      found: what `bins` returns.
    """
    count = found["count"]
    if not count.sum():
        return float("nan")
    gap = np.abs(found["confidence"] - found["accuracy"])
    return float((count * gap)[count > 0].sum() / count.sum())
