"""Which classes are taken for which: functions of labels and predicted classes, int [N] each.

They count pairs of classes and need no matrix of all classes, of which there may be 21,000.
"""

import numpy as np


def matrix(label: np.ndarray, predicted: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The confusion matrix of some classes, int64 [n, n]: how many images of class i (row) were
    taken for class j (column). Images with a label or prediction of another class do not count.

    Args:
      classes: int [n], those of the rows and columns.
    """
    count = len(classes)
    order = np.argsort(classes)
    ranks = [np.searchsorted(classes, x, sorter=order) for x in (label, predicted)]
    rows, columns = (order[np.minimum(rank, count - 1)] for rank in ranks)
    is_in = (classes[rows] == label) & (classes[columns] == predicted)
    flat = np.bincount(rows[is_in] * count + columns[is_in], minlength=count**2)
    return flat.reshape(count, count)


def pairs(label: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """int64 [pairs, 3]: (class, class it was taken for, images) of all mistakes, the most frequent
    first, then by class.
    """
    wrong = label != predicted
    both = np.stack([label[wrong], predicted[wrong]], axis=1).astype(np.int64)
    unique, counts = np.unique(both, axis=0, return_counts=True)
    found = np.column_stack([unique, counts])
    return found[np.argsort(-counts, kind="stable")]


def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN for 0 / 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def by_class(label: np.ndarray, predicted: np.ndarray, num_classes: int) -> dict[str, np.ndarray]:
    """Numbers of every class, [num_classes] each.

    Returns:
      `count`, its images, `predicted`, the images taken for it, and `correct`, those of both: int;
      `recall`, correct / count, the accuracy of a class; `precision`, correct / predicted; `f1`,
      their harmonic mean, 2 correct / (count + predicted): NaN for 0 / 0.
    """
    count = np.bincount(label, minlength=num_classes)
    taken = np.bincount(predicted, minlength=num_classes)
    correct = np.bincount(label[label == predicted], minlength=num_classes)
    return dict(
        count=count,
        predicted=taken,
        correct=correct,
        recall=ratio(correct, count),
        precision=ratio(correct, taken),
        f1=ratio(2 * correct, count + taken),
    )


def macro_f1(label: np.ndarray, predicted: np.ndarray) -> float:
    """Mean F1 of the classes that are a label or a prediction, as scikit-learn's `f1_score` with
    average="macro"; NaN without images.
    """
    if not len(label):
        return float("nan")
    num_classes = int(max(label.max(), predicted.max())) + 1
    return float(np.nanmean(by_class(label, predicted, num_classes)["f1"]))
