"""The folder of `vit_jax.vtab run`: the table of tasks, the chart, and how it departs from VTAB."""

import dataclasses
import json

from vit_jax.report import run, settings
from vit_jax.report.files import Folder
from vit_jax.report.pictures import Gallery, Picture
from vit_jax.report.tables import Table

FILE = "vtab.json"


@dataclasses.dataclass(frozen=True)
class Suite:
    """Results of VTAB-1k."""

    path: str
    title: str
    tasks: Table
    departures: list[str]
    chart: Picture | None
    command: str  # that made it


def parse(text: str) -> tuple[str, Table, list[str]]:
    """(title, table, departures) of a vtab.json.

    Raises:
      Exception: of any type; it is damaged.
    """
    from vit_jax.vtab import report  # imports SciPy and matplotlib

    results = json.loads(text)
    rows = [[str(cell) for cell in row] for row in report.rows(results)]
    departures = [str(line) for line in results["departures"]]
    return report.title(results), Table(list(report.COLUMNS), rows), departures


def read(folder: Folder, gallery: Gallery) -> Suite | None:
    found = folder.parsed(FILE, parse)
    if found is None:
        return None
    has_chart = "vtab.png" in folder.names()
    chart = gallery.add(folder, "vtab.png", "top-1 by task") if has_chart else None
    record = folder.parsed("config.json", run.parse_record) or dict(command=[])
    return Suite(folder.path, *found, chart, settings.command_text(record["command"]))
