"""The results of a suite: a JSON file per run as soon as it is done, and for all tasks together a
JSON file, a Markdown table and a bar chart.
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
from rich.table import Table

from vit_jax import cli, errors
from vit_jax.cli import regular
from vit_jax.cli.terminal import Console
from vit_jax.data.sources.vtab_tasks import GROUPS, VTAB
from vit_jax.vtab import protocol

PENDING = dict(top1=None, seeds=[], ci95=None, num_train=None, num_test=None, lr=None, steps=None)
PENDING |= dict(status="pending", error=None, data={})
DATA_KEYS = {"is_known", "unreadable"}
COLUMNS = ("group", "task", "top-1, %", "± (95 %)", "notes")
COLORS = dict(zip(GROUPS, ("tab:red", "tab:green", "tab:blue"), strict=True))


def mean_of(tasks: dict[str, dict], group: str | None) -> float | None:
    """The mean top-1 of all tasks of a group, or of VTAB; None if one has no result."""
    names = [name for name, task in VTAB.items() if group in (None, task.group)]
    values = [tasks.get(name, PENDING)["top1"] for name in names]
    if None in values:
        return None
    return float(np.mean(values))


def data_departures(task: dict) -> list[str]:
    """How the data that a task ran on differ from VTAB's."""
    data = task["data"]
    lines = []
    if data.get("is_known") is False:
        lines.append("other training examples")
    if data.get("unreadable"):
        lines.append(f"{data['unreadable']} images can't be read")
    return lines


def confidence(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean, by Student's t; None for a single
    value.
    """
    if len(values) < 2:
        return None
    count = len(values)
    quantile = scipy.stats.t.ppf(0.975, count - 1)
    return float(quantile * np.std(values, ddof=1) / math.sqrt(count))


def is_valid(result: dict) -> bool:
    """Whether the content of a result file is that of a run."""
    if not result.keys() >= PENDING.keys() - {"seeds", "ci95"}:
        return False
    if result["status"] != "done":
        return True
    return math.isfinite(result["top1"]) and result["data"].keys() >= DATA_KEYS


class Results:
    """The results of the tasks `names` in `folder`, with a file for each task and seed."""

    def __init__(self, folder: epath.Path, config, names: Sequence[str]):
        self.folder = folder / "tasks"
        self.config = config
        self.names = names
        self.seeds = range(config.seed, config.seed + config.vtab.seeds)

    def path(self, name: str, seed: int) -> epath.Path:
        return self.folder / f"{name}.{seed}.json"

    def read(self, name: str, seed: int) -> dict | None:
        """The result of a run; None if there is none or it is damaged, so that it runs again."""
        try:
            result = json.loads(regular.read_text(self.path(name, seed)))
            if is_valid(result):
                return result
        except (OSError, ValueError, TypeError, AttributeError):
            pass
        return None

    def is_done(self, name: str, seed: int) -> bool:
        result = self.read(name, seed)
        return result is not None and result["status"] == "done"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(task, seed) of all runs."""
        return [(name, seed) for name in self.names for seed in self.seeds]

    def begin(self) -> list[tuple[str, int]]:
        """The runs without a result; the files of earlier failures are removed."""
        todo = [run for run in self.runs if not self.is_done(*run)]
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for run in todo:
                self.path(*run).unlink(missing_ok=True)
        return todo

    def missing(self, names: Sequence[str]) -> bool:
        return not all(self.path(name, seed).exists() for name in names for seed in self.seeds)

    def write(self, name: str, results: dict[int, dict]) -> None:
        """Saves the results of a task by seed."""
        for seed, result in results.items():
            cli.replace_file(self.path(name, seed), json.dumps(result, indent=1) + "\n")
        self.publish()

    def of_task(self, name: str) -> dict:
        """The entry of a task in vtab.json."""
        runs = [self.read(name, seed) for seed in self.seeds]
        group = dict(group=VTAB[name].group)
        if None in runs:
            return group | PENDING
        for run in runs:
            if run["status"] != "done":
                return group | run | dict(seeds=[], ci95=None)
        top1 = [run["top1"] for run in runs]
        score = dict(mean=np.mean, median=np.median)[self.config.vtab.score](top1)
        # The other fields are those of one run: the one whose data differ most from VTAB's.
        example = max(runs, key=lambda run: len(data_departures(run)))
        return group | example | dict(top1=float(score), seeds=top1, ci95=confidence(top1))

    def collect(self) -> dict:
        """The content of vtab.json."""
        names = [name for name in VTAB if name in self.names or not self.missing([name])]
        tasks = {name: self.of_task(name) for name in names}
        departures = protocol.departures(self.config)
        for name, task in tasks.items():
            departures += [f"{name}: {line}" for line in data_departures(task)]
        means = {group: mean_of(tasks, group) for group in GROUPS}
        return dict(
            protocol=self.config.vtab.protocol,
            standard=not departures,
            departures=departures,
            checkpoint=errors.without_secrets(self.config.init_from),
            tasks=tasks,
            means=means | dict(all=mean_of(tasks, None)),
        )

    def publish(self) -> dict:
        """Writes the results so far, and returns the content of vtab.json."""
        results = self.collect()
        folder = self.folder.parent
        if jax.process_index() == 0:
            cli.replace_file(folder / "vtab.json", json.dumps(results, indent=1) + "\n")
            cli.replace_file(folder / "vtab.md", markdown(results))
            chart(results, folder / "vtab.png")
        return results


def percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.2f}"


def notes(results: dict, name: str) -> str:
    """The last column of the table for a task."""
    task = results["tasks"][name]
    if task["error"]:
        return f"{task['status']}: {task['error']}"
    if task["status"] != "done":
        return task["status"]
    _, total = VTAB[name].splits["test"]
    lines = data_departures(task)
    if task["num_test"] != total:
        lines.append(f"{task['num_test']:,} of {total:,} test images")
    return ", ".join(lines)


def rows(results: dict) -> list[tuple[str, str, str, str, str]]:
    """(group, task, top-1, interval, notes), tasks by group, each group followed by its mean."""
    lines = []
    for group in GROUPS:
        for name, task in results["tasks"].items():
            if task["group"] == group:
                numbers = percent(task["top1"]), percent(task["ci95"])
                lines.append((group, name, *numbers, notes(results, name)))
        lines.append((group, "mean", percent(results["means"][group]), "", ""))
    return [*lines, ("all", "mean", percent(results["means"]["all"]), "", "")]


def title(results: dict) -> str:
    protocol = results["protocol"]
    standard = "standard" if results["standard"] else "non-standard"
    return f"VTAB-1k, protocol {protocol}, {standard}: {results['checkpoint'] or 'from scratch'}"


def markdown(results: dict) -> str:
    lines = [f"# {title(results)}", ""]
    for row in [COLUMNS, ("---",) * len(COLUMNS), *rows(results)]:
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    if results["departures"]:
        lines += ["", "Non-standard, because it departs from the protocol:", ""]
        lines += [f"- {departure}" for departure in results["departures"]]
    return "\n".join(lines) + "\n"


def show(results: dict) -> None:
    table = Table(title=title(results))
    for column in COLUMNS:
        table.add_column(column, justify="right" if "%" in column else "left")
    for row in rows(results):
        table.add_row(*row, style="bold" if row[1] == "mean" else None)
    Console(width=None if Console().is_terminal else 160).print(table)


def chart(results: dict, path: epath.Path) -> None:
    """A bar per task with its confidence interval, coloured by group."""
    tasks = {name: results["tasks"][name] for name in VTAB if name in results["tasks"]}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panel = figure.subplots()
    for x, task in enumerate(tasks.values()):
        if task["top1"] is not None:
            interval = 100 * (task["ci95"] or 0.0)
            color = COLORS[task["group"]]
            panel.bar(x, 100 * task["top1"], yerr=interval or None, color=color, capsize=3)
    labels = [f"{name}  {percent(task['top1'])}" for name, task in tasks.items()]
    panel.set_xticks(range(len(tasks)), labels, rotation=40, ha="right", fontsize=8)
    panel.set(ylabel="top-1, %", ylim=(0, 100), title=title(results))
    panel.grid(axis="y", alpha=0.3)
    legend = [Patch(color=color, label=group) for group, color in COLORS.items()]
    panel.legend(handles=legend, ncols=3, fontsize=8)
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=120)
