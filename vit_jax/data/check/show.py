"""Prints the report on image files, for a terminal of 80 columns."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from vit_jax.cli.terminal import Console
from vit_jax.data.check.findings import Finding
from vit_jax.data.sources import ignored
from vit_jax.errors import printable

WIDTH = 80  # columns
EXAMPLES = 3  # of each finding
MANY_CLASSES = 24  # of more, the largest and the smallest are shown
SOME_CLASSES = 8
FEW = 10  # images of a class


def plural(count: int, what: str, several: str = "") -> str:
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def of_size(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"


def overview(report: dict) -> list[tuple[str, str]]:
    """(what, text) of what there is."""
    files = report["files"]
    rows = [("files", f"{files['found']:,} found, {files['images']:,} used as images")]
    if files["ignored"]:
        rows.append(("ignored", ignored.text(files["ignored"])))
    rows.append(("splits", ", ".join(f"{name} {n:,}" for name, n in report["splits"].items())))
    formats = ", ".join(f"{name} {count:,}" for name, count in report["formats"].items())
    rows.append(("formats", formats))
    turned = {key: count for key, count in report["orientations"].items() if key != "1"}
    kinds = ", ".join(f"{key}: {count:,}" for key, count in sorted(turned.items()))
    text = f"{sum(turned.values()):,} are turned upright"
    rows.append(("EXIF", f"{text} (orientation {kinds})" if turned else text))
    found = report["sizes"]
    if found:
        kinds = ("smallest", "median", "largest")
        rows.append(("sizes", ", ".join(f"{kind} {of_size(found[kind])}" for kind in kinds)))
    return rows


def show_classes(console: Console, classes: dict[str, dict[str, int]]) -> None:
    """Prints the images per class: of many classes the largest and the smallest."""
    ordered = sorted(classes.items(), key=lambda item: -next(iter(item[1].values()), 0))
    names = list(ordered[0][1])
    table = Table(box=None, pad_edge=False)
    table.add_column("class", no_wrap=True, overflow="ellipsis")
    for name in names:
        table.add_column(name, justify="right")
    shown = ordered
    if len(ordered) > MANY_CLASSES:
        shown = [*ordered[:SOME_CLASSES], None, *ordered[-SOME_CLASSES:]]
    for entry in shown:
        if entry is None:
            table.add_row(f"({len(ordered) - 2 * SOME_CLASSES:,} classes between)")
        else:
            table.add_row(entry[0], *(f"{count:,}" for count in entry[1].values()))
    console.print(table)
    for name in names:
        counts = [entry[name] for entry in classes.values()]
        few = sum(count < FEW for count in counts)
        line = f"{name}: {plural(len(counts), 'class', 'classes')} of {min(counts):,} to "
        line += f"{max(counts):,} images, median {statistics.median(counts):,g}"
        if few:
            line += f"; {few:,} of them {'has' if few == 1 else 'have'} fewer than {FEW}"
        console.print(line)


def show_findings(console: Console, title: str, findings: list[Finding]) -> None:
    console.print(f"\n{title}:", style="bold")
    for finding in findings:
        console.print(f"- {finding}")
        for example in finding.examples[:EXAMPLES]:
            console.print(f"    {printable(example, kept='')}", overflow="fold")
        if finding.count > EXAMPLES:
            console.print(f"    and {finding.count - EXAMPLES:,} more")


def report(name: str, found: dict) -> None:
    """Prints everything."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    console.print(name, style="bold", overflow="fold")
    if "files" in found:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in overview(found):
            table.add_row(*row)
        if "sheet" in found:
            table.add_row("see", found["sheet"])
        console.print(table)
        if found["classes"] and found["splits"]:
            console.print()
            show_classes(console, found["classes"])
    if found["faults"]:
        show_findings(console, "Faults, which stop or spoil training", found["faults"])
    if found["warnings"]:
        show_findings(console, "Warnings", found["warnings"])
    if not found["faults"]:
        console.print("\nNo faults: training can use it.", style="bold")
