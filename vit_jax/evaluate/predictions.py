"""Classes and features of images, in batches on all devices: for `vit_jax.predict` and Python."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vit_jax.data import given_images
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult, UserError
from vit_jax.weights import load
from vit_jax.weights.pretrained import Pretrained


class Prediction(NamedTuple):
    """One class of an image."""

    name: str
    probability: float
    label: int  # index of the class in the logits


@functools.lru_cache(maxsize=8)  # a second call compiles nothing
def make_step(model, top_k: int, is_multi_label: bool):
    """f(params, image uint8 [batch, H, W, 3]) -> (features [batch, embed], class [batch, k],
    probability [batch, k]); the features alone if `top_k` is 0.
    """
    probabilities = jax.nn.sigmoid if is_multi_label else jax.nn.softmax

    def step(params, image):
        image = model.normalize(image)
        features = load.features(model, params, image).astype(jnp.float32)
        if not top_k:
            return (features,)
        logits = model.apply({"params": params}, image).astype(jnp.float32)
        probability, label = jax.lax.top_k(probabilities(logits), top_k)
        return features, label, probability

    return jax.jit(step)


class Predictor:
    """Calls the step of `make_step` with parameters that are on every device."""

    def __init__(self, pretrained: Pretrained, top_k: int):
        model, params = pretrained
        self.mesh = meshes.make_mesh(dict(replica=1, data=-1, fsdp=1, tensor=1))
        self.step = make_step(model, top_k, pretrained.is_multi_label)
        with jax.set_mesh(self.mesh):
            self.params = jax.device_put(params, sharding.replicated(self.mesh))

    def rows(self, batch_size: int) -> int:
        """The next number of images that the devices can divide."""
        return -(-batch_size // self.mesh.size) * self.mesh.size

    def __call__(self, batches: Iterable[dict]) -> Iterator[tuple[dict, list[np.ndarray]]]:
        """(batch, what the step returns for its images with mask 1) for every batch of `image`,
        uint8 [rows, H, W, 3], and `mask`. One is computed while the next one is prepared.
        """
        waiting = []
        for batch in batches:
            with jax.set_mesh(self.mesh):
                image = jax.device_put(batch["image"], sharding.batch_sharding(self.mesh))
                waiting.append((batch, self.step(self.params, image)))
            if len(waiting) > 1:
                yield fetched(*waiting.pop(0))
        for pair in waiting:
            yield fetched(*pair)


def fetched(batch: dict, output: tuple) -> tuple[dict, list[np.ndarray]]:
    readable = batch["mask"] > 0
    return batch, [array[readable] for array in jax.device_get(output)]


def check_has_head(pretrained: Pretrained, instead: str) -> None:
    if not pretrained.model.num_classes:
        raise UserError(
            f"{pretrained.path or 'the model'} has no head and so no classes: use {instead} for "
            "features"
        )


def check_finite(path: str, columns: list[np.ndarray], names: list[str]) -> None:
    """Raises NegativeResult if features or probabilities are not finite.

    Args:
      path: of the weights.
      columns: arrays with a row for each of `names`.
    """
    rows = [np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in columns]  # maybe none
    finite = np.all(rows, axis=0)
    if not finite.all():
        raise NegativeResult(
            f"{path or 'the model'} gives results that are not finite for {np.sum(~finite)} of "
            f"{len(names)} images, such as {names[int(np.argmin(finite))]}: these weights are "
            "damaged, or overflow: choose others"
        )


def outputs(pretrained: Pretrained, images: list, top_k: int, batch_size: int) -> list[np.ndarray]:
    """What the step returns for all images; see `make_step`."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1: correct it")
    predictor = Predictor(pretrained, top_k)
    rows = predictor.rows(min(batch_size, len(images)))
    batches = given_images.batches(pretrained.model, images, rows)
    found = []
    with tqdm(total=len(images), unit=" images", disable=len(images) <= rows) as progress:
        for _, output in predictor(batches):
            found.append(output)
            progress.update(len(output[0]))
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    names = [given_images.name_of(image, i) for i, image in enumerate(images)]
    check_finite(pretrained.path, columns, names)
    return columns


def with_names(pretrained) -> Pretrained:
    """A plain pair (model, params) as one whose classes have numbers."""
    if isinstance(pretrained, Pretrained):
        return pretrained
    if not isinstance(pretrained, tuple | list) or len(pretrained) != 2:
        raise UserError(
            f"weights of type {type(pretrained).__name__} can't be applied: give what "
            "vit_jax.from_pretrained returns, or a pair (model, params)"
        )
    return Pretrained(*pretrained)


def classify(pretrained, images, top_k: int, batch_size: int) -> list[list[Prediction]]:
    """The most probable classes of images: see `vit_jax.classify`."""
    pretrained = with_names(pretrained)
    check_has_head(pretrained, "vit_jax.embed")
    if not isinstance(top_k, int | np.integer):
        raise UserError(f"top_k={top_k!r} must be a whole number: correct it")
    if top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1: correct it, or use vit_jax.embed")
    top_k = min(top_k, pretrained.model.num_classes)
    images = given_images.listed(images)
    _, labels, probabilities = outputs(pretrained, images, top_k, batch_size)
    if labels.ndim > 2:
        raise UserError(
            f"{pretrained.path or 'the model'} has logits for every token, not for an image: load "
            "it with another pool="
        )
    return [
        [
            Prediction(pretrained.class_names[label], float(probability), int(label))
            for label, probability in zip(*row, strict=True)
        ]
        for row in zip(labels, probabilities, strict=True)
    ]


def embed(pretrained, images, batch_size: int) -> np.ndarray:
    """Features of images, float32 [images, embed]: see `vit_jax.embed`."""
    images = given_images.listed(images)
    (features,) = outputs(with_names(pretrained), images, 0, batch_size)
    return features
