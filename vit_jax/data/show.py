"""`vit_jax.data show`: which examples one step of a config reads, and every random draw about them."""

import json

import numpy as np
import tensorflow as tf

from vit_jax import augment, preprocess
from vit_jax.data import images, order, sources
from vit_jax.errors import UserError


def windows(config, source, indices: np.ndarray, seeds: np.ndarray) -> list[list[int]]:
    """(y, x, height, width) of what is taken of every image."""
    window = images.window(config.data, config.image_size)

    @tf.function
    def one(record, index, seed):
        encoded, _ = source.parse(record, index)
        return window(images.shape_of(encoded), seed)

    records = source.read(indices.tolist())
    return [
        one(tf.constant(record), tf.constant(i), tf.constant(seed)).numpy().tolist()
        for record, i, seed in zip(records, indices, seeds, strict=True)
    ]


def step(config, source, number: int) -> dict:
    """Ids and draws of the global batch that the update after `number` others reads."""
    data = config.data
    parts, rows = source.parts or ((source.num_examples, 1.0),), np.arange(data.batch_size)
    items = order.train_items(parts, data.batch_size, rows, config.seed, data.repeats)(tf.constant(number, tf.int64))
    found = {name: value.numpy() for name, value in items.items()}
    return dict(
        step=number,
        epoch=int(found["epoch"][0]),
        epochs=found["epoch"].tolist(),
        ids=found["index"].tolist(),
        seeds=found["seed"].tolist(),
        crop=windows(config, source, found["index"], found["seed"]),
        flip=np.asarray(augment.flips(preprocess.keys(found["seed"], preprocess.FLIP))).tolist()
        if data.flip
        else [False] * len(rows),
        names=[source.describe(i) for i in found["index"].tolist()],
    )


def run(config, args) -> dict:
    """Prints one line per example."""
    if args.step < 0:
        raise UserError(f"--step={args.step} is negative: steps count from 0")
    result = step(config, sources.open_training(config.data), args.step)
    print(f"step {result['step']}, epoch {result['epoch']}: id, seed, crop (y, x, height, width), flip, name")
    columns = (result[name] for name in ("ids", "seeds", "crop", "flip", "names"))
    for index, seed, crop, flip, name in zip(*columns, strict=True):
        print(f"{index:>9} {json.dumps(seed):>26} {json.dumps(crop):>24} {'flip' if flip else '    '} {name}")
    return result
