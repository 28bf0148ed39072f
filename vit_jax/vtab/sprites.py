"""Sprites with the structure of dSprites, drawn here, for trials without network; results on them
are labelled.

3 shapes x 6 scales x 40 orientations x 32 x 32 positions, 64 x 64 pixels of 0 and 1, in TFDS's
features and order: a part such as train800 has the labels that it has in the real data. The pixels
are not those of dSprites.
"""

import functools
import hashlib
import io
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_jax.data.prepare import shards, writer
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.errors import UserError, one_line, storage_problem

log = logging.getLogger("vit_jax.vtab")

# Latents in the order in which an example's number counts them, the last one fastest; their values
# as in dSprites.
SIDE, POSITIONS, ORIENTATIONS = 64, 32, 40
SHAPES = ("square", "ellipse", "heart")
SCALES = np.linspace(0.5, 1.0, 6)
SIZES = (len(SHAPES), len(SCALES), ORIENTATIONS, POSITIONS, POSITIONS)
NAMES = ("shape", "scale", "orientation", "x_position", "y_position")
COUNT = math.prod(SIZES)
FINE = 8  # points per pixel and axis
RADIUS = 15.0  # pixels, of the largest sprite
NUM_SHARDS = 8
VERSION = "2.0.0"


def inside(shape: str, x, y):
    """Whether points lie in a shape of radius 1 about the origin, y upwards."""
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= math.sqrt(0.5)
    if shape == "ellipse":
        return x**2 + (y / 0.5) ** 2 <= 1
    x, y = 1.3 * x, 1.3 * y + 0.1
    return (x**2 + y**2 - 1) ** 3 <= x**2 * y**3  # the heart curve


@functools.cache
def base(shape: int, scale: int, orientation: int) -> np.ndarray:
    """A sprite at position (0, 0), uint8 [64, 64] of 0 and 1: a pixel is 1 where half of it is
    covered.
    """
    line = (np.arange(SIDE * FINE) + 0.5) / FINE - SIDE / 4
    x, y = np.meshgrid(line, -line)
    angle = 2 * math.pi * orientation / (ORIENTATIONS - 1)
    turned = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    covered = inside(SHAPES[shape], *(part / (RADIUS * SCALES[scale]) for part in turned))
    return (covered.reshape(SIDE, FINE, SIDE, FINE).mean((1, 3)) >= 0.5).astype(np.uint8)


def factors(number: int) -> tuple[int, ...]:
    """(shape, scale, orientation, x, y) of an example by its number in dSprites."""
    return tuple(int(part) for part in np.unravel_index(number, SIZES))


def image(number: int) -> np.ndarray:
    """uint8 [64, 64] of 0 and 1."""
    *kind, x, y = factors(number)
    return np.roll(base(*kind), (y, x), axis=(0, 1))


def example(number: int) -> bytes:
    """The tf.train.Example of dSprites' features."""
    buffer, latents = io.BytesIO(), factors(number)
    Image.fromarray(image(number)).save(buffer, format="png")
    angle = 2 * math.pi * latents[2] / (ORIENTATIONS - 1)
    line = [latents[axis] / (POSITIONS - 1) for axis in (3, 4)]
    values = (latents[0] + 1, SCALES[latents[1]], angle, *line)
    features = {"image": buffer.getvalue()}
    features |= {f"label_{name}": int(latent) for name, latent in zip(NAMES, latents, strict=True)}
    features |= {f"value_{name}": float(value) for name, value in zip(NAMES, values, strict=True)}
    return shards.encode(features)


def write(data_dir: str, count: int = COUNT) -> pathlib.Path:
    """Writes DATA_DIR/generated/dsprites/2.0.0, and returns it; what is there already is left as it
    is.

    Args:
      count: of examples, in TFDS's order; fewer for tests.

    Raises:
      UserError: the folder can't be written.
    """
    try:
        return draw(data_dir, count)
    except OSError as error:
        problem = storage_problem(error) or one_line(error)
        raise UserError(
            f"sprites can't be written below {data_dir} ({problem}): choose another data.data_dir"
        ) from error


def draw(data_dir: str, count: int) -> pathlib.Path:
    import tensorflow_datasets as tfds

    root = pathlib.Path(data_dir) / vtab_source.GENERATED
    folder, staging = root / "dsprites" / VERSION, root / "dsprites" / f".{VERSION}.preparing"
    if folder.exists():
        return folder
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    numbers = order("train", [str(i) for i in range(COUNT)])[:count]
    parts = np.array_split(numbers, NUM_SHARDS)
    log.info("drawing %s sprites in %s", f"{count:,}", root)
    for path, part in zip(
        writer.shard_paths(staging, "dsprites", "train", NUM_SHARDS), parts, strict=True
    ):
        shards.write_records(path, map(example, part.tolist()))
        log.info("%s: %s sprites", path.name, f"{len(part):,}")
    builder = tfds.builder(
        f"dsprites:{VERSION}", data_dir=os.fspath(root), file_format="array_record"
    )
    results = {"train": [dict(examples=len(part)) for part in parts]}
    builder.info.set_splits(writer.split_dict(staging, "dsprites", results))
    builder.info.write_to_directory(staging)
    shards.write_json(
        staging / f"{vtab_source.GENERATED}.json", dict(by="vit_jax.vtab.sprites", like="dSprites")
    )
    staging.rename(folder)
    return folder


def order(split: str, keys: Sequence[str]) -> np.ndarray:
    """Numbers of the examples in the order of the files, int64 [examples]: by the MD5 of split and
    key.

    A split is cut into shards in this order, so a slice such as train[:800] does not depend on
    their number.

    Args:
      keys: those that the builder yields, whole numbers in decimal.
    """
    hashes = [hashlib.md5((split + key).encode(), usedforsecurity=False).digest() for key in keys]
    return np.asarray(sorted(range(len(keys)), key=hashes.__getitem__), np.int64)
