"""The protocols by which results on VTAB-1k are comparable, and how a config departs from it."""

import re

from vit_jax import config as configs

# The keys that a protocol sets; all others have their default, or are free.
PROTOCOLS = {
    # arXiv 2010.11929, table 4 and appendix B.1.1. The warm-up, which these omit, is that of the
    # published code; three runs are those of the follow-up papers.
    "vit": {
        "total_steps": 2_500,
        "image_size": 384,
        "loss": "softmax_xent",
        "data.batch_size": 512,
        "data.crop": "random",
        "data.flip": True,
        "optim.name": "sgd",
        "optim.momentum": 0.9,
        "optim.lr": 0.01,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 500,
        "optim.wd": 0.0,
        "optim.grad_clip_norm": 1.0,
        "vtab.seeds": 3,
        "evals.test.data.crop": "resize",
    },
}
# arXiv 1910.04867, the lightweight sweep: four settings, one chosen per task on val200; the median
# of three runs. The warm-up is that of the published script. As in its TensorFlow 1, the update
# at a stair still has the rate before it, and resizing has no half-pixel centres.
PROTOCOLS["lightweight"] = PROTOCOLS["vit"] | {
    "image_size": 224,
    "data.crop": "resize",
    "data.flip": False,
    "optim.lr": 0.1,
    "optim.schedule": "stair",
    "optim.stairs": ((750, 0.1), (1_500, 0.01), (2_250, 0.001)),
    "optim.stairs_after": True,
    "optim.grad_clip_norm": 0.0,
    "optim.warmup_steps": 200,
    "vtab.protocol": "lightweight",
    "vtab.lrs": (0.1, 0.01),
    "vtab.steps": (2_500, 10_000),
    "vtab.score": "median",
    "evals.test.data.method": "bilinear_tf1",
}

# Keys that change results by rounding at most, or that the results name anyway.
FREE = re.compile(
    r"init_from|seed|prng|model\.(?!drop).*|data\.name|optim\.momentum_dtype"
    r"|evals\.test\.data\.batch_size"
)


def is_free(key: str) -> bool:
    """Whether a key may have any value under a protocol."""
    is_resumable = configs.may_change(key) and not key.startswith("evals.")
    return is_resumable or bool(FREE.fullmatch(key))


def departures(config) -> list[str]:
    """How a config differs from its protocol, as "key: the protocol's value -> the config's"."""
    protocol = PROTOCOLS[config.vtab.protocol]
    lines = []
    for key, value in configs.flatten(config):
        standard = protocol.get(key, configs.find(key).default)
        if value != standard and not is_free(key):
            lines.append(f"{key}: {standard} -> {value}")
    return lines
