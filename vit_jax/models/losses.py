"""Classification losses on soft labels, per example."""

import jax
import optax


def softmax_xent(logits, labels):
    """Softmax cross-entropy: logits, labels [batch, classes] -> [batch]."""
    return optax.softmax_cross_entropy(logits, labels)


def sigmoid_xent(logits, labels):
    """Binary cross-entropy summed over classes: logits, labels [batch, classes] -> [batch].

    Source: the authors' loss for ImageNet-21k and JFT (google-research/vision_transformer issue
      34).
    """
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1)


def multilabel_xent(logits, labels):
    """Binary cross-entropy of "is any of this class in the image", mean over classes: [batch,
    classes] -> [batch].

    Every class with a positive label counts in full. Source: engine.py of DeiT III (arXiv
    2204.07118), after arXiv 2110.00476.
    """
    return sigmoid_xent(logits, (labels > 0).astype(logits.dtype)) / labels.shape[-1]


def targets(label, num_classes: int):
    """Labels int32 [batch], or sets of them [batch, set] padded with -1, as float32 [batch,
    classes] of 0 and 1.
    """
    one_hot = jax.nn.one_hot(label, num_classes)
    return one_hot if label.ndim == 1 else one_hot.max(axis=1)


LOSSES = {
    "softmax_xent": softmax_xent,
    "sigmoid_xent": sigmoid_xent,
    "multilabel_xent": multilabel_xent,
}
