"""The folder of `vit_jax.finetune`: what was chosen and why, the trial runs, and the final run."""

import dataclasses
import json
import re

from vit_jax.report import run
from vit_jax.report.files import Folder
from vit_jax.report.run import Run
from vit_jax.report.tables import Table
from vit_jax.train.recipe import trials

TRIAL = re.compile(r"lr_\d.*")
FINAL = "final"


@dataclasses.dataclass(frozen=True)
class Finetuning:
    path: str
    trials: Table
    choices: Table


def is_finetuning(names: list[str]) -> bool:
    """Whether a folder with these files is that of a fine-tuning."""
    return FINAL in names or "finetune.json" in names or any(map(TRIAL.fullmatch, names))


def parse_trials(text: str) -> list[list[str]]:
    """(learning rate, result) of every trial run."""
    tried = json.loads(text)["tried"]
    return [[lr, "not finite" if value is None else f"{value:.4g}"] for lr, value in tried.items()]


def parse_recipe(text: str) -> tuple[list[list[str]], str]:
    """The rows (what, choice, why) of the recipe, and the metric that decided."""
    recipe = json.loads(text)
    rows = [[str(what), str(choice), str(why)] for what, choice, why in recipe["rows"]]
    keep_best = recipe["config"]["checkpoint"]["keep_best"]
    return rows, keep_best if keep_best.startswith(f"eval/{trials.HELD_OUT}/") else trials.KEY


def read(folder: Folder, label: str) -> tuple[Finetuning, list[Run]]:
    """What the folder says, and its runs: the final one, then the trial runs."""
    names = folder.names()
    rates = sorted(filter(TRIAL.fullmatch, names), key=rate)
    runs = [
        run.read(folder.below(name), f"{label}/{name}" if label else name, name == FINAL)
        for name in [*([FINAL] if FINAL in names else []), *rates]
        if run.is_workdir(folder.below(name).names())
    ]
    tried = folder.parsed("finetune.json", parse_trials) or []
    # There is no recipe if the user gave a config.
    choices, metric = folder.parsed("config.json", parse_recipe) or ([], trials.KEY)
    return (
        Finetuning(
            path=folder.path,
            trials=Table(["learning rate", f"{metric} of the trial run"], tried),
            choices=Table(["what", "choice", "why"], choices),
        ),
        runs,
    )


def rate(name: str) -> float:
    """The learning rate in the name of a trial run's folder."""
    try:
        return float(name.removeprefix("lr_"))
    except ValueError:
        return float("inf")
