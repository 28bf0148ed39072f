"""Makes a data set of synthetic photographs to measure input pipelines.

    python -m comparisons.photos --out=DIR [--count=1500] [--seed=0] [--short_side=256] [--scale=4]

The images are JPEGs of about 500 x 375 pixels and 95 kB, as in ImageNet: noise with the 1/f
spectrum of natural images, and objects with sharp edges. They are prepared for TFDS twice, as
`photos` (tfrecord) and `photos_array_record`, with splits train and val. --short_side adds reduced
images, as a user may prepare them: `photos_256` and `photos_256_array_record`. --scale multiplies
the sides: with 4, the images are those of a camera, about 2000 x 1500 pixels.
"""

import argparse
import io
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image, ImageDraw

# (width, height) and their shares.
SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 400), (448, 336), (640, 480))
SHARES = (0.45, 0.15, 0.15, 0.08, 0.07, 0.06, 0.04)
CLASSES = 10
QUALITY = 90
SHARDS = 4
FORMATS = ("tfrecord", "array_record")


def noise(rng: np.random.Generator, width: int, height: int, slope: float) -> np.ndarray:
    """Noise [H, W, 3] whose amplitude decreases with frequency as f ** -slope, mostly the same in
    all channels.
    """
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    amplitude = np.maximum(frequency, 1 / max(width, height)) ** -slope
    white = np.fft.rfft2(rng.standard_normal((3, height, width)))
    grey, red, blue = np.fft.irfft2(white * amplitude, (height, width))
    grey, red, blue = (channel / channel.std() for channel in (grey, red, blue))
    green = grey - 0.15 * red - 0.15 * blue
    return np.stack([grey + 0.35 * red, green, grey + 0.35 * blue], axis=-1)


def outline(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A mask of one object: an ellipse or a polygon."""
    mask = Image.new("L", (width, height))
    centre = rng.uniform(0, 1, 2) * (width, height)
    extent = rng.uniform(0.05, 0.35, 2) * min(width, height)
    if rng.random() < 0.5:
        ImageDraw.Draw(mask).ellipse([*(centre - extent), *(centre + extent)], fill=255)
    else:
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 9)))
        corners = centre + extent * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        ImageDraw.Draw(mask).polygon([tuple(corner) for corner in corners.tolist()], fill=255)
    return mask


def photo(rng: np.random.Generator, scale: int = 1) -> Image.Image:
    """A background and up to twelve objects, each with its own colour, contrast and sharpness."""
    width, height = (scale * side for side in SIZES[rng.choice(len(SIZES), p=SHARES)])

    def surface():
        colour = rng.uniform(50, 205, 3)
        contrast = rng.uniform(25, 60)
        pixels = colour + contrast * noise(rng, width, height, rng.uniform(0.8, 1.3))
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    image = surface()
    other = surface()
    for _ in range(rng.integers(3, 13)):
        mask = outline(rng, width, height)
        colour = tuple(rng.integers(0, 256, 3).tolist())
        filled = Image.blend(other, Image.new("RGB", image.size, colour), 0.5)
        image.paste(filled, mask=mask)
    return image


def encode(image: Image.Image, short_side: int) -> bytes:
    """A JPEG of the image; its shorter side is reduced to `short_side`, unless that is 0."""
    if short_side:
        ratio = short_side / min(image.size)
        image = image.resize([round(side * ratio) for side in image.size], Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def writer(out: pathlib.Path, name: str, file_format: str, per_shard: int):
    folder = out / name / "1.0.0"
    folder.mkdir(parents=True)
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(folder), module_name=""
    )
    image = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")
    label = tfds.features.ClassLabel(num_classes=CLASSES)
    features = tfds.features.FeaturesDict(dict(image=image, label=label))
    keys = ("image", "label")
    info = tfds.core.DatasetInfo(builder=identity, features=features, supervised_keys=keys)
    options = dict(max_examples_per_shard=per_shard, file_format=file_format)
    return tfds.core.SequentialWriter(info, **options)


def examples(numbers: range, seed: int, sides: tuple, scale: int) -> Iterator[tuple[dict, int]]:
    """({shorter side: JPEG}, label); each depends only on the seed and its number."""
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        image = photo(rng, scale)
        yield {side: encode(image, side) for side in sides}, int(rng.integers(CLASSES))


def make(
    out: pathlib.Path, count: int, seed: int = 0, short_side: int = 0, scale: int = 1
) -> float:
    """Writes `count` examples to train and a tenth as many to val; returns the mean size of those
    in train in kB.
    """
    sides = (0, short_side) if short_side else (0,)
    splits = dict(train=range(count), val=range(count, count + -(-count // 10)))
    made = {split: list(examples(numbers, seed, sides, scale)) for split, numbers in splits.items()}
    for side in sides:
        for file_format in FORMATS:
            name = "photos"
            if side:
                name += f"_{side}"
            if file_format != "tfrecord":
                name += f"_{file_format}"
            output = writer(out, name, file_format, -(-count // SHARDS))
            output.initialize_splits(list(splits))
            for split, pairs in made.items():
                rows = [dict(image=io.BytesIO(files[side]), label=label) for files, label in pairs]
                output.add_examples({split: rows})
            output.close_all()
    return float(np.mean([len(files[0]) for files, _ in made["train"]])) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short_side", type=int, default=0)
    parser.add_argument("--scale", type=int, default=1)
    args = parser.parse_args()
    mean = make(args.out, args.count, args.seed, args.short_side, args.scale)
    print(f"{args.count} photographs, {mean:.0f} kB on average, in {args.out}")


if __name__ == "__main__":
    main()
