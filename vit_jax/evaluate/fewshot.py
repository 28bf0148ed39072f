"""Few-shot classification: a ridge regression on frozen features (arXiv 2010.11929 section 4.1), as
in big_vision.

It runs on the host in float64: the constant feature of 100 makes the system too badly conditioned
for float32.
"""

import numpy as np

from vit_jax.evaluate.features import Features

BIAS = 100.0  # constant feature; it is so large that the penalty hardly shrinks its weight
STD_EPSILON = 1e-5


def few_shot_indices(labels, shots: int, num_classes: int, seed: int) -> np.ndarray:
    """Chooses `shots` examples of every class, like big_vision: fewer shots are the first of more
    shots.

    Args:
      labels: int [N].
      shots: examples per class; a class that has fewer gives all.
      num_classes: classes are 0 to num_classes - 1.
      seed: of the random choice.

    Returns:
      Indices into `labels`, class by class, int [at most shots * num_classes].
    """
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:shots] for label in range(num_classes)
    ]
    return np.concatenate(chosen)


def fit(x, y, num_classes: int, l2: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits the weights of a ridge regression from whitened features to targets of -1 and +1.

    With z the features, whitened by their own mean and population standard deviation and with
    `BIAS` appended, w = (z' z + l2 I)^-1 z' t; for fewer examples than columns, the same by the
    smaller z' (z z' + l2 I)^-1 t.

    Args:
      x: [N, D] features.
      y: int [N] classes.
      num_classes: K.
      l2: weight of the penalty, above 0.

    Returns:
      (mean [D], std [D], w [D + 1, K]), float64; w's last row belongs to the constant.
    """
    x = np.asarray(x).astype(np.float64)
    mean = x.mean(axis=0)
    std = x.std(axis=0) + STD_EPSILON
    z = with_constant((x - mean) / std)  # [N, D + 1]
    target = 2.0 * np.eye(num_classes)[np.asarray(y)] - 1.0  # [N, K]
    rows, columns = z.shape
    if rows >= columns:
        return mean, std, np.linalg.solve(z.T @ z + l2 * np.eye(columns), z.T @ target)
    return mean, std, z.T @ np.linalg.solve(z @ z.T + l2 * np.eye(rows), target)


def with_constant(x: np.ndarray) -> np.ndarray:
    """[N, D] -> [N, D + 1], with `BIAS` in the last column."""
    return np.pad(x, ((0, 0), (0, 1)), constant_values=BIAS)


def least_squares(x, y, x_test, num_classes: int, l2: float) -> np.ndarray:
    """Scores of test features by the regression that `fit` finds on the training features.

    Args:
      x: [N, D] training features.
      y: int [N] their classes.
      x_test: [N_test, D] features to classify.
      num_classes: K.
      l2: weight of the penalty, above 0.

    Returns:
      Scores [N_test, K], float64; the largest of a row is the predicted class.
    """
    mean, std, weights = fit(x, y, num_classes, l2)
    x_test = np.asarray(x_test).astype(np.float64)
    return with_constant((x_test - mean) / std) @ weights


def evaluate(train: Features, test: Features, num_classes: int, settings) -> dict[str, float]:
    """Accuracies `fewshot_K`, averaged over choices of K training examples per class.

    Args:
      settings: entry of `config.evals` with `shots`, `seeds` and `l2`.
    """

    def accuracy(shots: int, seed: int) -> float:
        chosen = few_shot_indices(train.label, shots, num_classes, seed)
        scores = least_squares(
            train.x[chosen], train.label[chosen], test.x, num_classes, settings.l2
        )
        return float((scores.argmax(1) == test.label).mean())

    seeds = range(settings.seeds)
    return {
        f"fewshot_{shots}": float(np.mean([accuracy(shots, seed) for seed in seeds]))
        for shots in settings.shots
    }
