"""The recipes of configs/pretrain.py with the few-shot accuracy on ImageNet by which the ViT paper
compares models (arXiv 2010.11929 section 4.1). The studies in this folder use it.

    python -m vit_jax.train --config=configs/studies/pretrain.py:B/16,jft300m --workdir=DIR

Cost: that of the recipe; the features of 1.3 million images for each evaluation.
"""

import pathlib

from vit_jax import config as configs

HELD_OUT = 100_000  # images of JFT-300M


def get_config(arg="B/16,jft300m"):
    """`arg`: VARIANT,DATASET."""
    recipes = configs.import_file(pathlib.Path(__file__).parent.parent / "pretrain.py")
    config = recipes.get_config(arg)
    few = dict(name="imagenet2012", split="validation", train_split="train", crop="central")
    config.evals = {
        **config.get("evals", {}),
        "few": dict(type="fewshot", every=20_000, shots=(5,), data=few),
    }
    if arg.endswith(",jft300m"):  # which has no split of its own for it
        config.data.split = f"train[:-{HELD_OUT}]"
        held_out = dict(split=f"train[-{HELD_OUT}:]", crop="central")
        config.evals["held_out"] = dict(every=20_000, data=held_out)
    return config
