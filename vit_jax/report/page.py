"""The page: everything that was read, as one HTML file that needs no network."""

import itertools
import os
import pathlib
from collections.abc import Sequence

import jinja2
from bokeh.embed import components
from bokeh.resources import Resources
from etils import epath
from markupsafe import Markup

from vit_jax import cli
from vit_jax.errors import UserError, printable, storage_problem
from vit_jax.report import contents as reading
from vit_jax.report import reference, settings
from vit_jax.report.charts import Drawing, colour, document
from vit_jax.report.contents import Contents
from vit_jax.report.curves import GROUPS

NAME = "report.html"
TEMPLATE = pathlib.Path(__file__).with_name("page.html")
LONGEST = 4_000  # characters of one text


def write(paths: Sequence[str], out: str | None = None) -> epath.Path:
    """Writes the page of workdirs, local or gs://, and reference runs, and returns where it is.

    Args:
      out: the file; None: report.html in the workdir, of several runs or a reference run in the
        current folder.

    Raises:
      UserError: one of `paths` has no run, or `out` can't be written.
    """
    contents = reading.read(paths)
    path = epath.Path(out or default_out(contents.paths)).expanduser()
    try:
        cli.replace_file(path, html(contents))
    except Exception as error:  # every store has errors of its own
        problem = storage_problem(error)
        if problem is None:
            raise
        raise UserError(
            f"the page can't be written to {path} ({problem}): choose another file with --out"
        ) from error
    return path


def default_out(paths: Sequence[str]) -> str:
    is_workdir = len(paths) == 1 and not reference.is_reference(paths[0])
    return f"{paths[0]}/{NAME}" if is_workdir else NAME


def html(contents: Contents) -> str:
    """The text of the page."""
    drawing = Drawing(contents.runs) if contents.runs else None
    script, divs = embedded(drawing)
    colours = [colour(i, len(contents.runs)) for i in range(len(contents.runs))]
    if len(colours) == 1:
        colours = []  # nothing to tell apart
    charts = {}
    for chart, div in zip(drawing.choice.charts if drawing else [], divs[2:], strict=True):
        charts.setdefault(chart.group, []).append((chart, div))
    return template().render(
        contents=contents,
        title=title(contents),
        colours=colours,
        main_colours=of_main(contents, colours),
        choice=drawing.choice if drawing else None,
        unknown=drawing.unknown() if drawing else [],
        groups=[(name, charts[name]) for name in GROUPS.values() if name in charts],
        controls=divs[:2],
        script=script,
        bokeh=Markup(
            Resources("inline", log_level="warn", components=["bokeh", "bokeh-widgets"]).render_js()
        ),
        settings=settings,
        commands=reading.commands,
        page_command=reading.page_command(contents.paths),
        most_whole=reading.MOST_WHOLE,
    )


def embedded(drawing: Drawing | None) -> tuple[Markup, list[Markup]]:
    """The script that draws, and the places of the two controls and of every chart."""
    if drawing is None or not drawing.choice.charts:
        return Markup(""), []
    models = [*drawing.controls(), *drawing.figures]
    document(models)
    script, divs = components(models)
    return Markup(script), [Markup(div) for div in divs]


def title(contents: Contents) -> str:
    count = len(contents.paths)
    if len(contents.suites) == count:
        return f"VTAB-1k: {names([suite.path for suite in contents.suites])}"
    if len(contents.finetunings) == count:
        return f"Fine-tuning: {names([tuning.path for tuning in contents.finetunings])}"
    return f"{count} runs" if count > 1 else f"Run {names(contents.paths)}"


def names(paths: Sequence[str]) -> str:
    return ", ".join(os.path.basename(path) or path for path in paths)


def template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def shown(value):
    """Text without secrets and control characters, for every expression of the template, which
    then escapes what means something in HTML.
    """
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value if len(value) <= LONGEST else f"{value[:LONGEST]}...")


def of_main(contents: Contents, colours: list[str]) -> list[str]:
    """The colours of the main runs, in whose tables the trial runs are not."""
    is_main = [run in contents.main_runs for run in contents.runs]
    return list(itertools.compress(colours, is_main))
