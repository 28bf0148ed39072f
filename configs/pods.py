"""The models of the ViT papers on pods that they fit: configs/pods.py:VARIANT,CHIP, with
ImageNet-21k and batch size 4096.

    python -m vit_jax.plan --config=configs/pods.py:L/16,v5e
    python -m vit_jax.train --config=configs/pods.py:L/16,v5e --workdir=gs://BUCKET/l16

The recipe is that of configs/pretrain.py (arXiv 2010.11929 table 3), by default on ImageNet-21k;
a third argument names another data set. g/14 and G/14 (arXiv 2106.04560 table 2) use attention
pooling and the recipe of L/16. Each recipe sets its topology, for which the TPU compiler has
compiled it: docs/pods.md, made by `make plans`, has memory, time and cost.
"""

import pathlib

from vit_jax import config as configs
from vit_jax.errors import UserError

# Variant -> chip -> topology: large enough for a run of a day or so, and small enough that
# communication does not dominate a step.
PODS = {
    "B/32": {"v4": "v4:2x2x4", "v5e": "v5e:4x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"},
    "B/16": {"v4": "v4:2x4x4", "v5e": "v5e:4x8", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4"},
    "R50+B/16": {"v4": "v4:2x4x4", "v5e": "v5e:4x8", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4"},
    "L/16": {"v4": "v4:4x4x4", "v5e": "v5e:8x8", "v5p": "v5p:2x4x4", "v6e": "v6e:4x8"},
    "H/14": {"v4": "v4:4x4x8", "v5e": "v5e:16x16", "v5p": "v5p:4x4x4", "v6e": "v6e:8x8"},
    "g/14": {"v4": "v4:4x8x8", "v5e": "v5e:16x16", "v5p": "v5p:4x4x8", "v6e": "v6e:8x16"},
    "G/14": {"v4": "v4:8x8x8", "v5e": "v5e:16x16", "v5p": "v5p:4x8x8", "v6e": "v6e:16x16"},
}

# Differences from plain data parallelism with unrolled layers. On v5e the state of L and H would
# take a fifth or more of the memory. g and G are scanned because their 40 and 48 layers would take
# minutes to compile.
SHARDED = {"mesh": dict(fsdp=16)}
DEEP = SHARDED | {"model": dict(scan=True, remat="names")}
SETTINGS = {("L/16", "v5e"): SHARDED, ("H/14", "v5e"): SHARDED, "g/14": DEEP, "G/14": DEEP}


def get_config(arg="B/16,v5e"):
    """`arg`: VARIANT,CHIP[,DATASET]."""
    variant, _, rest = arg.partition(",")
    chip, _, dataset = rest.partition(",")
    if chip not in PODS.get(variant, {}):
        chips = PODS["B/16"]
        raise UserError(
            f"configs/pods.py:{arg} is not a recipe: use VARIANT,CHIP with VARIANT one of "
            f"{', '.join(PODS)} and CHIP one of {', '.join(chips)}"
        )
    pretrain = configs.import_file(pathlib.Path(__file__).with_name("pretrain.py"))
    config = pretrain.get_config(f"{variant},{dataset or 'imagenet21k'}")
    config.topology = PODS[variant][chip]
    # Dropout is then a hash (models/dropout.py), which is neither drawn nor stored.
    config.prng = "rbg"
    if variant in ("g/14", "G/14"):
        config.model.update(pool="map", pre_logits=False)
    settings = SETTINGS.get((variant, chip)) or SETTINGS.get(variant, {})
    for key, values in settings.items():
        config[key] = {**config.get(key, {}), **values}
    return config
