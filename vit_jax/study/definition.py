"""What a study is: a recipe, and axes whose values change it. Every combination is a run."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

import ml_collections

from vit_jax import config as configs
from vit_jax.config import rules
from vit_jax.config.overrides import COMMAND_LINE
from vit_jax.errors import UserError

REQUIRED = ("recipe", "axes")
OPTIONAL = dict(overrides=(), figure={}, title="")
RECIPE = "recipe="
COMPUTE = "exaFLOPs"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A metric against the values of axis `x`, or against the exaFLOPs of the runs, with a line for
    each value of axis `line`. The values of axis `over` are repetitions, such as seeds, over which
    there are means and intervals.
    """

    x: str  # an axis, or COMPUTE
    metric: str
    line: str = ""
    groups: Mapping[str, Sequence[str]] | None = None  # name of a line: values of `line` on it
    over: str = ""
    x_label: str = ""

    def lines_of(self, point: Mapping[str, str]) -> list[str]:
        """The names of the lines that a run is on."""
        value = point.get(self.line, "")
        if not self.groups:
            return [value]
        return [name for name, values in self.groups.items() if value in values]

    def x_of(self, point: Mapping[str, str]) -> str:
        """The same for runs that are repetitions of each other."""
        if self.x != COMPUTE:
            return point[self.x]
        return ", ".join(value for axis, value in point.items() if axis != self.over)


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    point: Mapping[str, str]  # axis -> value
    recipe: str  # FILE.py[:ARG]
    overrides: tuple[str, ...]  # KEY=VALUE

    @property
    def name(self) -> str:
        """Also of its folder."""
        return "_".join(re.sub(r"[^\w.+]+", "-", value) for value in self.point.values())

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of `vit_jax.train`, but for the workdir."""
        return (f"--config={self.recipe}", *(f"--config.{text}" for text in self.overrides))

    def config(self):
        """
        Raises:
          UserError: the recipe does not exist, or an override is not one of its keys.
        """
        try:
            return configs.load(self.recipe, self.arguments[1:])
        except UserError as error:
            text = str(error).replace(COMMAND_LINE, "in its overrides")
            raise UserError(f"run {self.name} of the study: {text}") from error


@dataclasses.dataclass(frozen=True)
class Study:
    title: str
    axes: Mapping[str, Mapping[str, tuple[str, ...]]]  # axis -> value -> KEY=VALUE
    runs: list[StudyRun]
    figure: Figure | None


def read(location: str) -> Study:
    """The study that FILE.py[:ARG] describes: its `get_config` returns a dict of

    recipe: FILE.py[:ARG],
    axes: axis -> value -> list of KEY=VALUE, of which recipe=FILE.py[:ARG] is another recipe,
    overrides: list of KEY=VALUE for all runs,
    figure: see `Figure`, title: of the page.

    Raises:
      UserError: it is none.
    """
    where = f"study {location}"
    found = configs.call_file(location)
    if isinstance(found, ml_collections.ConfigDict):
        found = found.to_dict()
    found = OPTIONAL | dict(found)
    unknown = sorted(found.keys() - OPTIONAL.keys() - set(REQUIRED))
    missing = [key for key in REQUIRED if not found.get(key)]
    if unknown or missing:
        raise UserError(
            f"{where} must have the keys {', '.join(REQUIRED)}, and may have "
            f"{', '.join(OPTIONAL)}: it has {', '.join(unknown) or 'nothing'} instead of "
            f"{', '.join(missing) or 'them'}"
        )
    axes = axes_of(found["axes"], where)
    common = assignments(found["overrides"], where)
    runs = [run_of(point, found["recipe"], common + own) for point, own in points(axes)]
    names = [run.name.lower() for run in runs]  # on some file systems they are the same folder
    twice = [run.name for run in runs if names.count(run.name.lower()) > 1]
    if twice:
        raise UserError(f"{where} has two runs with the name {twice[0]}: rename a value of an axis")
    return Study(found["title"] or location, axes, runs, figure_of(found["figure"], axes, where))


def axes_of(found, where: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """
    Raises:
      UserError: they are not dicts of lists of KEY=VALUE.
    """
    is_dict = isinstance(found, Mapping)
    if not is_dict or not all(isinstance(values, Mapping) and values for values in found.values()):
        raise UserError(
            f"{where}: axes are {found!r}: write a dict of dicts, axis -> value -> list of "
            "KEY=VALUE"
        )
    return {
        str(axis): {str(value): assignments(texts, where) for value, texts in values.items()}
        for axis, values in found.items()
    }


def points(axes: Mapping) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """(axis -> value, overrides) of every combination, the last axis changing fastest."""
    found = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        own = (axes[axis][value] for axis, value in point.items())
        found.append((point, tuple(itertools.chain(*own))))
    return found


def assignments(texts, where: str) -> tuple[str, ...]:
    """
    Raises:
      UserError: they are not a list of KEY=VALUE.
    """
    is_list = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
    if not is_list or not all(re.match(r"[\w.]+=", text) for text in texts):
        raise UserError(
            f"{where}: overrides are {texts!r}: write a list of KEY=VALUE, such as "
            '["model.variant=B/16"]'
        )
    return tuple(texts)


def run_of(point: Mapping, recipe: str, texts: Sequence[str]) -> StudyRun:
    """The run with these overrides, of which the last `recipe` counts."""
    recipes = [text.removeprefix(RECIPE) for text in texts if text.startswith(RECIPE)]
    overrides = tuple(text for text in texts if not text.startswith(RECIPE))
    return StudyRun(point, [recipe, *recipes][-1], overrides)


def figure_of(found: Mapping, axes: Mapping, where: str) -> Figure | None:
    if not found:
        return None
    try:
        figure = Figure(**found)
    except TypeError:
        raise UserError(
            f"{where}: its figure has the keys {', '.join(found)}: it needs x and metric, and may "
            "have line, groups, over and x_label"
        ) from None
    allowed = dict(x=(COMPUTE, *axes), line=("", *axes), over=("", *axes))
    for key, names in allowed.items():
        axis = getattr(figure, key)
        if axis not in names:
            raise UserError(
                f"{where}: its figure names {axis}, which is no axis: {key} is one of "
                f"{', '.join(filter(None, names))}"
            )
    repeated = [axis for axis in axes if axis not in (figure.x, figure.line, figure.over)]
    if repeated and figure.x != COMPUTE:
        raise UserError(
            f"{where}: its figure does not say what the axis {repeated[0]} is: make it x, line, or "
            "over, the axis of repetitions"
        )
    groups = groups_of(figure, axes.get(figure.line, {}), where)
    return dataclasses.replace(figure, groups=groups)


def groups_of(figure: Figure, values: Mapping, where: str) -> dict[str, list[str]] | None:
    """Name of a line -> values of the axis `line`, as text.

    Raises:
      UserError: they are not such values.
    """
    found = figure.groups
    if found is None:
        return None
    is_dict = isinstance(found, Mapping)
    if not is_dict or not all(isinstance(one, list | tuple) for one in found.values()):
        raise UserError(
            f"{where}: the groups of its figure are {found!r}: write a dict of lists, name of a "
            f"line -> values of the axis line={figure.line!r}"
        )
    groups = {str(name): [str(value) for value in one] for name, one in found.items()}
    unknown = [value for one in groups.values() for value in one if value not in values]
    if unknown:
        raise UserError(
            f"{where}: the groups of its figure have {unknown[0]}, which is no value of the axis "
            f"line={figure.line!r}: the values are {', '.join(values) or 'none'}"
        )
    return groups


def check_metric(figure: Figure | None, run: StudyRun) -> None:
    """
    Raises:
      UserError: the config of a run is wrong, or does not measure what the figure shows.
    """
    config = run.config()
    if figure and figure.metric.startswith("eval/"):
        what = f"run {run.name} of the study: the metric {figure.metric!r} of the figure"
        rules.check_metric(config, what, figure.metric)
