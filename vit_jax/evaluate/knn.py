"""Nearest neighbours by cosine similarity, exact, with the training features split over the
devices.

Votes are weighted as in arXiv 1805.01978 section 3.4, as for DINO (arXiv 2104.14294).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.evaluate.features import Features

QUERIES = 1024  # at a time; their similarities to all training examples are held at once


def normalized(x: np.ndarray) -> np.ndarray:
    """Rows of length 1; zeros stay."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnums=(3, 4))
def nearest(index, valid, queries, count: int, mesh: Mesh):
    """The training examples most like each query, (similarity [Q, count], number [Q, count]); of
    equals the first ones.

    Args:
      index: [N, embed] rows of length 1, split over the only axis of `mesh`.
      valid: bool [N], whether a row counts.
      queries: [Q, embed] likewise, whole on every device.
    """
    axis = mesh.axis_names[0]

    def own(index, valid, queries):
        similarity = jnp.einsum("qd,nd->qn", queries, index, precision="highest")
        similarity = jnp.where(valid, similarity, -jnp.inf)
        similarity, number = jax.lax.top_k(similarity, min(count, len(index)))
        candidates = similarity, number + jax.lax.axis_index(axis) * len(index)
        similarity, number = (
            jax.lax.all_gather(part, axis, axis=1, tiled=True) for part in candidates
        )
        similarity, place = jax.lax.top_k(similarity, min(count, similarity.shape[1]))
        return similarity, jnp.take_along_axis(number, place, axis=1)

    split, whole = PartitionSpec(axis), PartitionSpec()
    specs = dict(in_specs=(split, split, whole), out_specs=(whole, whole), check_vma=False)
    return jax.shard_map(own, mesh=mesh, **specs)(index, valid, queries)


def neighbours(train: np.ndarray, test: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(similarity, number) of the `count` training rows nearest to each test row, [N_test, count]
    each, on all devices.

    Args:
      train, test: features [N, embed] and [N_test, embed].
    """
    mesh = Mesh(np.asarray(jax.devices()), ("device",))
    rows = -(-len(train) // mesh.size) * mesh.size
    padded = np.zeros((rows, train.shape[1]), np.float32)
    padded[: len(train)] = normalized(train)
    index, valid = (
        jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, PartitionSpec("device")), lambda place, x=x: x[place]
        )
        for x in (padded, np.arange(rows) < len(train))
    )
    test, found = normalized(test).astype(np.float32), []
    with jax.set_mesh(mesh):
        for start in range(0, len(test), QUERIES):
            queries = np.zeros((QUERIES, test.shape[1]), np.float32)
            queries[: len(test) - start] = test[start : start + QUERIES]
            found.append(jax.device_get(nearest(index, valid, queries, count, mesh)))
    similarity, number = (np.concatenate(parts)[: len(test)] for parts in zip(*found, strict=True))
    return similarity, number


def vote(
    similarity: np.ndarray, label: np.ndarray, num_classes: int, temperature: float
) -> np.ndarray:
    """The class of each query int [Q], the lowest of equals; `label` [Q, count] is that of its
    neighbours.
    """
    scores = np.zeros((len(label), num_classes))
    weight = np.exp((similarity.astype(np.float64) - 1.0) / temperature)
    np.add.at(scores, (np.arange(len(label))[:, None], label), weight)
    return scores.argmax(1)


def check(settings, num_train: int) -> None:
    """Raises UserError where there are fewer training examples than neighbours."""
    if settings.neighbours > num_train:
        raise UserError(
            f"knn with neighbours={settings.neighbours} has only {num_train} training examples: "
            "choose fewer"
        )


def evaluate(train: Features, test: Features, num_classes: int, settings) -> dict[str, float]:
    """Accuracy `knn`.

    Args:
      settings: entry of `config.evals` with `neighbours` and `temperature`.

    Raises:
      UserError: there are fewer training examples than neighbours.
    """
    check(settings, len(train.x))
    similarity, number = neighbours(train.x, test.x, settings.neighbours)
    predicted = vote(similarity, train.label[number], num_classes, settings.temperature)
    return dict(knn=float((predicted == test.label).mean()))
