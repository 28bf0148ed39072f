"""Measures big_vision's training input pipeline on data prepared for TFDS.

    python -m comparisons.big_vision_data --big_vision=PATH --data_dir=DIR [--randaug]

PATH is a checkout, the folder that contains the package `big_vision`; it needs `pip install einops
overrides`. Prints a line of JSON: images_per_sec, core_ms_per_image (user and system time of all
threads), peak_rss_mib, and bytes_per_image_to_device. Use one process per measurement, so that the
peak of memory is its own, and more examples than its shuffle buffer has (2,000): each epoch is
shuffled separately.
"""

import argparse
import importlib
import importlib.util
import json
import resource
import sys
import time
import types

CROP = "decode_jpeg_and_inception_crop(224)|flip_lr|"
REST = 'value_range(-1,1)|onehot(10, key="label", key_result="labels")|keep("image","labels")'
MODULES = ("ops_general", "ops_image", "archive.randaug")


def addons_image() -> types.ModuleType:
    """The functions of `tensorflow_addons.image`, which no longer installs, that big_vision's
    RandAugment uses.
    """
    import tensorflow as tf

    def transform(images, transforms):
        """`transforms` [8] maps output to input coordinates (x, y), as the op does."""
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images[None],
            transforms=tf.reshape(tf.cast(transforms, tf.float32), [1, 8]),
            output_shape=tf.shape(images)[:2],
            fill_value=0.0,
            interpolation="NEAREST",
            fill_mode="CONSTANT",
        )[0]

    def translate(images, translations):
        x, y = tf.unstack(tf.cast(translations, tf.float32))
        return transform(images, tf.stack([1.0, 0.0, -x, 0.0, 1.0, -y, 0.0, 0.0]))

    def rotate(images, angles):
        """Counterclockwise by `angles`, about the centre of the pixel grid."""
        height, width = tf.unstack(tf.cast(tf.shape(images)[:2] - 1, tf.float32))
        cos = tf.cos(angles)
        sin = tf.sin(angles)
        x = (width - (cos * width - sin * height)) / 2
        y = (height - (sin * width + cos * height)) / 2
        return transform(images, tf.stack([cos, -sin, x, sin, cos, y, 0.0, 0.0]))

    module = types.ModuleType("tensorflow_addons.image")
    module.transform = transform
    module.translate = translate
    module.rotate = rotate
    return module


def open_big_vision(path: str) -> None:
    """Makes `import big_vision` work and registers its preprocessing."""
    sys.path.insert(0, path)
    if importlib.util.find_spec("tensorflow_addons") is None:
        package = types.ModuleType("tensorflow_addons")
        package.image = addons_image()
        sys.modules |= {"tensorflow_addons": package, "tensorflow_addons.image": package.image}
    for name in MODULES:
        importlib.import_module(f"big_vision.pp.{name}")


def open_data(args):
    """Training data as big_vision's trainer makes them: tf.data batches of float32 images and
    one-hot labels.
    """
    from big_vision import input_pipeline
    from big_vision.datasets import core
    from big_vision.pp import builder

    # TFDS has no code for these data: big_vision opens their folder.
    source = core.get("from_data_dir", split="train", data_dir=f"{args.data_dir}/{args.name}/1.0.0")
    steps = CROP + ("randaug(2,15)|" if args.randaug else "") + REST
    return input_pipeline.make_for_train(
        data=source.get_tfdata(ordered=False),
        preprocess_fn=builder.get_preprocess_fn(steps),
        batch_size=args.batch_size,
        shuffle_buffer_size=args.shuffle_buffer_size,
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_mib() -> int:
    """Of this program alone: Linux's ru_maxrss starts at that of the parent process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) // 1024


def measure(batches, images: int, warmup: int, batch_size: int) -> dict:
    """Reads `images` after `warmup` others, as numpy arrays without a copy, as they go to the
    device.
    """
    for _ in range(-(-warmup // batch_size)):
        batch = next(batches)
    count = -(-images // batch_size)
    cpu_start = cpu_seconds()
    start = time.perf_counter()
    for _ in range(count):
        batch = next(batches)
    cpu = cpu_seconds() - cpu_start
    wall = time.perf_counter() - start
    return dict(
        images_per_sec=round(count * batch_size / wall, 1),
        core_ms_per_image=round(1e3 * cpu / (count * batch_size), 4),
        peak_rss_mib=peak_rss_mib(),
        bytes_per_image_to_device=sum(array.nbytes for array in batch.values()) // batch_size,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--big_vision", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--name", default="photos")
    parser.add_argument("--randaug", action="store_true")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--shuffle_buffer_size", type=int, default=2000)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=512)
    args = parser.parse_args()
    open_big_vision(args.big_vision)
    batches = open_data(args).as_numpy_iterator()
    print(json.dumps(measure(batches, args.images, args.warmup, args.batch_size)))


if __name__ == "__main__":
    main()
