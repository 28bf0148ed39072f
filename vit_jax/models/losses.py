"""Classification losses on soft labels, per example."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import is_own, own_parts


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


def make_loss(config, num_classes: int) -> Callable:
    """f(logits, labels [batch, classes]) -> [batch], as `config.loss` says.

    Raises:
      UserError: a loss of the user's own does not fit.
    """
    if not is_own(config.loss):
        return LOSSES[config.loss]
    part = own_parts.part("loss", config.loss, config)

    def loss(logits, labels):
        return part(logits=logits, label=labels)

    batch = 3
    shape = jax.ShapeDtypeStruct((batch, num_classes), jnp.float32)
    result = jax.eval_shape(loss, shape, shape)
    if getattr(result, "shape", None) != (batch,) or result.dtype != jnp.float32:
        raise part.error(
            f"returns {own_parts.shown(result)} for logits and label of {shape.shape}, but it must "
            "return float32 [batch], the loss of each example"
        )
    return loss
