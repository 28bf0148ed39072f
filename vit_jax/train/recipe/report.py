"""What a fine-tuning says at its end."""

import dataclasses
from collections.abc import Mapping, Sequence

from etils import epath
from rich.table import Table

from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli.terminal import Console
from vit_jax.train import metrics
from vit_jax.train.recipe import held_out
from vit_jax.train.recipe.trials import HELD_OUT, KEY

COUNT = f"eval/{HELD_OUT}/count"


@dataclasses.dataclass(frozen=True)
class Outcome:
    trials: Mapping[float, float | None]  # learning rate -> result; None: not finite
    metric: str  # of the trial runs
    lr: float  # the chosen one
    final: Mapping[str, float]  # metrics of the final run
    trained_on: str
    mistakes: Sequence[str] = ()  # see `mistakes.describe`


def delivered(folder: epath.Path) -> dict[str, float]:
    """Metrics of the checkpoint that a run delivers: the last value of each up to it, and what was
    evaluated at the end.
    """
    last = int(checkpoint.find(folder).name)
    lines = metrics.read_lines(folder / "metrics.jsonl")
    found = {key: value for line in lines for key, value in line.items()}
    early = [line for line in lines if line["step"] <= last]
    return found | {key: value for line in early for key, value in line.items()}


def show(outcome: Outcome) -> None:
    """The table of all runs."""
    table = Table("learning rate", "evaluation", "result", title="fine-tuning")
    form = "loss {:.4g}" if outcome.metric.endswith("/loss") else "top1 {:.2%}"
    for lr, value in outcome.trials.items():
        result = "not finite" if value is None else form.format(value)
        table.add_row(f"{lr:g}", "held out, trial run", result)
    for name, result in results(outcome.final):
        table.add_row(f"{outcome.lr:g}, {outcome.trained_on}", name, result, style="bold")
    Console().print(table)


def results(final: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every evaluation, and its accuracy with the interval that its number of images allows."""
    rows = []
    for key, value in final.items():
        name, metric = key.split("/", 2)[1:] if key.startswith("eval/") else ("", "")
        if metric == "top1":
            rows.append((name, accuracy(value, final.get(f"eval/{name}/count"))))
        elif metric not in ("", "loss", "count"):
            rows.append((name, f"{metric} {value:.4g}"))
    return rows


def accuracy(top1: float, count: float | None) -> str:
    """An accuracy, with its interval if the number of images is known."""
    if count is None:  # an evaluation of the user's own need not say it
        return f"top1 {top1:.2%}"
    low, high = held_out.interval(top1, max(int(count), 1))
    return f"top1 {top1:.2%} ({low:.1%} to {high:.1%}, {int(count):,} images)"


def against_one_answer(final: Mapping[str, float], largest: tuple[str, float]) -> str:
    """How the held-out accuracy compares with that of the same answer for all images; "" if there
    is none to compare.

    Args:
      largest: (class with the most training images, its share of them).
    """
    top1 = final.get(KEY)
    name, share = largest
    if top1 is None or not name:
        return ""
    line = f"{share:.1%} of the training images are {name}"
    low, _ = held_out.interval(top1, max(int(final.get(COUNT, 1)), 1))
    if low > share:
        return line
    return (
        f"{line}, and the model is not clearly better than this answer for all: start from "
        "pretrained weights, give more images, or train longer"
    )


def to_json(outcome: Outcome) -> dict:
    final = {key: value for key, value in outcome.final.items() if key.startswith("eval/")}
    return dict(tried=dict(outcome.trials), lr=outcome.lr, final=final)
