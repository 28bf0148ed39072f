"""Data sets of TFDS with their real features, splits and counts, and mocked records that repeat.

python tests/vtab/mocked_tfds.py DATA_DIR    writes all of VTAB but dSprites: 1 GB, one minute
"""

import os
import pathlib
import struct
import sys
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

# Examples by split: what VTAB needs of each data set, from the data sets' own pages.
COUNTS = {
    "caltech101:3.0.2": dict(train=3_060, test=6_084),
    "cifar100:3.0.2": dict(train=50_000, test=10_000),
    "dtd:3.0.1": dict(train=1_880, test=1_880, validation=1_880),
    "oxford_flowers102:2.1.1": dict(train=1_020, test=6_149, validation=1_020),
    "oxford_iiit_pet:4.0.0": dict(train=3_680, test=3_669),
    "svhn_cropped:3.1.0": dict(train=73_257, test=26_032),
    "sun397/tfds:4.0.0": dict(train=76_128, test=21_750, validation=10_875),
    "patch_camelyon:2.0.0": dict(train=262_144, test=32_768, validation=32_768),
    "eurosat/rgb:2.0.0": dict(train=27_000),
    "resisc45:3.0.0": dict(train=31_500),
    "diabetic_retinopathy_detection/btgraham-300:3.0.0": dict(
        train=35_126, test=42_670, validation=10_906
    ),
    "clevr:3.1.0": dict(train=70_000, test=15_000, validation=15_000),
    "dmlab:2.0.1": dict(train=65_550, test=22_735, validation=22_628),
    "kitti:3.1.0": dict(train=6_347, test=711, validation=423),
    "smallnorb:2.0.0": dict(train=24_300, test=24_300),
}
DISTINCT = 97  # records of a split that differ; a prime, so that they mix with any batch size
UNKNOWN_SIDE = 24  # pixels, where a feature leaves that open
DOMAINS = {"pixel_coords": (6.5, 13.0), "location": (2.0, 60.0)}  # of numbers that make labels


def image_value(feature, rng) -> np.ndarray:
    """Few colours, so that it compresses to little."""
    height, width, channels = (UNKNOWN_SIDE if side is None else side for side in feature.shape)
    image = np.zeros((height, width, channels), np.uint8)
    image[:] = rng.integers(0, 255, channels)
    top, left = rng.integers(0, height // 2), rng.integers(0, width // 2)
    image[top : top + height // 3, left : left + width // 3] = rng.integers(0, 255, channels)
    return image


def value(name: str, feature, rng):
    """A random value of a feature."""
    if isinstance(feature, tfds.features.Image):
        return image_value(feature, rng)
    if isinstance(feature, tfds.features.ClassLabel):
        return int(rng.integers(feature.num_classes))
    if isinstance(feature, tfds.features.Text):
        return f"mocked_{rng.integers(10**6):06}"
    if isinstance(feature, tfds.features.BBoxFeature):
        low, high = np.sort(rng.random((2, 2)), axis=0)
        return tfds.features.BBox(ymin=low[0], xmin=low[1], ymax=high[0], xmax=high[1])
    if isinstance(feature, tfds.features.Sequence):
        inner, length = feature.feature, int(rng.integers(3, 11))
        return [value(name, inner, rng) for _ in range(length)]
    if isinstance(feature, tfds.features.FeaturesDict):
        return {key: value(key, part, rng) for key, part in feature.items()}
    shape = tuple(side or 1 for side in feature.shape)
    if np.issubdtype(feature.np_dtype, np.floating):
        low, high = DOMAINS.get(name, (0.0, 1.0))
        return (
            rng.uniform(low, high, shape).astype(feature.np_dtype)
            if shape
            else feature.np_dtype(rng.random())
        )
    return rng.integers(0, 2, shape).astype(feature.np_dtype) if shape else int(rng.integers(2))


def framed(record: bytes) -> bytes:
    """As in a TFRecord file, whose checksums our reader leaves alone."""
    return struct.pack("<QI", len(record), 0) + record + struct.pack("<I", 0)


def write(
    name: str,
    data_dir: str,
    counts: Mapping[str, int],
    records: Mapping[str, list[bytes]] | None = None,
):
    """Writes a data set as TFDS does, with serialized `records` by split or mocked ones, as often
    as `counts` says.
    """
    builder = tfds.builder(name, data_dir=data_dir)
    folder, info = pathlib.Path(os.fspath(builder.data_dir)), builder.info
    folder.mkdir(parents=True, exist_ok=True)
    splits = []
    for split, count in counts.items():
        rng = np.random.default_rng([len(name), len(split), count])
        own = (records or {}).get(split) or [
            info.features.serialize_example(
                info.features.encode_example(value("", info.features, rng))
            )
            for _ in range(min(DISTINCT, count))
        ]
        once = [framed(record) for record in own]
        path = folder / f"{builder.name}-{split}.tfrecord-00000-of-00001"
        path.write_bytes(
            b"".join(once) * (count // len(once)) + b"".join(once[: count % len(once)])
        )
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=builder.name, split=split, filetype_suffix="tfrecord"
        )
        size, lengths = path.stat().st_size, [count]
        splits.append(
            tfds.core.SplitInfo(
                name=split, shard_lengths=lengths, num_bytes=size, filename_template=template
            )
        )
    info.set_file_format("tfrecord")
    info.set_splits(tfds.core.SplitDict(splits))
    info.write_to_directory(folder)


def main(data_dir: str) -> None:
    tf.config.set_visible_devices([], "GPU")
    for name, counts in COUNTS.items():
        write(name, data_dir, counts)


if __name__ == "__main__":
    main(sys.argv[1])
