"""Where the model that a fine-tuning delivers is wrong."""

import logging
from collections.abc import Mapping

from etils import epath

from vit_jax.errors import one_line
from vit_jax.evaluate import of_weights, suite
from vit_jax.train.recipe.trials import HELD_OUT

log = logging.getLogger("vit_jax.finetune")


def config_of(config, folder: epath.Path):
    """The classifications of a config, for the checkpoint that the run in `folder` delivers."""
    described = config.copy_and_resolve_references()
    with described.unlocked():
        described.init_from = str(folder)
        for name, entry in config.evals.items():
            if entry.type not in suite.ON_BATCHES:
                del described.evals[name]
    return described.lock()


def describe(config, folder: epath.Path) -> list[str]:
    """Evaluates the checkpoint that the run in `folder` delivers once more, and writes where it is
    wrong to `folder`/evals/NAME.

    Returns:
      A line for every classification. If it can't be done, none: the run is done all the same.
    """
    out = folder / "evals"
    described = config_of(config, folder)
    if not described.evals:
        return []
    try:
        scalars = of_weights.evaluate(described, str(out))
    except Exception as error:  # such as a full disk: what was trained is saved
        log.warning("what the model gets wrong can't be described: %s", one_line(error)[:300])
        return []
    return [line(name, scalars, out) for name in described.evals]


def line(name: str, scalars: Mapping[str, float], out: epath.Path) -> str:
    """Such as "2 of 31 held-out images, DIR/final/evals/held_out/mistakes.jpg"."""
    count = round(scalars[f"eval/{name}/count"])
    wrong = count - round(scalars[f"eval/{name}/top1"] * count)
    images = "held-out images" if name == HELD_OUT else f"images of {name}"
    if not wrong:
        return f"none of {count:,} {images}"
    return f"{wrong:,} of {count:,} {images}, {out / name}/mistakes.jpg"
