"""Nearest neighbours against scikit-learn's brute force and a vote counted by hand."""

import types

import jax
import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from vit_jax.errors import UserError
from vit_jax.evaluate import knn
from vit_jax.evaluate.features import Features

SETTINGS = types.SimpleNamespace(neighbours=5, temperature=0.07)


@pytest.mark.parametrize(("train", "test", "count"), [(1000, 1500, 20), (37, 3, 7), (5, 4, 5)])
def test_neighbours_are_those_of_brute_force(train, test, count):
    rng = np.random.default_rng(train)
    x, queries = rng.normal(1.0, 2.0, (train, 48)), rng.normal(1.0, 2.0, (test, 48))
    similarity, number = knn.neighbours(x, queries, count)
    brute = NearestNeighbors(n_neighbors=count, metric="cosine", algorithm="brute").fit(x)
    distance, wanted = brute.kneighbors(queries)
    np.testing.assert_array_equal(number, wanted)
    np.testing.assert_allclose(similarity, 1.0 - distance, atol=2e-6)


def test_the_number_of_devices_and_of_queries_at_a_time_changes_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    x, queries = rng.normal(size=(203, 32)), rng.normal(size=(70, 32))
    wanted = knn.neighbours(x, queries, 9)
    assert len(jax.devices()) == 8
    monkeypatch.setattr(knn, "QUERIES", 11)
    np.testing.assert_array_equal(knn.neighbours(x, queries, 9)[1], wanted[1])
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    alone = knn.neighbours(x, queries, 9)
    np.testing.assert_array_equal(alone[1], wanted[1])
    np.testing.assert_allclose(alone[0], wanted[0], atol=1e-6)


def test_of_equal_neighbours_the_first_is_taken_on_any_device():
    x = np.tile(np.eye(4), (10, 1))
    _, number = knn.neighbours(x, np.eye(4), 3)
    np.testing.assert_array_equal(number, np.arange(4)[:, None] + [0, 4, 8])


def test_votes_weigh_by_similarity():
    similarity, label = (
        np.array([[0.9, 0.8, 0.8], [0.9, 0.89, 0.89]]),
        np.array([[2, 1, 1], [2, 1, 1]]),
    )
    weights = np.exp(similarity / 0.07)
    wanted = [2 if own[0] > own[1] + own[2] else 1 for own in weights]
    np.testing.assert_array_equal(knn.vote(similarity, label, 3, 0.07), wanted)
    assert wanted == [2, 1]
    np.testing.assert_array_equal(knn.vote(similarity, label, 3, 1e3), [1, 1])


def test_accuracy_is_the_share_of_test_examples():
    x = np.array([[1.0, 0.1], [1.0, -0.1], [0.1, 1.0], [-0.1, 1.0], [0.0, 1.0]])
    train = Features(x, np.array([0, 0, 1, 1, 1], np.int32))
    test = Features(
        np.array([[2.0, 0.0], [0.0, 3.0], [3.0, 0.2], [1.0, 5.0]]), np.array([0, 1, 1, 1], np.int32)
    )
    settings = types.SimpleNamespace(neighbours=2, temperature=0.07)
    assert knn.evaluate(train, test, 2, settings) == dict(knn=0.75)
    with pytest.raises(UserError, match="neighbours=6 has only 5 training examples"):
        knn.evaluate(train, test, 2, types.SimpleNamespace(neighbours=6, temperature=1.0))
