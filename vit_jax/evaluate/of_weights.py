"""The evaluations of a config for weights that are loaded, and where these are wrong."""

import logging
import math

import jax

from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import own, suite
from vit_jax.weights import adapt
from vit_jax.weights import load as pretrained
from vit_jax.weights.pretrained import Pretrained

log = logging.getLogger("vit_jax.evaluate")

# Keys of `config.model` that any weights can be evaluated with.
FREE = [name for name, key in configs.MODEL.items() if not key.state and not key.train_only]


def take_loss(config, name: str) -> None:
    """Measures the loss of the weights' training; one of the user's own must be asked for."""
    if configs.is_own(name):
        log.warning(
            "the loss of training, %s, is not measured: for that, set --config.loss=%s", name, name
        )
        return
    with config.unlocked():
        config.loss = name


def check_classified(config, out: str) -> None:
    """Raises UserError if there is no classification, which `out` would describe."""
    if not any(entry.type in suite.ON_BATCHES for entry in config.evals.values()):
        raise UserError(
            f"--out={out} describes classifications, but config.evals has none: leave it out, or "
            "choose another config"
        )


def load(config) -> tuple[pretrained.Weights, Pretrained]:
    """The weights at `config.init_from`, and their own model."""
    default = configs.defaults()
    weights = pretrained.read(config.init_from, image_size=config.image_size or None)
    adapt.check_given(config.model, weights.fields)
    fields = {key: config.model[key] for key in FREE if config.model[key] != default.model[key]}
    loaded = pretrained.build(weights, image_size=config.image_size or None, **fields)
    if config.loss == default.loss and weights.loss:
        take_loss(config, weights.loss)
    return weights, loaded


def evaluate(config, out: str = "") -> dict[str, float]:
    """Metrics of `config.evals` for the weights at `config.init_from`.

    Args:
      out: a folder in which every classification NAME is described, in OUT/NAME; "": none.

    Raises:
      NegativeResult: one of them is not finite; nothing is written then.
    """
    weights, loaded = load(config)
    model, params = loaded
    mesh = meshes.make_mesh(config.mesh)
    sharding.check_model(model, mesh)
    own.check(config, model)
    # Hugging Face labels are free text, so match classes by index.
    class_names = weights.class_names if weights.loss else ()
    opened = suite.open_all(config, mesh, class_names, model.num_classes)
    records = {} if out else None
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.param_specs(params, mesh))
        steps = suite.make_steps(config, model)
        scalars = suite.run(opened, steps, params, lambda name: True, records=records)
        check_finite(scalars, weights.path)
        if out:
            from vit_jax.evaluate.mistakes import describe  # imports Matplotlib

            splits = {name: evaluation.test for name, evaluation in opened.items()}
            describe.write(out, records, splits, weights, loaded, params)
    return scalars


def check_finite(scalars: dict[str, float], path: str) -> None:
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise NegativeResult(f"{name} of {path} is not finite: check the weights")
