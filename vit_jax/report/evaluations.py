"""The folders that `vit_jax.evaluate --out=WORKDIR/evals` writes: numbers, the classes that are
taken for each other most often, and pictures.
"""

import dataclasses
import json

from vit_jax.report.files import Folder
from vit_jax.report.overview import interval_text
from vit_jax.report.pictures import Gallery, Picture
from vit_jax.report.tables import Table

FOLDER = "evals"
MOST_PAIRS = 10
PICTURES = {
    "confusion.png": "confusion matrix",
    "calibration.png": "calibration",
    "mistakes.jpg": "the worst mistakes",
    "least_sure.jpg": "the least sure",
}
# Row -> (key of summary.json, form).
NUMBERS = {
    "top-5": ("top5", "{:.2%}"),
    "loss": ("loss", "{:.4g}"),
    "expected calibration error": ("ece", "{:.2%}"),
    "macro F1": ("macro_f1", "{:.4f}"),
    "mean average precision": ("mean_average_precision", "{:.4f}"),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    title: str
    path: str
    numbers: Table
    pairs: Table
    pictures: list[Picture]
    details: list[str]  # files with more


def read(folder: Folder, gallery: Gallery) -> list[Evaluation]:
    """All evaluations in the folder `evals` of a workdir."""
    evals = folder.below(FOLDER)
    found = []
    for name in evals.names():
        one = evals.below(name)
        names = one.names()
        summary = one.parsed("summary.json", parse)
        pictures = [one_name for one_name in PICTURES if one_name in names]
        if summary is None and not pictures:
            continue
        numbers, pairs = summary or (Table([], []), Table([], []))
        found.append(
            Evaluation(
                title=name,
                path=one.path,
                numbers=numbers,
                pairs=pairs,
                pictures=[gallery.add(one, picture, PICTURES[picture]) for picture in pictures],
                details=[file for file in ("classes.csv", "images.jsonl") if file in names],
            )
        )
    return found


def parse(text: str) -> tuple[Table, Table]:
    """(numbers, worst pairs) of a summary.json.

    Raises:
      Exception: of any type; it is damaged.
    """
    summary = json.loads(text)
    rows = []
    if summary.get("step") is not None:
        rows.append(["checkpoint", f"step {summary['step']:,}"])
    elif summary.get("weights"):
        rows.append(["weights", str(summary["weights"])])
    if summary.get("top1") is not None:
        top1 = summary["top1"]
        rows.append(["top-1", f"{top1:.2%}{interval_text(top1, summary.get('count'))}"])
    if summary.get("num_classes", 0) <= 5:
        summary.pop("top5", None)  # always 100 %
    for name, (key, form) in NUMBERS.items():
        if summary.get(key) is not None:
            rows.append([name, form.format(summary[key])])
    names = summary.get("class_names") or []
    pairs = [
        [class_name(names, true), class_name(names, predicted), f"{int(count):,}"]
        for true, predicted, count in (summary.get("pairs") or [])[:MOST_PAIRS]
    ]
    return Table([], rows), Table(["true class", "taken for", "images"], pairs)


def class_name(names: list, label) -> str:
    """`label`: an index, or the name itself."""
    if isinstance(label, int) and 0 <= label < len(names):
        return str(names[label])
    return str(label)
