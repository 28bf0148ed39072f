"""Few-shot regression against big_vision and against its normal equations."""

import time

import numpy as np
import pytest
from conftest import golden

from vit_jax.evaluate import fewshot


@pytest.mark.parametrize("name", ["N_lt_D", "N_eq_Dp1", "N_gt_D"])
def test_weights_scores_and_predictions_equal_big_vision(name):
    arrays, config = golden(f"fewshot_{name}")
    x, y, l2 = arrays["x"], arrays["y"], config["l2_reg"]
    mean, std, weights = fewshot.fit(x, y, config["num_classes"], l2)
    np.testing.assert_allclose(mean, arrays["mean"][0], atol=1e-6)
    np.testing.assert_allclose(std, arrays["std"][0], rtol=1e-6)
    np.testing.assert_allclose(weights, arrays["weights_f64"], atol=1e-6 * np.abs(weights).max())
    np.testing.assert_allclose(weights, arrays["weights"], atol=1e-3 * np.abs(weights).max())
    scores = fewshot.least_squares(x, y, arrays["x_test"], config["num_classes"], l2)
    # big_vision's own float32 error is up to 1.2e-5.
    np.testing.assert_allclose(scores, arrays["scores"], atol=5e-5)
    np.testing.assert_array_equal(scores.argmax(1), arrays["preds"])
    accuracy = (scores.argmax(1) == arrays["y_test"]).mean()
    np.testing.assert_allclose(accuracy, arrays["accuracy"], rtol=1e-6)


@pytest.mark.parametrize("rows", [6, 12])  # fewer and more than the 9 columns with the constant
def test_the_penalised_error_is_at_its_minimum(rows):
    rng = np.random.default_rng(0)
    x, y, l2 = rng.normal(3.0, 2.0, (rows, 8)), np.arange(rows) % 3, 0.7
    mean, std, w = fewshot.fit(x, y, 3, l2)
    z = np.concatenate([(x - mean) / std, np.full((rows, 1), 100.0)], axis=1)
    gradient = z.T @ (z @ w - np.where(np.arange(3) == y[:, None], 1.0, -1.0)) + l2 * w
    np.testing.assert_allclose(gradient, 0.0, atol=1e-8)


def test_a_constant_feature_and_a_class_without_examples_do_no_harm():
    x = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 4.0], [1.0, 5.0]], np.float32)
    scores = fewshot.least_squares(x, np.array([0, 0, 2, 2]), x, 3, 1e-3)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores.argmax(1), [0, 0, 2, 2])
    np.testing.assert_allclose(scores[:, 1], -1.0, atol=1e-3)


def test_ten_shots_of_hundreds_of_classes_take_seconds_at_most():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 768)).astype(np.float32), np.arange(3000) % 300
    start = time.perf_counter()
    scores = fewshot.least_squares(x + 3 * np.eye(768)[y], y, np.eye(768)[:300] * 10, 300, 1024.0)
    assert time.perf_counter() - start < 30
    np.testing.assert_array_equal(scores.argmax(1), np.arange(300))


def test_chosen_examples_equal_big_vision():
    arrays, _ = golden("fewshot_indices")
    cases = [name for name in arrays if name.startswith("seed")]
    assert len(cases) == 6
    for case in cases:
        seed, shots = (
            int(part.removeprefix("seed").removeprefix("shots")) for part in case.split("_")
        )
        found = fewshot.few_shot_indices(arrays["labels"], shots, 6, seed)
        np.testing.assert_array_equal(found, arrays[case], err_msg=case)


def test_a_class_with_too_few_examples_gives_all_of_them():
    labels = np.array([2, 0, 0, 2, 2, 0])
    found = fewshot.few_shot_indices(labels, 5, 4, seed=1)
    np.testing.assert_array_equal(labels[found], [0, 0, 0, 2, 2, 2])
    assert sorted(found) == list(range(6))
