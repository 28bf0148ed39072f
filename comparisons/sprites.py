"""Sprites with the structure of dSprites, drawn here: a data set that can be made without a
network, for comparisons and tests.

3 shapes x 6 scales x 40 orientations x 32 x 32 positions, 64 x 64 pixels of 0 and 1, with TFDS's
features and in TFDS's order: a part such as train800 has the same labels as in the real data. The
pixels are not those of dSprites, so write the sprites to a folder of their own.
"""

import functools
import hashlib
import io
import math
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image

# Latents in the order in which an example's number counts them, the last one fastest; their values
# are those of dSprites.
SIDE = 64
POSITIONS = 32
ORIENTATIONS = 40
SHAPES = ("square", "ellipse", "heart")
SCALES = np.linspace(0.5, 1.0, 6)
SIZES = (len(SHAPES), len(SCALES), ORIENTATIONS, POSITIONS, POSITIONS)
NAMES = ("shape", "scale", "orientation", "x_position", "y_position")
COUNT = math.prod(SIZES)
FINE = 8  # sample points per pixel and axis
RADIUS = 15.0  # pixels, of the largest sprite


def inside(shape: str, x, y):
    """Whether points lie in a shape of radius 1 about the origin; y points upwards."""
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= math.sqrt(0.5)
    if shape == "ellipse":
        return x**2 + (y / 0.5) ** 2 <= 1
    x = 1.3 * x
    y = 1.3 * y + 0.1
    return (x**2 + y**2 - 1) ** 3 <= x**2 * y**3  # the heart curve


def angle_of(orientation: int) -> float:
    """In radians; the last orientation is a full turn, as in dSprites."""
    return 2 * math.pi * orientation / (ORIENTATIONS - 1)


@functools.cache
def base(shape: int, scale: int, orientation: int) -> np.ndarray:
    """A sprite at position (0, 0), uint8 [64, 64] of 0 and 1: a pixel is 1 if half of it or more is
    covered.
    """
    line = (np.arange(SIDE * FINE) + 0.5) / FINE - SIDE / 4
    x, y = np.meshgrid(line, -line)
    cos = math.cos(angle_of(orientation))
    sin = math.sin(angle_of(orientation))
    radius = RADIUS * SCALES[scale]
    covered = inside(SHAPES[shape], (x * cos + y * sin) / radius, (y * cos - x * sin) / radius)
    return (covered.reshape(SIDE, FINE, SIDE, FINE).mean((1, 3)) >= 0.5).astype(np.uint8)


def factors(number: int) -> tuple[int, ...]:
    """(shape, scale, orientation, x, y) of an example from its number in dSprites."""
    return tuple(int(part) for part in np.unravel_index(number, SIZES))


def image(number: int) -> np.ndarray:
    """uint8 [64, 64] of 0 and 1."""
    *kind, x, y = factors(number)
    return np.roll(base(*kind), (y, x), axis=(0, 1))


def example(number: int) -> bytes:
    """A serialized tf.train.Example with dSprites' features."""
    buffer = io.BytesIO()
    Image.fromarray(image(number)).save(buffer, format="png")
    latents = factors(number)
    shape, scale, orientation, x, y = latents
    line = POSITIONS - 1
    values = (shape + 1, SCALES[scale], angle_of(orientation), x / line, y / line)
    made = tf.train.Example()
    feature = made.features.feature
    feature["image"].bytes_list.value.append(buffer.getvalue())
    for name, latent, value in zip(NAMES, latents, values, strict=True):
        feature[f"label_{name}"].int64_list.value.append(latent)
        feature[f"value_{name}"].float_list.value.append(value)
    return made.SerializeToString()


def write(data_dir: str, count: int = COUNT) -> None:
    """Writes DATA_DIR/dsprites/2.0.0 if it is not there; all examples take a minute or two.

    Args:
      count: number of examples, in TFDS's order; tests write fewer.
    """
    builder = tfds.builder("dsprites:2.0.0", data_dir=data_dir, file_format="array_record")
    if builder.info.splits:
        return
    folder = pathlib.Path(builder.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "dsprites-train.array_record-00000-of-00001"
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for number in tfds_order("train", [str(i) for i in range(COUNT)])[:count].tolist():
        writer.write(example(number))
    writer.close()
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name="dsprites", split="train", filetype_suffix="array_record"
    )
    train = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[count],
        num_bytes=path.stat().st_size,
        filename_template=template,
    )
    builder.info.set_splits(tfds.core.SplitDict([train]))
    builder.info.write_to_directory(folder)


def tfds_order(split: str, keys: Sequence[str]) -> np.ndarray:
    """Numbers of the examples in the order in which TFDS writes them, int64 [examples]: sorted by
    the MD5 of split and key.

    A split is cut into shards in this order, so a slice such as train[:800] does not depend on the
    number of shards.

    Args:
      keys: the keys that the builder yields; whole numbers in decimal.
    """
    hashes = [hashlib.md5((split + key).encode(), usedforsecurity=False).digest() for key in keys]
    return np.asarray(sorted(range(len(keys)), key=hashes.__getitem__), np.int64)
