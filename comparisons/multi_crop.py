"""Host time of the views of DINO against that of their crops one by one.

    python -m comparisons.multi_crop --config=FILE.py[:ARG] [--images=N] [--runs=N]

The config has objective=dino. Its pipeline, which decodes an image once for all views, takes turns
with two pipelines of one crop per image: a global view, and a local one, of which only the window
is decoded. The last line is the median of the ratios to the sum over all views.
"""

import argparse
import dataclasses
import statistics

import numpy as np

from vit_jax import config as configs
from vit_jax.benchmark.core_time import WARMUP, measure
from vit_jax.data import image_ops, images, pipeline, shapes, views
from vit_jax.data.sources import open as sources


def one_crop(host: pipeline.Pipeline, area: tuple[float, float], side: int) -> pipeline.Pipeline:
    """A pipeline of one view of each image."""

    def box(shape, seed):
        return image_ops.torchvision_boxes(shape, seed, [area])[0]

    def prepare(encoded, seed, rotates):
        return views.resize(images.decode_box(encoded, seed, box, rotates=rotates), side)

    shape = shapes.of_one((side, side))
    return dataclasses.replace(host, pixels=images.alone(prepare), shapes=shape)


def compare(config, count: int, runs: int) -> list[float]:
    """The ratio of core time in each of `runs` rounds, over `count` images."""
    size = config.data.batch_size
    settings = config.data.views
    source = sources.open_training(config.data, config.user, configs.uses_labels(config))
    host = pipeline.train_pipeline(config, source, np.arange(size), 2**31)
    pipelines = {
        "all views": host,
        "a global view": one_crop(host, settings.global_area, config.image_size),
        "a local view": one_crop(host, settings.local_area, settings.local_size),
    }
    iterators = {name: one.batches() for name, one in pipelines.items()}
    for iterator in iterators.values():
        measure(iterator, WARMUP * size, size)
    ratios = []
    for _ in range(runs):
        cost = {name: measure(iterator, count, size)[0] for name, iterator in iterators.items()}
        total = shapes.GLOBAL_VIEWS * cost["a global view"]
        total += settings.local_count * cost["a local view"]
        ratios.append(cost["all views"] / total)
        texts = ", ".join(f"{name} {ms:.2f}" for name, ms in cost.items())
        print(f"core-ms per image: {texts}; crops one by one {total:.2f}; ratio {ratios[-1]:.3f}")
    for iterator in iterators.values():
        iterator.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    args, overrides = parser.parse_known_args()
    config = configs.load(args.config, overrides)
    if not configs.has_views(config):
        parser.error("the config has one crop of each image: add --config.objective=dino")
    ratios = compare(config, args.images, args.runs)
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
