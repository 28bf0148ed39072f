"""Fine-tuning: of a folder of images, or as a config says, with a choice of the learning rate.

python -m vit_jax.finetune FOLDER --init_from=WEIGHTS [--workdir=DIR] [--config.KEY=VALUE ...]
python -m vit_jax.finetune --config=configs/finetune.py:VARIANT,DATASET
    --init_from=WEIGHTS --workdir=DIR [--lrs=0.001,0.003,0.01,0.03] [--held_out=10%]

The first chooses everything itself, by `vit_jax/train/recipe`; FOLDER may also be another data set,
such as csv:PATH. With a config, each learning rate is tried on a part of the training data, and the
best trains on all of it. Each run is one of `vit_jax.train` in a folder of its own, DIR/lr_0.01 and
so on, and DIR/final.
"""

import contextlib
import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from etils import epath

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.cli import regular
from vit_jax.config import evaluations
from vit_jax.distributed import preemption, runtime, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line, printable
from vit_jax.train import goodput, workdir
from vit_jax.train.fit import run
from vit_jax.train.recipe import facts, mistakes, prepare, report, trials

log = logging.getLogger("vit_jax.finetune")

LRS = (0.001, 0.003, 0.01, 0.03)  # arXiv 2010.11929 table 4, of most data sets


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


def run_trial(config, folder: epath.Path, metric: str) -> float | None:
    """The result of a trial run; None if loss or gradients were not finite."""
    try:
        found = run(config, folder)
    except NegativeResult as error:
        log.warning("lr %g: %s", config.optim.lr, one_line(error))
        return None
    if metric not in found:
        raise UserError(
            f"the trial run {folder} has no {metric}: delete this folder, and run the same command "
            "again"
        )
    return found[metric]


def matters(key: str) -> bool:
    """Whether another value of this key makes another trial run, or another result of it."""
    is_held_out = key.startswith(f"evals.{trials.HELD_OUT}.")
    is_measured = is_held_out and not key.endswith(evaluations.WITHOUT_EFFECT)
    return key != "optim.lr" and (workdir.is_fixed(key) or is_measured)


def load_trials(path: epath.Path, about: dict) -> dict[str, float | None]:
    """Accuracies by learning rate from finetune.json.

    Nothing if it is missing or damaged: the trial runs are beside it, and those that are finished
    are not repeated.

    Raises:
      UserError: it is of another config.
    """
    try:
        saved = json.loads(regular.read_text(path))
        tried = dict(saved["tried"])
        before = dict(configs.flatten(saved["about"]))
        is_same = workdir.stated(before, about) == workdir.stated(about, before)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    if not is_same:
        raise UserError(
            f"--workdir={path.parent} has a fine-tuning with another config: choose another folder"
        )
    return tried


def run_trials(
    make_config: Callable, folder: epath.Path, lrs: Sequence[float], metric: str = trials.KEY
) -> dict[float, float | None]:
    """Results on the held-out part by learning rate; finetune.json has those of before.

    Args:
      make_config: f(learning rate) -> the config of its trial run.
      metric: of that run, what decides.
    """
    path = folder / "finetune.json"
    flat = configs.flatten(configs.to_json(make_config(lrs[0])))
    about = {key: value for key, value in flat if matters(key)}
    tried = load_trials(path, about)
    for number, lr in enumerate(lrs, 1):
        if f"{lr:g}" in tried:
            continue
        log.info("trial run %d of %d: learning rate %g", number, len(lrs), lr)
        tried[f"{lr:g}"] = run_trial(make_config(lr), folder / f"lr_{lr:g}", metric)
        if jax.process_index() == 0:
            text = json.dumps(dict(about=about, tried=tried), indent=1)
            cli.replace_file(path, text + "\n")
    return {lr: tried[f"{lr:g}"] for lr in lrs}


def run_final(config, folder: epath.Path, lr: float) -> None:
    """Trains on everything with the best learning rate.

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
    log.info("final run: learning rate %g", lr)
    run(final.lock(), folder)


def best(tried: dict[float, float | None], metric: str = trials.KEY) -> float:
    """The learning rate with the highest accuracy, or lowest loss; of equals, the lowest."""
    known = {lr: result for lr, result in tried.items() if result is not None}
    finite = {lr: result for lr, result in known.items() if math.isfinite(result)}
    if not finite:
        raise NegativeResult(
            "loss or gradients were not finite with any of the learning rates: try lower ones with "
            "--lrs, or check the images with vit_jax.data check"
        )
    choice = min if metric.endswith("/loss") else max
    return choice(finite, key=finite.get)


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="images in a folder for each class, or a data set such as csv:PATH; without --config",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        help="the same command continues in it (default: FOLDER-finetuned in the current folder)",
    )
    parser.add_argument("--lrs", help="learning rates to try, such as 0.003,0.01 (default: chosen)")
    parser.add_argument(
        "--held_out",
        help="share of the training data that decides (default: 10%%; with FOLDER by its size)",
    )
    workdir.add_arguments(parser)


def work(args) -> None:
    if args.config and args.folder:
        raise UserError(
            f"--config and the folder {args.folder} are both given: give one of them (overrides "
            "are written --config.KEY=VALUE)"
        )
    if args.folder:
        work_on_folder(args)
    elif args.config:
        work_by_config(args)
    else:
        raise UserError(
            "there is nothing to fine-tune on: give a folder of images and --init_from=WEIGHTS, or "
            "--config=FILE.py"
        )


def work_by_config(args) -> None:
    config = args.config
    lrs = LRS if args.lrs is None else learning_rates(args.lrs)
    share = train_share("10%" if args.held_out is None else args.held_out)
    if not args.workdir:
        raise UserError("--workdir is missing: say where the runs write, such as --workdir=DIR")
    prepare.check_outside(args.workdir, config.data.name)
    # A config that does not fit is found before anything starts.
    trials.part_of(config, lrs[0], share)
    start()
    with holding(args, args.workdir) as folder:
        tried = run_trials(lambda lr: trials.part_of(config, lr, share), folder, lrs)
        lr = best(tried)
        run_final(config, folder / "final", lr)
        final = report.delivered(folder / "final")
        wrong = mistakes.describe(config, folder / "final")
    end(args, folder, report.Outcome(tried, trials.KEY, lr, final, "all of train", wrong))


def work_on_folder(args) -> None:
    wish = wish_of(args)
    path = args.workdir or prepare.default_workdir(args.folder)
    prepare.check_outside(path, wish.data_name)
    start()
    with cli.logging_to(None):  # what does not fit is found before anything is written
        found = None if prepare.is_in(path) else prepare.find(wish)
    with holding(args, path) as folder:
        recipe = prepare.load_or_make(folder, wish, found)
        del found  # every run reads the weights itself
        config = recipe.config
        metric = config.checkpoint.keep_best
        if not metric.startswith(f"eval/{trials.HELD_OUT}/"):  # set by the user
            metric = trials.KEY
        tried = {}
        lr = recipe.lrs[0]
        if len(recipe.lrs) > 1:

            def make_trial(lr: float):
                return trials.shorter(config, lr, recipe.steps)

            tried = run_trials(make_trial, folder, recipe.lrs, metric)
            lr = best(tried, metric)
        run_final(config, folder / "final", lr)
        final = report.delivered(folder / "final")
        wrong = mistakes.describe(config, folder / "final")
    what = "all but the held-out images"
    end(args, folder, report.Outcome(tried, metric, lr, final, what, wrong))
    if jax.process_index() == 0:
        compared = report.against_one_answer(final, recipe.largest)
        if compared:
            print(printable(f"Compare:   {compared}"))
        command = f"vit_jax predict --init_from={shlex.quote(path)} IMAGE_OR_FOLDER"
        print(printable(f"Next:      {command}"))


def wish_of(args) -> prepare.Wish:
    """What the command line asks for."""
    given = prepare.read_overrides(args.overrides)
    if not given.get("init_from"):
        raise UserError(
            "--init_from is missing: give the weights to start from, such as --init_from=B_16.npz"
        )
    if args.held_out is not None:
        train_share(args.held_out)
    return prepare.Wish(
        data_name=facts.data_set(args.folder),
        init_from=prepare.location_of(given.pop("init_from")),
        given=given,
        lrs=() if args.lrs is None else tuple(learning_rates(args.lrs)),
        held_out=args.held_out or "",
    )


def start() -> None:
    with goodput.stopwatch.spending("waiting"):
        runtime.start()


@contextlib.contextmanager
def holding(args, path: str) -> Iterator[epath.Path]:
    """The workdir, which this job holds; signals stop the job."""
    folder = workdir.make(path)
    with (
        preemption.signals.listening(lambda: COMMAND.recovery),
        cli.logging_to(None),
        workdir.held(folder, args.take_over),
    ):
        yield folder


def end(args, folder: epath.Path, outcome: report.Outcome) -> None:
    """Shows and writes how it went; process 0 does it for all."""
    if jax.process_index() != 0:
        return
    report.show(outcome)
    cli.write_json(args.json, report.to_json(outcome))
    print(printable(f"The model: {folder / 'final'}"))
    for line in outcome.mistakes:
        print(printable(f"Mistakes:  {line}"))
    write_page(folder)


def write_page(folder: epath.Path) -> None:
    """Writes the page of all runs, and says where; the results stand without it, too."""
    from vit_jax import report as pages  # imports Bokeh

    try:
        print(printable(f"The page:  {pages.write([str(folder)])}"))
    except Exception as error:  # every store has errors of its own
        log.warning("%s has no page (%s)", folder, one_line(error)[:160])


COMMAND = cli.Command(
    "finetune",
    __doc__,
    work,
    add_arguments,
    config="like vit_jax.train's; --config.KEY=VALUE overrides",
    default_configs={"": ""},
    takes_weights=True,
    json="write the accuracies here",
    recovery="finished trials and saved checkpoints are intact, and the same command continues",
    run=watchdog.run,
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
