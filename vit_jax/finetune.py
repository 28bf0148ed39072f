"""Fine-tuning with a choice of the learning rate: each is tried on a part of the training data, the
best on all of it.

python -m vit_jax.finetune --config=configs/finetune.py:VARIANT,DATASET
    --config.init_from=WEIGHTS --workdir=DIR [--lrs=0.001,0.003,0.01,0.03] [--held_out=10%]

Each run is one of `vit_jax.train` in a folder of its own, DIR/lr_0.01 and so on, and DIR/final.
"""

import json
import logging
import re
import sys
from collections.abc import Sequence

import jax
from etils import epath
from rich.table import Table

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.cli import regular
from vit_jax.cli.terminal import Console
from vit_jax.distributed import preemption, runtime, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line, printable
from vit_jax.train import goodput, workdir
from vit_jax.train.fit import run

log = logging.getLogger("vit_jax.finetune")

LRS = (0.001, 0.003, 0.01, 0.03)  # arXiv 2010.11929 table 4, of most data sets
HELD_OUT = "held_out"  # name of the evaluation that decides
KEY = f"eval/{HELD_OUT}/top1"


def learning_rates(text: str) -> list[float]:
    """The numbers of a list such as "0.001,0.003", in ascending order."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < lr < 1e6 for lr in rates):
        raise UserError(
            f"--lrs={text} must be positive numbers with commas between them, such as 0.001,0.003: "
            "correct it"
        )
    return sorted(set(rates))


def train_share(held_out: str) -> str:
    """What is left to train on: "10%" -> "90%"."""
    match = re.fullmatch(r"(\d+(\.\d+)?)%", held_out)
    if not match or not 0 < float(match[1]) < 100:
        raise UserError(
            f"--held_out={held_out} must be above 0% and below 100%, such as 10%: correct it"
        )
    return f"{100 - float(match[1]):g}%"


def trial_config(config, lr: float, share: str):
    """The config of a trial run with this learning rate.

    It trains on `share` of the data, and is evaluated at its end on the rest, with the settings of
    the first evaluation.
    """
    classifications = [entry for entry in config.evals.values() if entry.type == "classification"]
    if not classifications:
        raise UserError(
            "config.evals has no classification, which says how images are evaluated: add one"
        )
    if config.data.subset or config.data.name == "mixture":
        raise UserError(
            "data.subset is needed to hold a part of the data out, so it can't be set, and the "
            "data can't be a mixture: change one of them"
        )
    trial = config.copy_and_resolve_references()
    with trial.unlocked():
        trial.optim.lr = lr
        trial.data.subset = share
        trial.evals = {HELD_OUT: classifications[0].copy_and_resolve_references()}
        trial.evals[HELD_OUT].every = 0
        trial.evals[HELD_OUT].data.update(rest=True, split=config.data.split, name="", data_dir="")
        trial.checkpoint.every = 0
        trial.checkpoint.keep_best = ""
    return trial.lock()


def run_trial(config, folder: epath.Path) -> float | None:
    """The accuracy of a trial run; None if loss or gradients were not finite."""
    try:
        return run(config, folder)[KEY]
    except NegativeResult as error:
        log.warning("lr %g: %s", config.optim.lr, one_line(error))
        return None


def matters(key: str) -> bool:
    """Whether another value of this key makes another trial run."""
    is_held_out = key.startswith(f"evals.{HELD_OUT}.")
    return key != "optim.lr" and (workdir.is_fixed(key) or is_held_out)


def load_trials(path: epath.Path, about: dict) -> dict[str, float | None]:
    """Accuracies by learning rate from finetune.json.

    Nothing if it is missing or damaged: the trial runs are beside it, and those that are finished
    are not repeated.

    Raises:
      UserError: it is of another config.
    """
    try:
        saved = json.loads(regular.read_text(path))
        trials = dict(saved["tried"])
        is_same = saved["about"] == about
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    if not is_same:
        raise UserError(
            f"--workdir={path.parent} has a fine-tuning with another config: choose another folder"
        )
    return trials


def run_trials(
    config, folder: epath.Path, lrs: Sequence[float], share: str
) -> dict[float, float | None]:
    """Accuracies on the held-out part by learning rate; finetune.json has those of before."""
    path = folder / "finetune.json"
    flat = configs.flatten(configs.to_json(trial_config(config, lrs[0], share)))
    about = json.loads(json.dumps({key: value for key, value in flat if matters(key)}))
    trials = load_trials(path, about)
    for lr in lrs:
        if f"{lr:g}" in trials:
            continue
        trials[f"{lr:g}"] = run_trial(trial_config(config, lr, share), folder / f"lr_{lr:g}")
        if jax.process_index() == 0:
            text = json.dumps(dict(about=about, tried=trials), indent=1)
            cli.replace_file(path, text + "\n")
    return {lr: trials[f"{lr:g}"] for lr in lrs}


def run_final(config, folder: epath.Path, lr: float) -> dict[str, float]:
    """Trains on everything with the best learning rate; returns the last value of every metric.

    Raises:
      UserError: the run in the folder has another learning rate, the best of an earlier list.
    """
    final = config.copy_and_resolve_references()
    with final.unlocked():
        final.optim.lr = lr
    try:
        before = json.loads(regular.read_text(folder / "config.json"))["config"]["optim"]["lr"]
    except (OSError, ValueError, KeyError, TypeError):
        before = lr
    if before != lr:
        raise UserError(
            f"{folder} was trained with the learning rate {before:g}, but {lr:g} is better: move "
            "it away, and run the same command again"
        )
    return run(final.lock(), folder)


def show(trials: dict[float, float | None], final: dict[str, float]) -> None:
    table = Table("learning rate", "held-out top-1", title="fine-tuning")
    for lr, top1 in trials.items():
        table.add_row(f"{lr:g}", "not finite" if top1 is None else f"{top1:.2%}")
    for key in final:
        if re.fullmatch(r"eval/.*/top1", key):
            accuracy = f"{key.split('/')[1]} {final[key]:.2%}"
            table.add_row(f"{best(trials):g}, all of train", accuracy, style="bold")
    Console().print(table)


def best(trials: dict[float, float | None]) -> float:
    """The learning rate with the highest accuracy; of equals, the lowest."""
    finite = {lr: top1 for lr, top1 in trials.items() if top1 is not None}
    if not finite:
        raise NegativeResult(
            "loss or gradients were not finite with any of the learning rates: try lower ones"
        )
    return max(finite, key=finite.get)


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--workdir", required=True, metavar="DIR", help="the same command continues in it"
    )
    parser.add_argument(
        "--lrs",
        default=",".join(map(str, LRS)),
        help="learning rates to try (default: %(default)s)",
    )
    parser.add_argument(
        "--held_out", default="10%", help="share of the training data that decides (default: 10%%)"
    )
    workdir.add_arguments(parser)


def work(args) -> None:
    config = args.config
    lrs = learning_rates(args.lrs)
    share = train_share(args.held_out)
    trial_config(
        config, lrs[0], share
    )  # a config that does not fit is found before anything starts
    with goodput.stopwatch.spending("waiting"):
        runtime.start()
    folder = workdir.make(args.workdir)
    with (
        preemption.signals.listening(lambda: COMMAND.recovery),
        cli.logging_to(None),
        workdir.held(folder, args.take_over),
    ):
        trials = run_trials(config, folder, lrs, share)
        final = run_final(config, folder / "final", best(trials))
    if jax.process_index() == 0:
        show(trials, final)
        chosen = {key: value for key, value in final.items() if key.startswith("eval/")}
        cli.write_json(args.json, dict(tried=trials, lr=best(trials), final=chosen))
    print(printable(f"The model: {folder / 'final'}"))


COMMAND = cli.Command(
    "finetune",
    __doc__,
    work,
    add_arguments,
    config="like vit_jax.train's; --config.KEY=VALUE overrides",
    takes_weights=True,
    json="write the accuracies here",
    recovery="finished trials and saved checkpoints are intact, and the same command continues",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
