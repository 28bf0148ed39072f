"""The protocols that results on VTAB-1k are compared under, and what a run does differently."""

import re

from vit_jax import config as configs

# What a protocol says; all else is as by default, or free.
PROTOCOLS = {
    # arXiv 2010.11929 table 4 and appendix B.1.1, which does not tell the warm-up: it is that of
    # the published code. Three runs as in its follow-ups.
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
# arXiv 1910.04867, the lightweight sweep: four settings, chosen by task on val200; the median of
# three runs. The warm-up is that of its script.
PROTOCOLS["lightweight"] = PROTOCOLS["vit"] | {
    "image_size": 224,
    "data.crop": "resize",
    "data.flip": False,
    "optim.lr": 0.1,
    "optim.schedule": "stair",
    "optim.stairs": ((750, 0.1), (1_500, 0.01), (2_250, 0.001)),
    "optim.grad_clip_norm": 0.0,
    "optim.warmup_steps": 200,
    "vtab.protocol": "lightweight",
    "vtab.lrs": (0.1, 0.01),
    "vtab.steps": (2_500, 10_000),
    "vtab.score": "median",
}


# What changes no result but by rounding, or is told elsewhere in the results.
FREE = re.compile(
    r"init_from|seed|prng|model\.(?!drop).*|data\.name|optim\.momentum_dtype|vtab\.generated"
    r"|evals\.test\.data\.batch_size"
)


def is_free(key: str) -> bool:
    """Whether a key may have any value under a protocol."""
    is_resumable = configs.may_change(key) and not key.startswith("evals.")
    return is_resumable or bool(FREE.fullmatch(key))


def departures(config) -> list[str]:
    """What a config does differently from its protocol, as "key: protocol's -> config's"."""
    usual, wanted = configs.known_keys(), PROTOCOLS[config.vtab.protocol]
    compared = (
        (key, wanted.get(key, usual[configs.generic(key)]), value)
        for key, value in configs.flatten(config)
    )
    return [
        f"{key}: {said} -> {value}"
        for key, said, value in compared
        if value != said and not is_free(key)
    ]
