"""The results of a study: JSON, a page in Markdown, and a figure with intervals."""

import io
import json
import math
import os
import pathlib
import socket
from collections.abc import Sequence

import numpy as np
from etils import epath
from scipy import stats

from vit_jax import cli
from vit_jax.report.tables import markdown
from vit_jax.study.definition import COMPUTE, Figure, Study
from vit_jax.study.outcome import DONE, Outcome
from vit_jax.train.console import duration

LEVEL = 0.95  # of the intervals
SHARES = ("top", "fewshot_", "knn", "linear_probe")  # beginnings of metrics
JSON, PAGE, PICTURE = "results.json", "results.md", "figure.png"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its confidence interval by Student's t); the half is NaN of a single value."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return float(values.mean()), math.nan
    factor = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) / math.sqrt(len(values))
    return float(values.mean()), float(factor * values.std(ddof=1))


def groups(outcomes: Sequence[Outcome], figure: Figure) -> dict[tuple[str, str], list[float]]:
    """(line, value of `x`) -> the metric of the runs that are done, one per repetition."""
    found = {}
    for one in outcomes:
        if one.status == DONE and figure.metric in one.metrics:
            for line in figure.lines_of(one.run.point):
                key = (line, figure.x_of(one.run.point))
                found.setdefault(key, []).append(one.metrics[figure.metric])
    return found


def line_names(study: Study) -> list[str]:
    """[""] if there is one line without a name."""
    figure = study.figure
    return list(figure.groups or study.axes.get(figure.line, [""]))


def x_names(study: Study) -> list[str]:
    """What is along `x`, in the order of the runs."""
    return list(dict.fromkeys(study.figure.x_of(run.point) for run in study.runs))


def is_share(figure: Figure) -> bool:
    """Whether the metric is shown in percent."""
    return figure.metric.rpartition("/")[2].startswith(SHARES)


def shown(values: Sequence[float], figure: Figure) -> str:
    """Such as "81.2 ± 1.1 (3)"."""
    mean, half = interval(values)
    scale, form = (100, ".1f") if is_share(figure) else (1, ".4g")
    around = "" if math.isnan(half) else f" ± {scale * half:{form}}"
    return f"{scale * mean:{form}}{around} ({len(values)})"


def figure_table(study: Study, outcomes: Sequence[Outcome]) -> str:
    figure = study.figure
    found = groups(outcomes, figure)
    lines = line_names(study)
    rows = []
    for x in x_names(study):
        cells = [shown(found[line, x], figure) if (line, x) in found else "" for line in lines]
        rows.append([x, *cells])
    unit = ", %" if is_share(figure) else ""
    about = f"`{figure.metric}`{unit}: mean, {LEVEL:.0%} confidence interval (number of runs).\n\n"
    head = "run" if figure.x == COMPUTE else figure.x_label or figure.x
    return about + markdown([head, *(name or "all" for name in lines)], rows)


def text(value: float, form: str) -> str:
    """A number, "" if it is not known."""
    return "" if math.isnan(value) else f"{value:{form}}"


def runs_table(outcomes: Sequence[Outcome]) -> str:
    axes = list(outcomes[0].run.point)
    head = [*axes, "status", "step", "images", "epochs", "exaFLOPs", "time"]
    rows = []
    for one in outcomes:
        cells = [one.run.point[axis] for axis in axes]
        numbers = [
            text(one.step, ","),
            text(one.images, ",.0f"),
            text(one.epochs, ",.1f"),
            text(one.exaflops, ".3g"),
            "" if math.isnan(one.seconds) else duration(one.seconds),
        ]
        begun = numbers if one.images else [""] * len(numbers)
        rows.append([*cells, f"{one.status} {one.problem}".strip(), *begun])
    return markdown(head, rows)


def page(study: Study, outcomes: Sequence[Outcome]) -> str:
    parts = [f"# {study.title}"]
    if study.figure:
        parts += [f"![{study.title}]({PICTURE})", figure_table(study, outcomes)]
    done = [one for one in outcomes if one.status == DONE]
    flops = math.fsum(one.exaflops for one in outcomes if not math.isnan(one.exaflops))
    parts.append(f"{len(done)} of {len(outcomes)} runs are done, {flops:.3g} exaFLOPs in all.")
    parts.append(runs_table(outcomes))
    return "\n\n".join(parts) + "\n"


def positions(study: Study, outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    """Value of `x` -> where it is on the axis; None if the values are not numbers."""
    figure = study.figure
    if figure.x == COMPUTE:
        spent = {}
        for one in outcomes:
            if one.status == DONE:
                spent.setdefault(figure.x_of(one.run.point), []).append(one.exaflops)
        return {x: float(np.mean(values)) for x, values in spent.items()}
    try:
        return {value: float(value.replace(",", "")) for value in x_names(study)}
    except ValueError:
        return None


def draw(study: Study, outcomes: Sequence[Outcome]) -> bytes:
    """The metric of a figure against its x axis, with intervals over repetitions, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure = study.figure
    found = groups(outcomes, figure)
    places = positions(study, outcomes)
    has_names = places is None
    style, labels = {}, {}
    if has_names:  # which have no order, and may be long
        places = {x: i for i, x in enumerate(x_names(study))}
        style = dict(linestyle="none")
        labels = dict(rotation=30, ha="right")
    scale = 100 if is_share(figure) else 1
    canvas, axes = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    for line in line_names(study):
        xs = sorted((x for x in places if (line, x) in found), key=places.get)
        ends = [interval(found[line, x]) for x in xs]
        means = [scale * mean for mean, _ in ends]
        halves = [scale * np.nan_to_num(half) for _, half in ends]
        at = [places[x] for x in xs]
        axes.errorbar(at, means, yerr=halves, marker="o", capsize=3, label=line or None, **style)
    if not has_names and max(places.values(), default=0) >= 8 * min(places.values(), default=0) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    if figure.x != COMPUTE:
        axes.set_xticks(list(places.values()), places, **labels)
    axes.minorticks_off()
    axes.set_xlabel(figure.x_label or figure.x)
    axes.set_ylabel(figure.metric + ", %" * is_share(figure))
    if figure.line:
        axes.legend()
    axes.grid(alpha=0.3)
    png = io.BytesIO()
    canvas.savefig(png, dpi=120)
    pyplot.close(canvas)
    return png.getvalue()


def write(study: Study, outcomes: Sequence[Outcome], folder: pathlib.Path) -> dict:
    """Writes all of it to the folder of the study, as other parts of it may do at the same time,
    and returns what JSON has.
    """
    found = dict(title=study.title, runs=[one.to_json() for one in outcomes])
    files = {JSON: json.dumps(found, indent=1) + "\n", PAGE: page(study, outcomes)}
    if study.figure:
        files[PICTURE] = draw(study, outcomes)
    writer = f".{socket.gethostname()}-{os.getpid()}"
    for name, content in files.items():
        cli.replace_file(epath.Path(folder / name), content, writer)
    return found
