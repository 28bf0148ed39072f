"""Evaluates weights on the test split of a data set.

python -m vit_jax.evaluate --config=configs/evaluate.py:DATASET[,SPLIT] --config.init_from=WEIGHTS

WEIGHTS is a workdir or a file. Those for ImageNet can be evaluated on imagenet2012,
imagenet2012_real (any label of an image counts as correct), imagenet_v2, imagenet_a, imagenet_r and
imagenet_sketch.
"""

import ml_collections

from vit_jax.data.sources.catalog import CATALOG

# These have 200 of ImageNet's 1,000 classes, and predictions are limited to them (arXiv 1907.07174,
# 2006.16241).
PART_OF_IMAGENET = ("imagenet_a", "imagenet_r")


def get_config(arg="digits"):
    """`arg`: a data set, optionally a split; by default the one that results are reported on."""
    name, _, split = arg.partition(",")
    known = CATALOG.get(name)
    config = ml_collections.ConfigDict()
    config.image_size = 0  # 0: that of the weights; others resample the position embedding
    config.data = dict(name=name, batch_size=256)
    among = "present" if name in PART_OF_IMAGENET else "all"
    config.evals = dict(
        test=dict(among=among, data=dict(split=split or (known.test if known else "test")))
    )
    return config
