"""Linear probe: a logistic regression on frozen features, fitted by L-BFGS.

Features are standardised. The penalty is chosen from `PENALTIES` on a tenth of the training
examples, which is held out; then all examples are trained on. arXiv 2103.00020 appendix A.3 does
the same. Every process computes it on one of its devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.evaluate.features import Features

# Weights of half the squared norm, which is added to the mean loss; of equally good ones, the
# largest is taken.
PENALTIES = tuple(10.0**exponent for exponent in range(2, -7, -1))
HELD_OUT = 0.1  # share of the training examples
STEPS = 200  # of L-BFGS
STD_EPSILON = 1e-5


@functools.partial(jax.jit, static_argnums=(2, 3))
def fit(x, y, num_classes: int, steps: int, l2, weight):
    """(w [D, K], b [K]) that minimise the weighted mean cross-entropy plus l2 / 2 times the squared
    norm of w.

    Args:
      x: float32 [N, D].
      y: int32 [N].
      weight: float32 [N].
    """

    def loss(params):
        w, b = params
        logits = jnp.dot(x, w, precision="highest") + b
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(losses * weight) / jnp.sum(weight) + 0.5 * l2 * jnp.sum(w**2)

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(_, carry):
        params, state = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros((x.shape[1], num_classes)), jnp.zeros(num_classes)
    return jax.lax.fori_loop(0, steps, step, (params, solver.init(params)))[0]


def predict(params, x) -> np.ndarray:
    w, b = params
    return np.asarray(jnp.dot(x, w, precision="highest") + b).argmax(1)


def held_out(count: int) -> np.ndarray:
    """bool [count], which examples are held out, always the same."""
    is_held_out = np.zeros(count, bool)
    order = np.random.default_rng(0).permutation(count)
    is_held_out[order[: max(1, round(HELD_OUT * count))]] = True
    return is_held_out


def evaluate(train: Features, test: Features, num_classes: int, settings) -> dict[str, float]:
    """Accuracy `linear_probe`, and the penalty `l2` that was chosen."""
    mean = train.x.mean(0, dtype=np.float64)
    std = train.x.std(0, dtype=np.float64) + STD_EPSILON
    out = held_out(len(train.x))

    def standardised(part: Features) -> jax.Array:
        return jnp.asarray(((part.x - mean) / std).astype(np.float32))

    def accuracy(predicted: np.ndarray, label: np.ndarray) -> float:
        return float((predicted == label).mean())

    with jax.set_mesh(Mesh(np.asarray(jax.local_devices()[:1]), ("device",))):
        x = standardised(train)
        y = jnp.asarray(train.label)

        def held_out_accuracy(l2: float) -> float:
            params = fit(x, y, num_classes, STEPS, l2, (~out).astype(np.float32))
            return accuracy(predict(params, x)[out], train.label[out])

        best = max(PENALTIES, key=held_out_accuracy)
        params = fit(x, y, num_classes, STEPS, best, np.ones(len(x), np.float32))
        predicted = predict(params, standardised(test))
        return dict(linear_probe=accuracy(predicted, test.label), l2=best)
