"""The results of a suite: a file per task as soon as it is done, and for all JSON, a Markdown table
and a bar chart.
"""

import json
import math
from collections.abc import Sequence

import jax
import numpy as np
import scipy.stats
from etils import epath
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from vit_jax import cli
from vit_jax.data.sources.vtab_tasks import GROUPS, VTAB
from vit_jax.vtab import protocol

PENDING = dict(top1=None, seeds=[], ci95=None, num_train=None, num_test=None, lr=None, steps=None)
PENDING |= dict(status="pending", error=None, data={})
DATA_KEYS = {"is_known", "generated", "unreadable"}
COLORS = dict(zip(GROUPS, ("tab:red", "tab:green", "tab:blue"), strict=True))


def mean_of(tasks: dict[str, dict], group: str | None) -> float | None:
    """The mean over all tasks of a group, or of VTAB; None where one has no result."""
    values = [
        tasks.get(name, PENDING)["top1"]
        for name, task in VTAB.items()
        if group in (None, task.group)
    ]
    return None if None in values else float(np.mean(values))


def data_departures(task: dict) -> list[str]:
    """What is not VTAB's of the data that a task ran on."""
    data = task["data"]
    said = ["generated data"] if data.get("generated") else []
    said += ["other training examples"] if data.get("is_known") is False else []
    return said + ([f"{data['unreadable']} images can't be read"] if data.get("unreadable") else [])


def confidence(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean, by Student's t; None for a single
    value.
    """
    if len(values) < 2:
        return None
    return float(
        scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    )


class Results:
    """Those of the tasks `names` below `folder`, a file per task and seed."""

    def __init__(self, folder: epath.Path, config, names: Sequence[str]):
        self.folder, self.config, self.names = folder / "tasks", config, names
        self.seeds = range(config.seed, config.seed + config.vtab.seeds)

    def path(self, name: str, seed: int) -> epath.Path:
        return self.folder / f"{name}.{seed}.json"

    def read(self, name: str, seed: int) -> dict | None:
        try:
            found = json.loads(self.path(name, seed).read_text())
            is_whole = found["status"] != "done" or (
                math.isfinite(found["top1"]) and found["data"].keys() >= DATA_KEYS
            )
            return (
                found if is_whole and found.keys() >= PENDING.keys() - {"seeds", "ci95"} else None
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ):  # none, or it is damaged: it runs again
            return None

    def begin(self) -> list[tuple[str, int]]:
        """The runs without a result; what is known of earlier failures is removed."""
        runs = [(name, seed) for name in self.names for seed in self.seeds]
        todo = [run for run in runs if (self.read(*run) or {}).get("status") != "done"]
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for run in todo:
                self.path(*run).unlink(missing_ok=True)
        return todo

    def missing(self, names: Sequence[str]) -> bool:
        return not all(self.path(name, seed).exists() for name in names for seed in self.seeds)

    def write(self, name: str, results: dict[int, dict]) -> None:
        """Keeps the results of a task by seed."""
        for seed, result in results.items():
            cli.replace_file(self.path(name, seed), json.dumps(result, indent=1) + "\n")
        self.publish()

    def of_task(self, name: str) -> dict:
        """What vtab.json says of a task."""
        runs, group = [self.read(name, seed) for seed in self.seeds], dict(group=VTAB[name].group)
        if None in runs:
            return group | PENDING
        worst = next((run for run in runs if run["status"] != "done"), None)
        if worst:
            return group | worst | dict(seeds=[], ci95=None)
        top1, first = (
            [run["top1"] for run in runs],
            max(runs, key=lambda run: len(data_departures(run))),
        )
        score = dict(mean=np.mean, median=np.median)[self.config.vtab.score](top1)
        return group | first | dict(top1=float(score), seeds=top1, ci95=confidence(top1))

    def collect(self) -> dict:
        """What vtab.json says."""
        names = [name for name in VTAB if name in self.names or not self.missing([name])]
        tasks = {name: self.of_task(name) for name in names}
        departures = protocol.departures(self.config)
        departures += [
            f"{name}: {told}" for name, task in tasks.items() for told in data_departures(task)
        ]
        return dict(
            protocol=self.config.vtab.protocol,
            standard=not departures,
            departures=departures,
            checkpoint=self.config.init_from,
            tasks=tasks,
            means={group: mean_of(tasks, group) for group in GROUPS}
            | dict(all=mean_of(tasks, None)),
        )

    def publish(self) -> dict:
        """Writes what there is; returns it."""
        found, folder = self.collect(), self.folder.parent
        if jax.process_index() == 0:
            cli.replace_file(folder / "vtab.json", json.dumps(found, indent=1) + "\n")
            cli.replace_file(folder / "vtab.md", markdown(found))
            chart(found, folder / "vtab.png")
        return found


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def notes(found: dict, name: str) -> str:
    """What else there is to say of a task."""
    task = found["tasks"][name]
    if task["status"] != "done":
        return f"{task['status']}{': ' + task['error'] if task['error'] else ''}"
    total, said = VTAB[name].splits["test"][1], data_departures(task)
    if task["num_test"] != total:
        said.append(f"{task['num_test']:,} of {total:,} test images")
    return ", ".join(said)


def rows(found: dict) -> list[tuple[str, str, str, str, str]]:
    """(group, task, top-1, interval, notes), tasks by group, each group with its mean behind it."""
    lines = []
    for group in GROUPS:
        for name in [name for name, task in found["tasks"].items() if task["group"] == group]:
            task = found["tasks"][name]
            lines.append(
                (group, name, percent(task["top1"]), percent(task["ci95"]), notes(found, name))
            )
        lines.append((group, "mean", percent(found["means"][group]), "", ""))
    return [*lines, ("all", "mean", percent(found["means"]["all"]), "", "")]


def title(found: dict) -> str:
    how = "standard" if found["standard"] else "non-standard"
    return f"VTAB-1k, protocol {found['protocol']}, {how}: {found['checkpoint'] or 'from scratch'}"


def markdown(found: dict) -> str:
    head = ("group", "task", "top-1, %", "± (95 %)", "notes")
    table = [head, ("---",) * len(head), *rows(found)]
    lines = [
        f"# {title(found)}",
        "",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table),
    ]
    if found["departures"]:
        lines += ["", "Non-standard, because it departs from the protocol:", ""]
        lines += [f"- {departure}" for departure in found["departures"]]
    return "\n".join(lines) + "\n"


def show(found: dict) -> None:
    table = Table(title=title(found))
    for column in ("group", "task", "top-1, %", "± (95 %)", "notes"):
        table.add_column(column, justify="right" if "%" in column else "left")
    for row in rows(found):
        table.add_row(*row, style="bold" if row[1] == "mean" else None)
    Console(width=None if Console().is_terminal else 160).print(table)


def chart(found: dict, path: epath.Path) -> None:
    """A bar per task with its confidence interval, coloured by group."""
    order = [name for name, *_ in VTAB.items() if name in found["tasks"]]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panel = figure.subplots()
    for place, name in enumerate(order):
        task = found["tasks"][name]
        if task["top1"] is not None:
            height, interval = 100 * task["top1"], 100 * (task["ci95"] or 0.0)
            panel.bar(place, height, yerr=interval or None, color=COLORS[task["group"]], capsize=3)
    names = [f"{name}  {percent(found['tasks'][name]['top1'])}" for name in order]
    panel.set_xticks(range(len(order)), names, rotation=40, ha="right", fontsize=8)
    panel.set(ylabel="top-1, %", ylim=(0, 100), title=title(found))
    panel.grid(axis="y", alpha=0.3)
    panel.legend(
        handles=[Patch(color=color, label=group) for group, color in COLORS.items()],
        ncols=3,
        fontsize=8,
    )
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
