"""The folder that describes one classification: numbers, one record for each image, pictures."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from vit_jax import cli
from vit_jax.cli import out_folder
from vit_jax.cli.csv_cell import cell
from vit_jax.evaluate.mistakes import calibration, charts, confusion, contact_sheets, precision
from vit_jax.evaluate.mistakes.contact_sheets import SHOWN, Look
from vit_jax.evaluate.mistakes.records import Records

SUMMARY = "summary.json"
MOST_PAIRS = 100  # of the summary


class About(NamedTuple):
    """What was evaluated on what."""

    name: str  # of the evaluation
    weights: str
    step: int | None  # of the checkpoint; None: the weights are not a checkpoint of ours
    class_names: Sequence[str]
    describe: Callable[[int], str]  # id -> the name of an image


def or_null(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def records_text(about: About, records: Records) -> str:
    """images.jsonl."""
    lines = []
    for row in range(len(records)):
        label = records.label[row].tolist()
        if records.has_sets:
            label = [i for i in label if i >= 0]
        number = int(records.id[row])
        top = zip(records.top[row].tolist(), records.probability[row].tolist(), strict=True)
        line = dict(
            id=number,
            path=about.describe(number),
            label=label,
            top5=list(top),
            loss=float(records.loss[row]),
        )
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def summary(about: About, records: Records, found: dict, precisions: np.ndarray | None) -> dict:
    """summary.json.

    Args:
      found: what `calibration.bins` returns.
      precisions: average precision of every class; None if it was not computed.
    """
    metrics = records.metrics()
    rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    f1 = math.nan
    pairs = []
    if not records.has_sets:
        f1 = confusion.macro_f1(records.label, records.top[:, 0])
        pairs = confusion.pairs(records.label, records.top[:, 0])[:MOST_PAIRS].tolist()
    mean_precision = math.nan
    if precisions is not None and len(records):
        mean_precision = float(np.nanmean(precisions))
    return dict(
        name=about.name,
        weights=about.weights,
        step=about.step,
        count=len(records),
        top1=metrics["top1"],
        top5=records.top_accuracy(),
        loss=metrics["loss"],
        ece=or_null(calibration.expected_error(found)),
        macro_f1=or_null(f1),
        mean_average_precision=or_null(mean_precision),
        calibration=[{key: or_null(value.item()) for key, value in row.items()} for row in rows],
        pairs=pairs,
        num_classes=len(about.class_names),
        class_names=list(about.class_names),
    )


def number(value) -> str:
    """A number in a CSV; empty for what is not defined."""
    return f"{value:.6g}" if math.isfinite(value) else ""


def table(rows: list[list]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def classes_text(records: Records, class_names: Sequence[str]) -> str:
    """classes.csv of images with one label."""
    predicted = records.top[:, 0]
    found = confusion.by_class(records.label, predicted, len(class_names))
    worst = {}
    for true, taken, count in confusion.pairs(records.label, predicted).tolist():
        worst.setdefault(true, (cell(class_names[taken]), count))
    columns = ["count", "predicted", "correct", "recall", "precision", "f1"]
    rows = [["class", "name", *columns, "taken_for", "taken_for_count"]]
    for i, name in enumerate(class_names):
        numbers = [number(found[column][i]) for column in columns]
        rows.append([i, cell(name), *numbers, *worst.get(i, ("", 0))])
    return table(rows)


def precisions_text(
    records: Records, class_names: Sequence[str], precisions: np.ndarray | None
) -> str:
    """classes.csv of images with several labels."""
    if precisions is None:
        precisions = np.full(len(class_names), np.nan)
    label = records.label[records.label >= 0]
    counts = np.bincount(label, minlength=len(class_names))
    rows = [["class", "name", "count", "average_precision"]]
    for i, name in enumerate(class_names):
        rows.append([i, cell(name), counts[i], number(precisions[i])])
    return table(rows)


def chosen(records: Records) -> np.ndarray:
    """Rows of the images on the contact sheets."""
    return np.union1d(records.mistakes()[:SHOWN], records.least_sure()[:SHOWN])


def files(about: About, records: Records, looks: dict[int, Look]) -> dict[str, str | bytes | None]:
    """The content of every file; None if there is nothing to show."""
    found = calibration.bins(records.probability[:, 0], records.correct)
    precisions = None
    if records.scores is not None:
        precisions = precision.average_precisions(records.label, records.scores)
    about_all = summary(about, records, found, precisions)
    sheet = (looks, about.class_names, about.describe)
    result = {
        "images.jsonl": records_text(about, records),
        "calibration.png": None,
        "confusion.png": None,
        "mistakes.jpg": contact_sheets.draw(records, records.mistakes()[:SHOWN], *sheet),
        "least_sure.jpg": contact_sheets.draw(records, records.least_sure()[:SHOWN], *sheet),
    }
    if records.has_sets:
        result["classes.csv"] = precisions_text(records, about.class_names, precisions)
    else:
        result["classes.csv"] = classes_text(records, about.class_names)
        result["confusion.png"] = charts.confusion_chart(
            records.label, records.top[:, 0], about.class_names
        )
    if len(records):
        result["calibration.png"] = charts.calibration_chart(found, about_all["ece"])
    # Last, so that a reader who finds it finds everything.
    return result | {SUMMARY: json.dumps(about_all, indent=1) + "\n"}


def write(folder: epath.Path, contents: dict[str, str | bytes | None]) -> None:
    """Writes the files; one of an earlier evaluation that has no content now is removed.

    Raises:
      UserError: there can't be such a folder.
    """
    out_folder.make(str(folder))
    (folder / SUMMARY).unlink(missing_ok=True)  # it would describe the files of two evaluations
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            cli.replace_file(folder / name, content)
