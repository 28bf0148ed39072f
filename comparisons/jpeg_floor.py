"""What the JPEG decoder alone takes of the input pipeline: the least that any pipeline needs.

    python -m comparisons.jpeg_floor --data_dir=DIR [--name=photos_array_record] [--images=512]

DIR is that of `comparisons.photos`. The windows of the first images' Inception crops are decoded
from memory in one loop of TensorFlow: at full size, and all of them at 1/2, 1/4 and 1/8, which
leaves little but the Huffman decoding. Prints core-ms per image, medians of `--runs`.
"""

import argparse
import statistics

import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax.benchmark.core_time import core_seconds
from vit_jax.data import image_ops, images, jpeg_window, order

SIDE = 224


def read(folder: str, count: int) -> list[bytes]:
    """The first JPEGs of the split train."""
    builder = tfds.builder_from_directory(folder)
    decoders = dict(image=tfds.decode.SkipDecoding())
    source = builder.as_data_source(split="train", decoders=decoders)
    return [source[i]["image"] for i in range(min(count, len(source)))]


def loop(make, encoded, windows):
    """A graph that calls make(image, window) for one image after the other."""

    @tf.function
    def run():
        def body(i, total):
            image = make(encoded[i], windows[i])
            return i + 1, total + tf.cast(image[0, 0, 0], tf.int32)  # so that it is computed

        return tf.while_loop(lambda i, total: i < len(windows), body, [0, 0], parallel_iterations=1)

    return run


def decode_and_resize(encoded, window):
    return image_ops.resize(jpeg_window.exact(encoded, window), SIDE)


def at_ratio(ratio: int):
    return lambda encoded, window: jpeg_window.reduced(encoded, window, ratio)


CASES = {
    "crop": jpeg_window.exact,
    "crop at 1/2": at_ratio(2),
    "crop at 1/4": at_ratio(4),
    "crop at 1/8": at_ratio(8),
    "whole image": lambda encoded, window: tf.io.decode_jpeg(encoded, channels=3),
    "crop and resize": decode_and_resize,
}


def measure(files: list[bytes], runs: int) -> dict[str, float]:
    """Core-ms per image of each case, in alternating runs."""
    encoded = tf.constant(files)
    seeds = order.example_seeds(0, 0, tf.range(len(files), dtype=tf.int64), 0)
    windows = tf.stack(
        [
            images.inception_window(images.jpeg_shape(file), seed, 0.05)
            for file, seed in zip(files, seeds, strict=True)
        ]
    )
    loops = {name: loop(make, encoded, windows) for name, make in CASES.items()}
    found = {name: [] for name in loops}
    for run in loops.values():
        run()
    for _ in range(runs):
        for name, run in loops.items():
            start = core_seconds()
            run()
            found[name].append(1e3 * (core_seconds() - start) / len(files))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--name", default="photos_array_record")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    files = read(f"{args.data_dir}/{args.name}/1.0.0", args.images)
    for name, cost in measure(files, args.runs).items():
        print(f"{name:20}{cost:8.3f} core-ms per image")


if __name__ == "__main__":
    main()
