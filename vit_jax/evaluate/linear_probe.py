"""Linear probe: a logistic regression on frozen features by L-BFGS, its penalty chosen on a part
held out of training.

Features are standardised. A tenth of the training examples is held out for the choice among
`PENALTIES`, then all are trained on; arXiv 2103.00020 appendix A.3 goes about it alike. Every
process does the same on one device of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.evaluate.features import Features

PENALTIES = tuple(
    10.0**exponent for exponent in range(2, -7, -1)
)  # of the mean loss, times half the squared norm;
# the strongest of equals is taken
HELD_OUT = 0.1
STEPS = 200
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
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.dot(x, w, precision="highest") + b, y
        )
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
    """bool [count], a tenth of all examples."""
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(0).permutation(count)[: max(1, round(HELD_OUT * count))]] = True
    return chosen


def evaluate(train: Features, test: Features, num_classes: int, settings) -> dict[str, float]:
    """Accuracy `linear_probe`, and the penalty `l2` that was chosen for it."""
    mean, std = train.x.mean(0, dtype=np.float64), train.x.std(0, dtype=np.float64) + STD_EPSILON
    out = held_out(len(train.x))

    def standardised(part: Features) -> jax.Array:
        return jnp.asarray(((part.x - mean) / std).astype(np.float32))

    with jax.set_mesh(Mesh(np.asarray(jax.local_devices()[:1]), ("device",))):
        x, y = standardised(train), jnp.asarray(train.label)

        def accuracy(l2: float) -> float:
            params = fit(x, y, num_classes, STEPS, l2, (~out).astype(np.float32))
            return float((predict(params, x)[out] == train.label[out]).mean())

        best = max(PENALTIES, key=accuracy)
        params = fit(x, y, num_classes, STEPS, best, np.ones(len(x), np.float32))
        return dict(
            linear_probe=float((predict(params, standardised(test)) == test.label).mean()), l2=best
        )
