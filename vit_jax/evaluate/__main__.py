"""Evaluates weights on any data set, by the same code as inside training.

python -m vit_jax.evaluate --config=configs/evaluate.py[:DATASET[,SPLIT]]
    --config.init_from=WEIGHTS [--out=DIR]
"""

import json
import signal
import sys

import jax

from vit_jax import cli, errors
from vit_jax import config as configs
from vit_jax.cli import out_folder
from vit_jax.config import own_parts
from vit_jax.distributed import preflight, runtime, watchdog
from vit_jax.errors import UserError
from vit_jax.evaluate import of_weights


def check(config) -> None:
    """Raises UserError if keys of the config are missing, or have no effect here."""
    if not config.init_from:
        raise UserError(
            "config key init_from is empty: give the weights, such as "
            "--config.init_from=WORKDIR_OR_FILE"
        )
    if not config.evals:
        raise UserError("config.evals is empty: the config file must have an entry in evals")
    default = configs.defaults()
    for key, value in config.model.items():
        if key not in of_weights.FREE and value not in (None, default.model[key]):
            raise UserError(
                f"config key model.{key} has no effect in evaluate, which builds the model of the "
                "weights: leave it out"
            )


def evaluate(config, out: str = "") -> dict[str, float]:
    """Metrics of `config.evals` for the weights at `config.init_from`, whose own model is built;
    `out`: see `of_weights.evaluate`.
    """
    check(config)
    if out:
        of_weights.check_classified(config, out)
        out_folder.make(out)
    return of_weights.evaluate(config, out)


def checked(config, out: str = "") -> dict[str, float]:
    """`evaluate`, if all processes have the same config."""
    with cli.logging_to(None):
        own_parts.check(config)
        preflight.check(dict(configs.flatten(config)) | dict(out=out))
        return evaluate(config, out)


def score(config, out: str = "") -> dict[str, float]:
    """See `vit_jax.score`; `config`: a loaded one."""
    with cli.raising_user_errors("run the same call again"):
        runtime.start()
        return checked(config, out)


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="",
        help="where to write what the model gets wrong, in a folder for each classification",
    )


def work(args) -> None:
    runtime.start()
    # In a job of several processes JAX would keep the signal for a save.
    errors.end_on_signals(signal.SIGTERM)
    scalars = checked(args.config, args.out)
    if jax.process_index() == 0:
        print(json.dumps(scalars, indent=2))
        cli.write_json(args.json, scalars)


COMMAND = cli.Command(
    "evaluate",
    __doc__,
    work,
    add_arguments,
    config="what to evaluate on; --config.KEY=VALUE overrides",
    takes_weights=True,
    json="write the metrics here",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
