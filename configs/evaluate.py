"""Evaluates weights on the test split of a data set.

python -m vit_jax.evaluate --config=configs/evaluate.py:DATASET[,SPLIT] --config.init_from=WORKDIR_OR_FILE
"""

import ml_collections

from vit_jax.data.catalog import CATALOG


def get_config(arg="digits"):
    """`arg`: a data set, optionally a split; by default the split that results are reported on."""
    name, _, split = arg.partition(",")
    known = CATALOG.get(name)
    config = ml_collections.ConfigDict()
    config.image_size = 0  # that of the weights; another one resamples the position embedding
    config.data = dict(name=name, batch_size=256)
    config.evals = dict(test=dict(data=dict(split=split or (known.test if known else "test"))))
    return config
