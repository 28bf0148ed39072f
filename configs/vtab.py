"""The 19 tasks of VTAB-1k (arXiv 1910.04867), by the protocol of the ViT paper or the lightweight
one of VTAB.

    python -m vit_jax.vtab run --config=configs/vtab.py --config.init_from=B_16.npz --workdir=DIR
    python -m vit_jax.vtab run --config=configs/vtab.py:lightweight ...

`vit`: 2,500 steps of 512 images at 384 pixels with learning rate 0.01; three seeds. `lightweight`:
two learning rates times two numbers of steps, chosen for each task on its 200 validation examples,
at 224 pixels; the median of three seeds. The weights determine the model. Expected (ViT paper,
table 2, mean of 19 tasks): H/14 pretrained on JFT-300M 77.63 %, L/16 on JFT-300M 76.28 %, L/16 on
ImageNet-21k 72.72 %.

Cost of `vit` for B/16: 19 x 3 x 4.26e17 FLOP, and 390,000 test images three times.
"""

import ml_collections

from vit_jax.vtab.protocol import PROTOCOLS


def get_config(arg="vit"):
    """`arg`: vit | lightweight."""
    config = ml_collections.ConfigDict(
        dict(
            data=dict(name="vtab"),
            optim={},
            vtab=dict(protocol=arg),
            evals=dict(test=dict(data={})),
        )
    )
    config.update_from_flattened_dict(PROTOCOLS[arg])
    config.model = dict(dtype="bfloat16")
    config.optim.momentum_dtype = "bfloat16"
    return config
