"""Evaluates weights on any data set, by the same code as inside training.

python -m vit_jax.evaluate --config=configs/evaluate.py[:DATASET[,SPLIT]]
    --config.init_from=WEIGHTS
"""

import json
import logging
import math
import signal
import sys

import jax

from vit_jax import cli, errors
from vit_jax import config as configs
from vit_jax.config import own_parts
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import preflight, runtime, sharding, watchdog
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import own, suite
from vit_jax.weights import adapt
from vit_jax.weights import load as pretrained

log = logging.getLogger("vit_jax.evaluate")


def evaluate(config) -> dict[str, float]:
    """Metrics of `config.evals` for the weights at `config.init_from`, whose own model is built."""
    if not config.init_from:
        raise UserError(
            "config key init_from is empty: give the weights, such as "
            "--config.init_from=WORKDIR_OR_FILE"
        )
    if not config.evals:
        raise UserError("config.evals is empty: the config file must have an entry in evals")
    default = configs.defaults()
    free = [name for name, key in configs.MODEL.items() if not key.state and not key.train_only]
    for key, value in config.model.items():
        if key not in free and value not in (None, default.model[key]):
            raise UserError(
                f"config key model.{key} has no effect in evaluate, which builds the model of the "
                "weights: leave it out"
            )
    mesh = meshes.make_mesh(config.mesh)
    weights = pretrained.read(config.init_from, image_size=config.image_size or None)
    adapt.check_given(config.model, weights.fields)
    fields = {key: config.model[key] for key in free if config.model[key] != default.model[key]}
    model, params = pretrained.build(weights, image_size=config.image_size or None, **fields)
    sharding.check_model(model, mesh)
    own.check(config, model)
    if config.loss == default.loss and weights.loss:
        take_loss(config, weights.loss)
    # Hugging Face labels are free text, so match classes by index.
    class_names = weights.class_names if weights.loss else ()
    opened = suite.open_all(config, mesh, class_names, model.num_classes)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, sharding.param_specs(params, mesh))
        scalars = suite.run(opened, suite.make_steps(config, model), params, lambda name: True)
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise NegativeResult(f"{name} of {weights.path} is not finite: check the weights")
    return scalars


def checked(config) -> dict[str, float]:
    """`evaluate`, if all processes have the same config."""
    with cli.logging_to(None):
        own_parts.check(config)
        preflight.check(dict(configs.flatten(config)))
        return evaluate(config)


def score(config) -> dict[str, float]:
    """See `vit_jax.score`; `config`: a loaded one."""
    with cli.raising_user_errors("run the same call again"):
        runtime.start()
        return checked(config)


def take_loss(config, name: str) -> None:
    """Measures the loss of the weights' training; one of the user's own must be asked for."""
    if configs.is_own(name):
        log.warning(
            "the loss of training, %s, is not measured: for that, set --config.loss=%s", name, name
        )
        return
    with config.unlocked():
        config.loss = name


def work(args) -> None:
    runtime.start()
    # In a job of several processes JAX would keep the signal for a save.
    errors.end_on_signals(signal.SIGTERM)
    scalars = checked(args.config)
    if jax.process_index() == 0:
        print(json.dumps(scalars, indent=2))
        cli.write_json(args.json, scalars)


COMMAND = cli.Command(
    "evaluate",
    __doc__,
    work,
    config="what to evaluate on; --config.KEY=VALUE overrides",
    takes_weights=True,
    json="write the metrics here",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
