"""`vit_jax.data show`: which examples one step of a config reads, and all random choices about
them.
"""

import functools
import json

import jax
import numpy as np
import tensorflow as tf
from etils import epath

from vit_jax import config as configs
from vit_jax.data import images, order, shapes, views
from vit_jax.data.augment import views as augment_views
from vit_jax.data.augment.batch import FLIP, VIEWS, flips, keys
from vit_jax.data.left_out import LeftOut
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError, one_line, printable

LAST_STEP = 2**31 - 1


def windows(config, source, indices: np.ndarray, seeds: np.ndarray) -> list[list | None]:
    """(y, x, height, width) of the crop of every image, or a list of those of its views; None for
    an image that can't be read, if data.on_corrupt is "skip".
    """
    if configs.has_views(config):
        window = functools.partial(views.boxes, config.data.views)
    else:
        window = images.window(config.data, config.image_size)

    @tf.function
    def crop(record, index, seed):
        encoded, _ = source.parse(record, index)
        shape = images.shape_of(encoded, config.data.exif_rotation and source.rotates(index))
        with tf.control_dependencies([shape]):  # even if the window does not depend on it
            return tf.identity(window(shape, seed))

    def crop_of(i: int, seed: np.ndarray) -> list | None:
        try:
            record = tf.constant(source.read([i])[0])
            box = crop(record, tf.constant(i, tf.int64), tf.constant(seed))
            return box.numpy().tolist()
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            if config.data.on_corrupt == "skip":
                return None
            raise UserError(
                f"{source.describe(i)} can't be read as an image: remove or replace it, or set "
                f"data.on_corrupt=skip; the reason: {one_line(error)[:160]}"
            ) from error

    return [crop_of(i, seed) for i, seed in zip(indices.tolist(), seeds, strict=True)]


def read_left_out(workdir: str | None) -> LeftOut:
    """What the run in `workdir` has left out; nothing if no run is given."""
    if not workdir:
        return LeftOut()
    folder = epath.Path(workdir)
    if not (folder / "config.json").exists():
        raise UserError(
            f"--workdir={workdir} has no config.json, so it is not that of a run: correct it, or "
            "leave it out"
        )
    return LeftOut.read(folder)


def flipped(config, seeds: np.ndarray) -> list:
    """Whether every image is flipped, or a list of that for its views."""
    shape = [len(seeds)]
    if configs.has_views(config):
        shape.append(shapes.GLOBAL_VIEWS + config.data.views.local_count)
    if not config.data.flip:
        return np.zeros(shape, bool).tolist()
    if len(shape) == 1:
        return np.asarray(flips(keys(seeds, FLIP))).tolist()
    chosen = augment_views.choose(keys(seeds, VIEWS), shape[1])
    return np.asarray(chosen["flip"]).tolist()


def step(config, source, number: int, left_out: LeftOut) -> dict:
    """Ids and random choices of the global batch of a step, the `number` of updates done before."""
    data = config.data
    number_of_batch = left_out.batch_of(number)
    rows = np.arange(data.batch_size)
    items = order.train_items(
        source.parts, data.batch_size, rows, config.seed, data.repeats, source.block
    )
    found = items(tf.constant(number_of_batch, tf.int64))
    batch = {name: value.numpy() for name, value in found.items()}
    return dict(
        step=number,
        batch=number_of_batch,
        epoch=int(batch["epoch"][0]),
        epochs=batch["epoch"].tolist(),
        ids=batch["index"].tolist(),
        seeds=batch["seed"].tolist(),
        crop=windows(config, source, batch["index"], batch["seed"]),
        flip=flipped(config, batch["seed"]),
        names=[source.describe(i) for i in batch["index"].tolist()],
    )


def run(config, args) -> dict:
    """Prints one line per example."""
    if not 0 <= args.step <= LAST_STEP:
        raise UserError(
            f"--step={args.step} is outside of 0 to {LAST_STEP}: give the number of updates done "
            "before it"
        )
    if not config.image_size:
        raise UserError(
            "config key image_size=0 is for evaluate only: set the size of training, such as "
            "--config.image_size=224"
        )
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be in use by another job
    left_out = read_left_out(args.workdir)
    source = sources.open_training(config.data, config.user, configs.uses_labels(config))
    result = step(config, source, args.step, left_out)
    print(
        f"step {result['step']}, batch {result['batch']}, epoch {result['epoch']}: id, seed, crop "
        "(y, x, height, width), flip, name"
    )
    columns = (result[name] for name in ("ids", "seeds", "crop", "flip", "names"))
    for index, seed, crops, flip, name in zip(*columns, strict=True):
        what = printable(name) if crops else f"{printable(name)}: can't be read"
        for crop, is_flipped in lines(crops, flip):
            word = "flip" if is_flipped else ""
            print(f"{index:>9} {json.dumps(seed):>26} {json.dumps(crop):>24} {word:4} {what}")
    return result


def lines(crop, flip) -> list[tuple]:
    """(crop, flip) of each line about an example: one, or one for each view."""
    if not isinstance(flip, list):
        return [(crop, flip)]
    return list(zip(crop, flip, strict=True)) if crop else [(crop, False)]
