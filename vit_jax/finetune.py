"""Fine-tuning with a choice of the learning rate: each is tried on a part of the training data, the
best on all of it.

python -m vit_jax.finetune --config=configs/finetune.py:VARIANT,DATASET --config.init_from=WEIGHTS --workdir=DIR
    [--lrs=0.001,0.003,0.01,0.03] [--held_out=10%]

Each run is one of `vit_jax.train` in a folder of its own, DIR/lr_0.01 and so on, and DIR/final.
"""

import json
import logging
import re
import sys
from collections.abc import Sequence

import jax
from etils import epath
from rich.console import Console
from rich.table import Table

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.distributed import runtime, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line
from vit_jax.train import loop, metrics, workdir

log = logging.getLogger("vit_jax.finetune")

LRS = (0.001, 0.003, 0.01, 0.03)  # arXiv 2010.11929 table 4, of most data sets
HELD_OUT = "held_out"  # name of the evaluation that decides
KEY = f"eval/{HELD_OUT}/top1"


def numbers(text: str) -> list[float]:
    """The learning rates of a list with commas.

    Raises:
      UserError: one is no positive number.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < lr < 1e6 for lr in found):
        raise UserError(
            f"--lrs={text} must be positive numbers with commas between them, as 0.001,0.003: "
            "correct it"
        )
    return sorted(set(found))


def train_share(text: str) -> str:
    """The share that is trained on where `text`, as 10%, is held out.

    Raises:
      UserError: it is no such share.
    """
    found = re.fullmatch(r"(\d+(\.\d+)?)%", text)
    if not found or not 0 < float(found[1]) < 100:
        raise UserError(
            f"--held_out={text} must be a share above 0 and below 100, as 10%: correct it"
        )
    return f"{100 - float(found[1]):g}%"


def trial(config, lr: float, share: str):
    """The config of a try: evaluated at the end on what is not trained on, by the settings of its
    first evaluation.

    Raises:
      UserError: there is no evaluation, or only a part of the data is trained on already.
    """
    usual = [entry for entry in config.evals.values() if entry.type == "classification"]
    if not usual:
        raise UserError(
            "config.evals has no classification, which says how images are evaluated: add one"
        )
    if config.data.subset or config.data.name == "mixture":
        raise UserError(
            "a part of the data is held out by data.subset, which can't be of a mixture or be set: "
            "undo it"
        )
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.optim.lr, own.data.subset = lr, share
        own.evals = {HELD_OUT: usual[0].copy_and_resolve_references()}
        own.evals[HELD_OUT].every = 0
        own.evals[HELD_OUT].data.update(rest=True, split=config.data.split, name="", data_dir="")
        own.checkpoint.every, own.checkpoint.keep_best = 0, ""
    return own.lock()


def run(config, folder: epath.Path) -> dict[str, float]:
    """Trains in `folder`, or goes on; returns the metrics of the end."""
    with cli.logging_to(workdir.make(str(folder))):
        loop.train(config, folder)
    lines = metrics.read_lines(folder / "metrics.jsonl")
    return {key: value for line in lines for key, value in line.items()}


def attempt(config, folder: epath.Path) -> float | None:
    """The accuracy of a try; None where loss or gradients were not finite."""
    try:
        return run(config, folder)[KEY]
    except NegativeResult as error:
        log.warning("lr %g: %s", config.optim.lr, one_line(error))
        return None


def matters(key: str) -> bool:
    """Whether a try is another one with another value of this key of its config."""
    return key != "optim.lr" and (workdir.is_fixed(key) or key.startswith(f"evals.{HELD_OUT}."))


def load_trials(path: epath.Path, about: dict) -> dict[str, float | None]:
    """What finetune.json holds; nothing where it is damaged: finished runs lie beside it and are
    not done again.

    Raises:
      UserError: it is of another config.
    """
    try:
        found = json.loads(path.read_text())
        tried, same = dict(found["tried"]), found["about"] == about
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not same:
        raise UserError(
            f"--workdir={path.parent} holds a fine-tuning with another config: choose another "
            "folder"
        )
    return tried


def choose(
    config, folder: epath.Path, lrs: Sequence[float], share: str
) -> dict[float, float | None]:
    """Accuracies on the held-out part by learning rate; those that stand in finetune.json are not
    tried again.

    Raises:
      UserError: that file is of another config.
    """
    path, flat = (
        folder / "finetune.json",
        configs.flatten(configs.to_json(trial(config, lrs[0], share))),
    )
    about = json.loads(json.dumps({key: value for key, value in flat if matters(key)}))
    tried = load_trials(path, about)
    for lr in lrs:
        if f"{lr:g}" not in tried:
            tried[f"{lr:g}"] = attempt(trial(config, lr, share), folder / f"lr_{lr:g}")
            if jax.process_index() == 0:
                cli.replace_file(path, json.dumps(dict(about=about, tried=tried), indent=1) + "\n")
    return {lr: tried[f"{lr:g}"] for lr in lrs}


def finish(config, folder: epath.Path, lr: float) -> dict[str, float]:
    """Trains on everything with the chosen learning rate; returns the metrics of the end.

    Raises:
      UserError: what lies there was trained with another one, which was the best of fewer.
    """
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.optim.lr = lr
    try:
        before = json.loads((folder / "config.json").read_text())["config"]["optim"]["lr"]
    except (OSError, ValueError, KeyError, TypeError):
        before = lr
    if before != lr:
        raise UserError(
            f"{folder} was trained with the learning rate {before:g}, but {lr:g} is better: move "
            "it away, and run the same command again"
        )
    return run(own.lock(), folder)


def show(tried: dict[float, float | None], final: dict[str, float]) -> None:
    table = Table("learning rate", "held-out top-1", title="fine-tuning")
    for lr, top1 in tried.items():
        table.add_row(f"{lr:g}", "not finite" if top1 is None else f"{top1:.2%}")
    for key in [key for key in final if re.fullmatch(r"eval/.*/top1", key)]:
        table.add_row(
            f"{best(tried):g}, all of train", f"{key.split('/')[1]} {final[key]:.2%}", style="bold"
        )
    Console().print(table)


def best(tried: dict[float, float | None]) -> float:
    """The learning rate with the highest accuracy, the lowest of equals.

    Raises:
      NegativeResult: none ended with finite numbers.
    """
    sound = {lr: top1 for lr, top1 in tried.items() if top1 is not None}
    if not sound:
        raise NegativeResult(
            "loss or gradients were not finite with any of the learning rates: try lower ones"
        )
    return max(sound, key=sound.get)


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


def work(args) -> None:
    config = args.config
    lrs = numbers(args.lrs)
    share = train_share(args.held_out)
    trial(config, lrs[0], share)  # a config that does not fit is found before anything starts
    runtime.start()
    folder = workdir.make(args.workdir)
    tried = choose(config, folder, lrs, share)
    final = finish(config, folder / "final", best(tried))
    if jax.process_index() == 0:
        show(tried, final)
        chosen = {key: value for key, value in final.items() if key.startswith("eval/")}
        cli.write_json(args.json, dict(tried=tried, lr=best(tried), final=chosen))
    print(f"The model: {folder / 'final'}")


COMMAND = cli.Command(
    "finetune",
    __doc__,
    work,
    add_arguments,
    config="like vit_jax.train's; --config.KEY=VALUE overrides",
    json="write the accuracies here",
    recovery="finished trials and saved checkpoints are intact, and the same command continues",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
