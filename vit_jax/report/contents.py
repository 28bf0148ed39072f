"""From paths to everything that a page shows."""

import dataclasses
import itertools
import os
import shlex
from collections.abc import Sequence

from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import UserError
from vit_jax.report import (
    evaluations,
    finetuning,
    overview,
    reference,
    run,
    samples,
    settings,
    speed,
    suite,
)
from vit_jax.report.files import Folder
from vit_jax.report.finetuning import Finetuning
from vit_jax.report.pictures import Gallery, Picture
from vit_jax.report.reference import Reference
from vit_jax.report.run import Run
from vit_jax.report.suite import Suite
from vit_jax.report.tables import Table

MOST_WHOLE = 10  # runs whose whole config is on the page


@dataclasses.dataclass(frozen=True)
class Details:
    """What one run has besides numbers and curves."""

    run: Run
    evaluations: list[evaluations.Evaluation]
    samples: list[samples.Sample]
    figures: list[Picture]


@dataclasses.dataclass
class Contents:
    """Everything on a page."""

    paths: list[str]
    problems: list[str]
    runs: list[Run] = dataclasses.field(default_factory=list)
    finetunings: list[Finetuning] = dataclasses.field(default_factory=list)
    suites: list[Suite] = dataclasses.field(default_factory=list)
    gallery: Gallery = dataclasses.field(default_factory=Gallery)
    details: list[Details] = dataclasses.field(default_factory=list)

    @property
    def main_runs(self) -> list[Run]:
        return [run for run in self.runs if run.is_main] or self.runs

    def add(self, folder: Folder, label: str, is_alone: bool) -> None:
        """Reads a folder.

        Raises:
          UserError: there is no run in it.
        """
        names = folder.names()
        if suite.FILE in names:
            found = suite.read(folder, self.gallery)
            self.suites += [found] if found else []
        elif finetuning.is_finetuning(names):
            tuning, runs = finetuning.read(folder, "" if is_alone else label)
            self.finetunings.append(tuning)
            self.runs += runs
        elif run.is_workdir(names):
            self.runs.append(run.read(folder, label))
        else:
            raise UserError(nothing_in(folder, names))

    def read_details(self) -> None:
        for one in self.main_runs:
            self.details.append(
                Details(
                    run=one,
                    evaluations=evaluations.read(one.folder, self.gallery),
                    samples=samples.read(one.folder, self.gallery),
                    figures=samples.figures(one.folder, self.gallery),
                )
            )
        self.gallery.fill()

    @property
    def speed(self) -> list[Table]:
        """Tables about speed, wall time and files."""
        runs = self.main_runs
        tables = [speed.speeds(runs), speed.times(runs), speed.files(runs)]
        return [table for table in tables if table.rows]

    @property
    def facts(self) -> Table:
        return overview.facts(self.main_runs)

    @property
    def results(self) -> Table:
        return overview.results(self.main_runs)

    @property
    def differences(self) -> Table:
        """Config keys with different values, of several runs."""
        runs = self.runs
        rows = settings.between([run.flat for run in runs]) if len(runs) > 1 else []
        return Table.of_runs([run.label for run in runs], [[key, *row] for key, row in rows])


def nothing_in(folder: Folder, names: list[str]) -> str:
    """The message about a folder without a run."""
    problems = [line for line in folder.problems if line.startswith(f"{folder.path}/")]
    if problems:
        return f"{problems[0]}: correct the path, or make it readable"
    runs = (folder.path_of(name) for name in names if run.is_workdir(folder.below(name).names()))
    inside = list(itertools.islice(runs, 4))  # the folder may be large
    where = f"{folder.path} has no run: "
    if inside:
        more = ", ..." if inside[3:] else ""
        return f"{where}give the folders of runs in it ({', '.join(inside[:3])}{more})"
    return (
        f"{where}give the workdir of vit_jax.train, vit_jax.finetune or vit_jax.vtab, after its "
        "start"
    )


def read(paths: Sequence[str]) -> Contents:
    """Reads workdirs, local or gs://, and reference runs.

    Raises:
      UserError: one of them has no run, or can't be read.
    """
    paths = list(dict.fromkeys(os.path.expanduser(path).rstrip("/") or path for path in paths))
    contents = Contents(paths, problems=[])
    for path, label in zip(paths, labels(paths), strict=True):
        if reference.is_reference(path):
            contents.runs.append(reference.read(path, label))
        else:
            contents.add(Folder(path, contents.problems), label, len(paths) == 1)
    contents.read_details()
    return contents


def labels(paths: Sequence[str]) -> list[str]:
    """The shortest ends of paths that are all different."""
    parts = [
        os.path.abspath(path).split("/") if "://" not in path else path.split("/") for path in paths
    ]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return list(paths)


# --- commands ---


def commands(one: Run) -> list[tuple[str, str]]:
    """(what it does, command) to type for a run."""
    workdir = one.folder.path
    repeat = settings.command_text(one.command)
    found = [("Repeat it", repeat)] if repeat else []
    if isinstance(one, Reference):
        return found
    evaluate = evaluation_command(one)
    if evaluate:
        found.append(("Evaluate it, with confusion matrix and mistakes", evaluate))
    figures = ["python", "-m", "vit_jax.figures", workdir, "IMAGE", f"--out={workdir}/figures"]
    found.append(("Figures of what it learned, over some images", shlex.join(figures)))
    if one.flat.get("objective", "classify") == "classify":
        predict = ["python", "-m", "vit_jax.predict", f"--init_from={workdir}", "IMAGE_OR_FOLDER"]
        found.append(("Apply it to images", shlex.join(predict)))
    return found


def page_command(paths: Sequence[str]) -> str:
    """Makes the page again."""
    return shlex.join(["python", "-m", "vit_jax.report", *paths])


def evaluation_command(one: Run) -> str:
    """On the test split of a known data set, else on what the first evaluation of the run is on; ""
    if `configs/evaluate.py` can't say that.
    """
    flat = one.flat
    kinds = (key.removesuffix(".type") for key in flat if flat[key] == "classification")
    first = next((f"{key}.data" for key in kinds if key.startswith("evals.")), None)
    if first is None or flat.get(f"{first}.rest"):
        return ""
    name = str(flat.get(f"{first}.name") or flat.get("data.name", ""))
    if "," in name:
        return ""
    data = name if name in CATALOG else f"{name},{flat.get(f'{first}.split', '')}"
    words = [f"--config=configs/evaluate.py:{data}", f"--init_from={one.folder.path}"]
    return shlex.join(
        ["python", "-m", "vit_jax.evaluate", *words, f"--out={one.folder.path}/evals"]
    )
