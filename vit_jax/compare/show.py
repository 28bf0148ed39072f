"""Prints a comparison of runs as text."""

import shlex
from collections.abc import Sequence

from rich.table import Table

from vit_jax.cli.terminal import Console
from vit_jax.compare import causes
from vit_jax.compare.pair import Pair
from vit_jax.report import overview, settings, speed
from vit_jax.report.run import Run
from vit_jax.report.tables import Table as Rows


def verdict(pair: Pair) -> str:
    """One line about a pair."""
    a, b = pair.a.label, pair.b.label
    found = pair.departure
    if found is None:
        how = f" to {pair.tolerance:g}" if pair.tolerance else ", to the last bit,"
        return f"{a} and {b} are the same{how} at all steps that both logged"
    values = " and ".join(f"{value:.9g}" for value in found.values)
    since = ""
    if found.last_same is not None:
        since = f", and are the same until step {found.last_same:,}"
    where = f"{a} and {b} differ at step {found.step:,} ({found.quantity} {values}){since}"
    return where + end(pair)


def end(pair: Pair) -> str:
    """How a run ended, compared with the intervals of a reference; "" if there are none."""
    if not pair.has_intervals:
        return ""
    b = pair.b.label
    if pair.within_interval:
        return f"; {b} ends within the intervals of the reference"
    if not pair.b.is_over:
        return f"; {b} has not ended, so its results are not compared with the intervals"
    for key, (value, low, high) in pair.outside.items():
        shown = "missing or not finite" if value is None else f"{value:.6g}"
        return f"; {key} is {shown}, not within {low:.6g} to {high:.6g}"
    if pair.other_recipe:
        return f"; {b} is not of the recipe of the reference ({', '.join(pair.other_recipe)})"
    return ""


def explanations(pair: Pair) -> list[str]:
    """Why the runs may differ, a line for each reason."""
    if pair.departure is None:
        return []
    lines = [f"  - {text}" for text in pair.causes]
    if not lines:
        lines.append("  - nothing that the runs have recorded is different")
    if pair.by_rounding:
        lines.append(rounding(pair))
    return ["What may be the reason:", *lines]


def rounding(pair: Pair) -> str:
    """How far the runs differ only because they add numbers in another order."""
    found = pair.beyond_rounding
    until = "at every step" if found is None else f"before step {found.step:,}"
    what = ", ".join(pair.by_rounding)
    size = causes.rounding(pair.a, pair.b)
    return f"Other orders of sums ({what}) explain differences up to {size:g}: all {until}."


def print_table(console: Console, title: str, rows: Rows) -> None:
    if not rows.rows:
        return
    table = Table(*rows.head, title=title, title_justify="left", box=None)
    for cells in rows.rows:
        table.add_row(*cells)
    console.print(table)


def differences(pair: Pair) -> Rows:
    found = causes.config_differences(pair.a, pair.b)
    rows = [[key, *map(settings.show, values)] for key, values in found.items()]
    return Rows(["", pair.a.label, pair.b.label], rows)


def show(runs: Sequence[Run], pairs: Sequence[Pair], paths: Sequence[str]) -> None:
    """Prints all pairs, then results, speed and goodput side by side."""
    console = Console(width=max(100, 40 * len(runs)), highlight=False)
    for pair in pairs:
        console.print(verdict(pair), soft_wrap=True)
        for line in explanations(pair):
            console.print(line, soft_wrap=True)
        print_table(console, "config", differences(pair))
    print_table(console, "results", overview.results(runs))
    print_table(console, "speed, medians", speed.speeds(runs))
    print_table(console, "time", speed.times(runs))
    words = ["python", "-m", "vit_jax.report", *paths]
    console.print(f"Curves one over the other: {shlex.join(words)}", soft_wrap=True)
