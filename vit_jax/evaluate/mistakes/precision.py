"""Average precision, for images with several labels."""

import numpy as np


def targets(label: np.ndarray, num_classes: int) -> np.ndarray:
    """Sets of labels int [N, set], padded with -1 -> bool [N, num_classes]."""
    found = np.zeros((len(label), num_classes + 1), bool)  # the last column takes the padding
    np.put_along_axis(found, label, True, axis=1)
    return found[:, :-1]


def average_precision(scores: np.ndarray, positive: np.ndarray) -> float:
    """The sum over the thresholds of precision times the growth of recall, as scikit-learn's
    `average_precision_score`, in a tenth of its time: the mean, over the positive images, of the
    precision among all images with at least their score.

    Args:
      scores: [N].
      positive: bool [N], at least one.
    """
    wanted = np.sort(scores[positive])
    above = len(scores) - np.searchsorted(np.sort(scores), wanted)
    positive_above = len(wanted) - np.searchsorted(wanted, wanted)
    return float(np.mean(positive_above / above))


def average_precisions(label: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Average precision of every class: [classes], NaN for classes without an image.

    Args:
      label: int [N, set], padded with -1.
      scores: [N, classes], higher for what is more probable.
    """
    positive = targets(label, scores.shape[1])
    found = np.full(scores.shape[1], np.nan)
    for i in np.flatnonzero(positive.any(axis=0)):
        found[i] = average_precision(scores[:, i], positive[:, i])
    return found
