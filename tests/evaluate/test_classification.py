"""Exact counting: masks, any batch size, any evaluator input."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.evaluate import classification


@pytest.mark.parametrize("count", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("batch_size", [1, 8, 16])
def test_padding_changes_nothing(count, batch_size):
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, 2, 2, 3)).astype(np.uint8)
    labels = rng.integers(0, 5, count).astype(np.int32)
    table = rng.normal(size=(12, 5)).astype(np.float32)

    def apply_fn(params, image):
        return image.reshape(len(image), -1) @ params

    batches = []
    for start in range(0, count, batch_size):
        index = np.arange(start, start + batch_size)
        take = np.minimum(index, count - 1)
        batches.append(
            dict(image=images[take], label=labels[take], mask=(index < count).astype(np.float32))
        )
    step = classification.make_eval_step(apply_fn, "softmax_xent", 5)
    found = classification.evaluate(step, jnp.asarray(table), batches)

    logits = (images.reshape(count, -1) / 127.5 - 1) @ table
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert found["count"] == count
    assert found["top1"] == pytest.approx((logits.argmax(-1) == labels).mean())
    assert found["loss"] == pytest.approx(-log_p[np.arange(count), labels].mean(), rel=1e-5)
