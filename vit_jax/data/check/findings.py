"""What is wrong with the images of a data set: faults stop or spoil training, warnings may not."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax.data.check import duplicates
from vit_jax.data.check.survey import Survey
from vit_jax.data.sources.listing import Listing
from vit_jax.errors import printable

LISTED = 1_000  # names of one kind in the report
USUAL_SIZE = 224  # pixels
NO_SPLIT = "no split"


@dataclasses.dataclass
class Finding:
    """Something that was found `count` times; `examples` names some or all of them."""

    kind: str
    count: int
    examples: list[str]

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,}"


class Described:
    """A survey with the splits, classes and names of its images."""

    def __init__(self, listing: Listing, root: str, splits: dict[str, np.ndarray], survey: Survey):
        """
        Args:
          root: a folder that names are relative to.
          splits: numbers of the images by split, each once.
        """
        self.listing = listing
        self.root = printable(root)
        self.survey = survey
        self.split_names = [*splits, NO_SPLIT]
        of_listing = np.full(len(listing), len(splits), np.int16)
        for code, numbers in enumerate(splits.values()):
            of_listing[numbers] = code
        self.split = of_listing[survey.numbers]  # position in split_names, of each image
        label = listing.all_labels[survey.numbers]
        self.label = label.reshape(len(label), listing.set_size or 1)  # padded with -1

    def name(self, position: int) -> str:
        name = self.listing.describe(int(self.survey.numbers[position]))
        return name.removeprefix(self.root).lstrip("/")

    def names(self, positions) -> list[str]:
        return [self.name(i) for i in positions[:LISTED]]

    def same_label(self, first: int, second: int) -> bool:
        return np.array_equal(self.label[first], self.label[second])

    def where(self, positions) -> str:
        """The splits of some images, such as "train and val"."""
        codes = sorted({int(self.split[i]) for i in positions})
        return " and ".join(self.split_names[code] for code in codes)


def of_images(data: Described) -> tuple[list[Finding], list[Finding]]:
    """(faults, warnings) of single images."""
    survey = data.survey
    faults = []
    for kind, found in sorted(survey.faults.items()):
        examples = [f"{data.name(i)}: {why}" if why else data.name(i) for i, why in found[:LISTED]]
        faults.append(Finding(kind, len(found), examples))
    warnings = []
    if survey.other_suffix:
        kind = "images with the suffix of another format, which are read all the same"
        found = survey.other_suffix
        warnings.append(Finding(kind, len(found), data.names(found)))
    small = np.flatnonzero(survey.is_good & (survey.size.min(1) < USUAL_SIZE))
    if len(small):
        kind = f"images smaller than the usual {USUAL_SIZE} pixels"
        warnings.append(Finding(kind, len(small), data.names(small.tolist())))
    return faults, warnings


def of_classes(classes: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """Warnings of classes as a whole; `classes`: class -> split -> number of images."""
    used = [name for name, counts in classes.items() if any(counts.values())]
    if len(used) != 1:
        return []
    return [Finding("classes that have images (a classifier needs two or more)", 1, used)]


class Findings(dict[str, Finding]):
    """Kind -> what was found."""

    def add(self, kind: str, example: str) -> None:
        found = self.setdefault(kind, Finding(kind, 0, []))
        found.count += 1
        if len(found.examples) < LISTED:
            found.examples.append(example)

    def by_kind(self) -> list[Finding]:
        return [self[kind] for kind in sorted(self)]


def of_equal_images(data: Described) -> tuple[list[Finding], list[Finding]]:
    """(faults, warnings) of images with the same bytes: a fault between splits, and with different
    labels.
    """
    faults = Findings()
    warnings = Findings()
    good = np.flatnonzero(data.survey.is_good)
    for group in duplicates.groups(data.survey.digest[good]):
        positions = good[group].tolist()
        example = " = ".join(data.names(positions[:3]))
        example += f" and {len(positions) - 3} more" if len(positions) > 3 else ""
        first = positions[0]
        labels_differ = any(not data.same_label(first, i) for i in positions)
        splits_differ = len({int(data.split[i]) for i in positions}) > 1
        if splits_differ:
            faults.add(f"the same image in {data.where(positions)}", example)
        if labels_differ:
            faults.add("the same image with different labels", example)
        if not splits_differ and not labels_differ:
            warnings.add(f"the same image twice in {data.where(positions)}", example)
    return faults.by_kind(), warnings.by_kind()


def of_similar_images(data: Described) -> list[Finding]:
    """Warnings of pairs of images that look almost the same."""
    found = Findings()
    survey = data.survey
    usable = np.flatnonzero(survey.is_good & survey.has_thumb)
    _, distinct = np.unique(survey.digest[usable], return_index=True)
    usable = usable[np.sort(distinct)]
    pairs = usable[duplicates.near_pairs(survey.thumb[usable])].tolist()
    at_least = " (at least)" if len(pairs) > duplicates.MOST_PAIRS else ""
    for pair in pairs:
        example = " ~ ".join(data.names(pair))
        label = "" if data.same_label(*pair) else ", with different labels"
        kind = f"pairs of images that look the same in {data.where(pair)}{label}{at_least}"
        found.add(kind, example)
    return found.by_kind()
