"""The linear probe against scikit-learn's logistic regression, and the choice of its penalty."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from vit_jax.evaluate import linear_probe
from vit_jax.evaluate.features import Features


def digits():
    data = load_digits()
    x = (data.data - data.data.mean(0)) / (data.data.std(0) + 1e-5)
    return x.astype(np.float32), data.target.astype(np.int32)


@pytest.mark.parametrize("l2", [1e-1, 1e-3])
def test_the_minimum_is_that_of_scikit_learn(l2):
    x, y = digits()
    w, b = linear_probe.fit(x, y, 10, 300, l2, np.ones(len(x), np.float32))
    wanted = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=5000).fit(x, y)
    np.testing.assert_allclose(np.asarray(w).T, wanted.coef_, atol=2e-3)
    np.testing.assert_array_equal((x @ np.asarray(w) + np.asarray(b)).argmax(1), wanted.predict(x))


def test_examples_without_weight_do_not_count():
    x, y = digits()
    weight = (np.arange(len(x)) < 500).astype(np.float32)
    part = linear_probe.fit(x[:500], y[:500], 10, 100, 1e-2, np.ones(500, np.float32))
    whole = linear_probe.fit(x, y, 10, 100, 1e-2, weight)
    np.testing.assert_allclose(whole[0], part[0], atol=2e-3)


def test_the_penalty_is_chosen_on_what_is_held_out():
    """Few noisy examples of many dimensions need a strong one."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400).astype(np.int32)
    x = rng.normal(size=(400, 300)).astype(np.float32)
    x[:, 0] += 2.0 * (2 * y - 1)
    train, test = Features(x[:150], y[:150]), Features(x[150:], y[150:])
    found = linear_probe.evaluate(train, test, 2, None)
    standard = (x - x[:150].mean(0)) / x[:150].std(0)

    def accuracy(l2):
        params = linear_probe.fit(standard[:150], y[:150], 2, 200, l2, np.ones(150, np.float32))
        return (linear_probe.predict(params, standard[150:]) == y[150:]).mean()

    assert found["l2"] in linear_probe.PENALTIES
    assert found["linear_probe"] == pytest.approx(accuracy(found["l2"]), abs=0.005)
    assert found["linear_probe"] > accuracy(1e-6)


def test_a_tenth_is_held_out_and_it_is_always_the_same():
    out = linear_probe.held_out(1_000)
    assert out.sum() == 100 and not out[:100].all() and (linear_probe.held_out(1_000) == out).all()
    assert linear_probe.held_out(3).sum() == 1
