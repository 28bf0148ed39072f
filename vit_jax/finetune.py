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
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
from etils import epath
from rich.table import Table

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli import regular
from vit_jax.cli.terminal import Console
from vit_jax.distributed import preemption, runtime, watchdog
from vit_jax.errors import NegativeResult, UserError, one_line, printable
from vit_jax.train import goodput, loop, metrics, workdir
from vit_jax.train.recipe import choose, facts, prepare

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
    return without_checkpoints(trial)


def without_checkpoints(trial):
    """A config whose run is saved only at its end, which is the last step."""
    with trial.unlocked():
        trial.checkpoint.every = 0
        trial.checkpoint.keep_best = ""
        trial.early_stopping = 0
    return trial.lock()


def short_trial(config, lr: float):
    """The config of a shorter trial run, of a recipe that holds out a part by itself."""
    trial = config.copy_and_resolve_references()
    total = choose.trial_steps(config.total_steps)
    with trial.unlocked():
        trial.optim.lr = lr
        trial.total_steps = total
        trial.optim.warmup_steps = config.optim.warmup_steps * total // config.total_steps
        trial.evals = {HELD_OUT: config.evals[HELD_OUT].copy_and_resolve_references()}
        trial.evals[HELD_OUT].every = 0
    return without_checkpoints(trial)


def run(config, folder: epath.Path) -> dict[str, float]:
    """Trains in `folder`, or continues there; returns the last value of every metric."""
    folder = workdir.make(str(folder))
    with cli.logging_to(folder, config.flush_every_s) as files:
        loop.train(config, folder, files)
        lines = metrics.read_lines(files.path("metrics.jsonl"))
    return {key: value for line in lines for key, value in line.items()}


def run_trial(config, folder: epath.Path, metric: str) -> float | None:
    """The result of a trial run; None if loss or gradients were not finite."""
    try:
        return run(config, folder)[metric]
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
    make_config: Callable, folder: epath.Path, lrs: Sequence[float], metric: str = KEY
) -> dict[float, float | None]:
    """Results on the held-out part by learning rate; finetune.json has those of before.

    Args:
      make_config: f(learning rate) -> the config of its trial run.
      metric: of that run, what decides.
    """
    path = folder / "finetune.json"
    flat = configs.flatten(configs.to_json(make_config(lrs[0])))
    about = json.loads(json.dumps({key: value for key, value in flat if matters(key)}))
    trials = load_trials(path, about)
    for lr in lrs:
        if f"{lr:g}" in trials:
            continue
        trials[f"{lr:g}"] = run_trial(make_config(lr), folder / f"lr_{lr:g}", metric)
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


def show(trials: dict, metric: str, final: dict[str, float], lr: float, what: str) -> None:
    """The table of all runs; `what` the final one was trained on."""
    table = Table("learning rate", "evaluation", "result", title="fine-tuning")
    form = "loss {:.4g}" if metric.endswith("/loss") else "top1 {:.2%}"
    for tried, value in trials.items():
        result = "not finite" if value is None else form.format(value)
        table.add_row(f"{tried:g}", "held out, trial run", result)
    for name, result in results(final):
        table.add_row(f"{lr:g}, {what}", name, result, style="bold")
    Console().print(table)


def results(final: dict[str, float]) -> list[tuple[str, str]]:
    """Every evaluation, and its accuracy with the interval that its number of images allows."""
    rows = []
    for key, value in final.items():
        name, metric = key.split("/")[1:] if key.startswith("eval/") else ("", "")
        if metric == "top1":
            count = int(final[f"eval/{name}/count"])
            low, high = choose.interval(value, max(count, 1))
            text = f"top1 {value:.2%} ({low:.1%} to {high:.1%}, {count:,} images)"
            rows.append((name, text))
        elif metric not in ("", "loss", "count"):
            rows.append((name, f"{metric} {value:.4g}"))
    return rows


def best(trials: dict[float, float | None], metric: str = KEY) -> float:
    """The learning rate with the highest accuracy, or lowest loss; of equals, the lowest."""
    finite = {lr: result for lr, result in trials.items() if result is not None}
    if not finite:
        raise NegativeResult(
            "loss or gradients were not finite with any of the learning rates: try lower ones"
        )
    choice = min if metric.endswith("/loss") else max
    return choice(finite, key=finite.get)


def delivered(folder: epath.Path) -> dict[str, float]:
    """Metrics of the checkpoint that a run delivers: the last value of each up to it, and what was
    evaluated at the end.
    """
    last = int(checkpoint.find(folder).name)
    lines = metrics.read_lines(folder / "metrics.jsonl")
    found = {key: value for line in lines for key, value in line.items()}
    early = [line for line in lines if line["step"] <= last]
    return found | {key: value for line in early for key, value in line.items()}


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
    share = train_share(args.held_out or "10%")
    if not args.workdir:
        raise UserError("--workdir is missing: say where the runs write, such as --workdir=DIR")
    # A config that does not fit is found before anything starts.
    trial_config(config, lrs[0], share)
    with started(args, args.workdir) as folder:
        trials = run_trials(lambda lr: trial_config(config, lr, share), folder, lrs)
        lr = best(trials)
        final = run_final(config, folder / "final", lr)
    report(args, trials, KEY, final, lr, "all of train", folder)


def work_on_folder(args) -> None:
    wish = wish_of(args)
    path = args.workdir or prepare.default_workdir(args.folder)
    prepare.check_outside(path, wish.data_name)
    with cli.logging_to(None):  # what does not fit is found before anything is written
        found = None if prepare.is_in(path) else prepare.find(wish)
    with started(args, path) as folder:
        recipe = prepare.load_or_make(folder, wish, found)
        config = recipe.config
        metric = config.checkpoint.keep_best
        if not metric.startswith(f"eval/{HELD_OUT}/"):  # set by the user
            metric = KEY
        trials = {}
        lr = recipe.lrs[0]
        if len(recipe.lrs) > 1:
            trials = run_trials(lambda lr: short_trial(config, lr), folder, recipe.lrs, metric)
            lr = best(trials, metric)
        run_final(config, folder / "final", lr)
        final = delivered(folder / "final")
    report(args, trials, metric, final, lr, "without what is held out", folder)
    print(printable(f"Next:      vit_jax predict --init_from={path} IMAGE_OR_FOLDER"))


def wish_of(args) -> prepare.Wish:
    """What the command line asks for."""
    given = [text for text in args.overrides if text.startswith("--config.init_from=")]
    if not given:
        raise UserError(
            "--init_from is missing: give the weights to start from, such as --init_from=B_16.npz"
        )
    if args.held_out:
        train_share(args.held_out)
    return prepare.Wish(
        data_name=facts.data_set(args.folder),
        init_from=prepare.location_of(given[-1].partition("=")[2]),
        overrides=tuple(text for text in args.overrides if text not in given),
        lrs=tuple(learning_rates(args.lrs)) if args.lrs else (),
        held_out=args.held_out or "",
    )


@contextlib.contextmanager
def started(args, path: str) -> Iterator[epath.Path]:
    """The workdir, which this job holds; signals stop the job."""
    with goodput.stopwatch.spending("waiting"):
        runtime.start()
    folder = workdir.make(path)
    with (
        preemption.signals.listening(lambda: COMMAND.recovery),
        cli.logging_to(None),
        workdir.held(folder, args.take_over),
    ):
        yield folder


def report(args, trials: dict, metric: str, final: dict, lr: float, what: str, folder) -> None:
    if jax.process_index() == 0:
        show(trials, metric, final, lr, what)
        chosen = {key: value for key, value in final.items() if key.startswith("eval/")}
        cli.write_json(args.json, dict(tried=trials, lr=lr, final=chosen))
    print(printable(f"The model: {folder / 'final'}"))


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
