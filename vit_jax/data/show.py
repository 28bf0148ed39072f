"""`vit_jax.data show`: which examples one step of a config reads, and every random draw about them."""

import json

import jax
import numpy as np
import tensorflow as tf

from vit_jax.data import images, order
from vit_jax.data.augment.batch import FLIP, flips, keys
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError, one_line

LAST_STEP = 2**31 - 1


def windows(config, source, indices: np.ndarray, seeds: np.ndarray) -> list[list[int] | None]:
    """(y, x, height, width) of what is taken of every image; None for one that can't be read and is
    to be skipped.

    Raises:
      UserError: an image can't be read, and data.on_corrupt is "error".
    """
    window = images.window(config.data, config.image_size)

    @tf.function
    def one(record, index, seed):
        encoded, _ = source.parse(record, index)
        shape = images.shape_of(encoded)
        with tf.control_dependencies([shape]):  # also where the window does not depend on it
            return tf.identity(window(shape, seed))

    def found(i: int, seed: np.ndarray) -> list[int] | None:
        try:
            return (
                one(tf.constant(source.read([i])[0]), tf.constant(i, tf.int64), tf.constant(seed))
                .numpy()
                .tolist()
            )
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            if config.data.on_corrupt == "skip":
                return None
            raise UserError(
                f"{source.describe(i)} can't be read as an image: remove or replace it, or set "
                f"data.on_corrupt=skip; the reader says: {one_line(error)[:160]}"
            ) from error

    return [found(i, seed) for i, seed in zip(indices.tolist(), seeds, strict=True)]


def step(config, source, number: int) -> dict:
    """Ids and draws of the global batch that the update after `number` others reads."""
    data = config.data
    rows = np.arange(data.batch_size)
    items = order.train_items(source.parts, data.batch_size, rows, config.seed, data.repeats)
    found = {name: value.numpy() for name, value in items(tf.constant(number, tf.int64)).items()}
    return dict(
        step=number,
        epoch=int(found["epoch"][0]),
        epochs=found["epoch"].tolist(),
        ids=found["index"].tolist(),
        seeds=found["seed"].tolist(),
        crop=windows(config, source, found["index"], found["seed"]),
        flip=np.asarray(flips(keys(found["seed"], FLIP))).tolist()
        if data.flip
        else [False] * len(rows),
        names=[source.describe(i) for i in found["index"].tolist()],
    )


def run(config, args) -> dict:
    """Prints one line per example."""
    if not 0 <= args.step <= LAST_STEP:
        raise UserError(f"--step={args.step} is outside of 0 to {LAST_STEP}: steps count from 0")
    if not config.image_size:
        raise UserError(
            "config key image_size=0 is for evaluate only: give that of a training, as 224"
        )
    jax.config.update("jax_platforms", "cpu")  # an accelerator may belong to a job that runs
    result = step(config, sources.open_training(config.data), args.step)
    print(
        f"step {result['step']}, epoch {result['epoch']}: id, seed, crop (y, x, height, width), "
        "flip, name"
    )
    columns = (result[name] for name in ("ids", "seeds", "crop", "flip", "names"))
    for index, seed, crop, flip, name in zip(*columns, strict=True):
        what = name if crop else f"{name}: can't be read"
        print(
            f"{index:>9} {json.dumps(seed):>26} {json.dumps(crop):>24} "
            f"{'flip' if flip else '    '} {what}"
        )
    return result
