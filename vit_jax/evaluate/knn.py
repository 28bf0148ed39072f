"""Classification by the nearest neighbours: exact, by cosine similarity, with the training features
split over the devices.

Votes are weighted as in arXiv 1805.01978 section 3.4 and DINO (arXiv 2104.14294).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.evaluate.features import Features

QUERIES = 1024  # at a time; their similarities to all training examples must fit into memory


def normalized(x: np.ndarray) -> np.ndarray:
    """Scales rows to length 1; zero rows stay zero."""
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnums=(3, 4))
def nearest(index, valid, queries, count: int, mesh: Mesh):
    """The training examples nearest to each query: (similarity [Q, count], number [Q, count]). Of
    equal ones, the first are taken.

    Args:
      index: [N, embed], rows of length 1, split over the only axis of `mesh`.
      valid: bool [N], False for padding.
      queries: [Q, embed], rows of length 1, replicated.
    """
    axis = mesh.axis_names[0]

    def nearest_of_shard(index, valid, queries):
        similarity = jnp.einsum("qd,nd->qn", queries, index, precision="highest")
        similarity = jnp.where(valid, similarity, -jnp.inf)
        similarity, number = jax.lax.top_k(similarity, min(count, len(index)))
        number += jax.lax.axis_index(axis) * len(index)
        similarity = jax.lax.all_gather(similarity, axis, axis=1, tiled=True)
        number = jax.lax.all_gather(number, axis, axis=1, tiled=True)
        similarity, column = jax.lax.top_k(similarity, min(count, similarity.shape[1]))
        return similarity, jnp.take_along_axis(number, column, axis=1)

    split = PartitionSpec(axis)
    replicated = PartitionSpec()
    search = jax.shard_map(
        nearest_of_shard,
        mesh=mesh,
        in_specs=(split, split, replicated),
        out_specs=(replicated, replicated),
        check_vma=False,
    )
    return search(index, valid, queries)


def neighbours(train: np.ndarray, test: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(similarity, number) of the `count` training rows nearest to each test row, [N_test, count]
    each, computed on all devices.

    Args:
      train, test: features [N, embed] and [N_test, embed].
    """
    mesh = Mesh(np.asarray(jax.devices()), ("device",))
    rows = -(-len(train) // mesh.size) * mesh.size
    padded = np.zeros((rows, train.shape[1]), np.float32)
    padded[: len(train)] = normalized(train)
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    is_valid = np.arange(rows) < len(train)
    index = jax.make_array_from_callback(padded.shape, sharding, lambda part: padded[part])
    valid = jax.make_array_from_callback(is_valid.shape, sharding, lambda part: is_valid[part])
    test = normalized(test).astype(np.float32)
    similarities = []
    numbers = []
    with jax.set_mesh(mesh):
        for start in range(0, len(test), QUERIES):
            queries = np.zeros((QUERIES, test.shape[1]), np.float32)
            queries[: len(test) - start] = test[start : start + QUERIES]
            similarity, number = jax.device_get(nearest(index, valid, queries, count, mesh))
            similarities.append(similarity)
            numbers.append(number)
    return np.concatenate(similarities)[: len(test)], np.concatenate(numbers)[: len(test)]


def vote(
    similarity: np.ndarray, label: np.ndarray, num_classes: int, temperature: float
) -> np.ndarray:
    """The predicted class of each query, int [Q]; of equal votes, the lowest.

    Args:
      similarity: [Q, count], of the query to its neighbours.
      label: int [Q, count], the classes of the neighbours.
    """
    scores = np.zeros((len(label), num_classes))
    weight = np.exp((similarity.astype(np.float64) - 1.0) / temperature)
    np.add.at(scores, (np.arange(len(label))[:, None], label), weight)
    return scores.argmax(1)


def check(settings, num_train: int) -> None:
    """Raises UserError if there are fewer training examples than neighbours."""
    if settings.neighbours > num_train:
        raise UserError(
            f"knn with neighbours={settings.neighbours} has only {num_train} training examples: "
            "choose fewer"
        )


def evaluate(train: Features, test: Features, num_classes: int, settings) -> dict[str, float]:
    """Accuracy `knn`.

    Args:
      settings: entry of `config.evals` with `neighbours` and `temperature`.
    """
    check(settings, len(train.x))
    similarity, number = neighbours(train.x, test.x, settings.neighbours)
    predicted = vote(similarity, train.label[number], num_classes, settings.temperature)
    return dict(knn=float((predicted == test.label).mean()))
