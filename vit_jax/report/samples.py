"""Pictures of a workdir: the images that a run trained on and what the model sees in them, from
`pictures/`, and the figures of `vit_jax.figures --out=WORKDIR/figures`.
"""

import dataclasses
import re

from vit_jax.report.files import Folder
from vit_jax.report.pictures import Gallery, Picture, files_of

KINDS = {
    "inputs": "inputs after augmentation",
    "": "what the objective predicts",
    "attention": "where the model looks",
}
NAME = re.compile(r"(\d{1,15})(?:_(\w+))?\.png")


@dataclasses.dataclass(frozen=True)
class Sample:
    """The newest picture of a kind, and the first one to compare it with."""

    title: str
    newest: Picture
    first: Picture | None


def read(folder: Folder, gallery: Gallery) -> list[Sample]:
    """The pictures that training has drawn; of the inputs the first ones, which do not change."""
    pictures = folder.below("pictures")
    steps: dict[str, list[tuple[int, str]]] = {}
    for name in pictures.names():
        match = NAME.fullmatch(name)
        if match:
            steps.setdefault(match[2] or "", []).append((int(match[1]), name))
    found = []
    for kind in sorted(steps, key=lambda kind: list(KINDS).index(kind) if kind in KINDS else 99):
        title = KINDS.get(kind, kind.replace("_", " "))
        drawn = [
            gallery.add(pictures, name, f"{title}, step {step:,}")
            for step, name in ends(sorted(steps[kind]), kind)
        ]
        found.append(Sample(title, drawn[-1], drawn[0] if drawn[1:] else None))
    return found


def ends(steps: list[tuple[int, str]], kind: str) -> list[tuple[int, str]]:
    """The first and the last of what changes."""
    if kind == "inputs" or len(steps) == 1:
        return steps[:1]
    return [steps[0], steps[-1]]


def figures(folder: Folder, gallery: Gallery) -> list[Picture]:
    drawn = folder.below("figures")
    return [gallery.add(drawn, name, title_of(name)) for name in files_of(drawn.names())]


def title_of(name: str) -> str:
    """ "mean_distance.png" -> "mean distance"."""
    return name.rpartition(".")[0].replace("_", " ").replace("-", " ")
