"""`vit_jax.data check FOLDER`: everything that is wrong with image files, in one run, and what they
are. The folder may also be a CSV file, a tar, or a data.name such as tars:PATH.
"""

import dataclasses
import os

import numpy as np
import tensorflow as tf

from vit_jax.cli import out_folder
from vit_jax.data import pipeline
from vit_jax.data.check import contact_sheet, findings, show, survey
from vit_jax.data.check.findings import Described, Finding
from vit_jax.data.sources import catalog, folder, index_cache, splits, storage, tars
from vit_jax.data.sources.alike import alike, case_problem
from vit_jax.data.sources.ignored import BROKEN, LOOP, Ignored
from vit_jax.data.sources.listing import Listing
from vit_jax.data.sources.source import Subset
from vit_jax.distributed import hardware
from vit_jax.errors import UserError

SIDE = 128  # pixels, of an image on the contact sheet
KINDS = {".csv": "csv", ".tar": "tars"}  # of a path without a kind, by its suffix; else folder


def name_of(given: str) -> str:
    """The data.name that a path means: itself if it begins with folder:, tars: or csv:."""
    if given.partition(":")[0] in catalog.LISTED:
        return given
    kind = next((kind for end, kind in KINDS.items() if given.lower().endswith(end)), "folder")
    if kind != "folder" and storage.is_folder(storage.absolute(given)):
        kind = "folder"
    return f"{kind}:{given}"


@dataclasses.dataclass
class Opened:
    """Image files that were listed in spite of what is wrong with them."""

    listing: Listing | None  # None: they can't be listed
    faults: list[Finding]
    warnings: list[Finding]


def open_folder(root: str, labelled: bool) -> Opened:
    root = storage.absolute(root)
    if not storage.is_folder(root):
        storage.must_exist(root, "image folder", "correct the path")
        raise UserError(f"{root} is a file: give a folder, a .csv or a .tar")
    problems: list[str] = []
    arrays, unused = folder.scan(root, problems)
    folders = list(index_cache.Strings.of(arrays, "folders"))
    arrange = folder.layout if labelled else folder.layout_without_classes
    found = arrange(root, folders, arrays["counts"])
    problems += found.problems
    warnings = [
        Finding(f"files {kind}", unused[kind], unused.paths[kind])
        for kind in (BROKEN, LOOP)
        if unused[kind]
    ]
    _, cases = alike(found.classes)
    if cases:
        lines = [case_problem(names, root) for names in cases]
        warnings.append(Finding("groups of classes that differ in case only", len(cases), lines))
    faults = []
    if problems:
        faults.append(Finding("faults of folders and classes", len(problems), problems))
    return Opened(folder.listing(root, arrays, found), faults, warnings)


def open_files(name: str, labelled: bool) -> Opened:
    kind, _, where = name.partition(":")
    if kind == "folder":
        return open_folder(where, labelled)
    if kind == "csv":
        storage.must_exist(storage.absolute(where), name, "correct it")
    else:
        tars.find(storage.absolute(where))  # an error if there are none
    try:
        return Opened(catalog.LISTED[kind](where, labelled), [], [])
    except UserError as error:
        return Opened(None, [Finding("fault of the files as a whole", 1, [str(error)])], [])


def sizes(data: Described) -> dict:
    """Width and height of the images that can be decoded, and their shorter sides."""
    found = data.survey.size[data.survey.is_good]
    if not len(found):
        return {}
    shorter = found.min(1)
    areas = found.astype(np.int64).prod(1)
    return dict(
        smallest=found[areas.argmin()].tolist(),
        median=np.median(found, axis=0).astype(int).tolist(),
        largest=found[areas.argmax()].tolist(),
        shorter_side=[int(shorter.min()), int(np.median(shorter)), int(shorter.max())],
        smaller_than_usual=int((shorter < findings.USUAL_SIZE).sum()),
    )


def counted(values: np.ndarray, names) -> dict[str, int]:
    """Name -> how often its number occurs, the most frequent first."""
    numbers, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(names[numbers[i]]): int(counts[i]) for i in order}


def classes(data: Described) -> dict[str, dict[str, int]]:
    """Class -> split -> number of images, broken ones included."""
    names = data.listing.class_names or range(data.listing.num_classes)
    found = {}
    for code, split in enumerate(data.split_names):
        own = data.label[data.split == code]
        counts = np.bincount(own[own >= 0], minlength=data.listing.num_classes)
        if counts.any() or split != findings.NO_SPLIT:
            found[split] = counts
    return {
        str(name): {split: int(counts[number]) for split, counts in found.items()}
        for number, name in enumerate(names)
    }


def contents(data: Described, parts: dict[str, np.ndarray]) -> dict:
    """What there is, plain JSON."""
    listing = data.listing
    used = len(np.unique(np.concatenate([[], *parts.values()])))
    unused = Ignored(listing.ignored)
    good = data.survey.is_good
    return dict(
        files=dict(found=used + unused.total(), images=used, ignored=dict(unused)),
        splits={name: len(numbers) for name, numbers in parts.items()},
        classes=classes(data),
        formats=counted(data.survey.format, (*survey.FORMATS, "unknown")),  # the last is number -1
        orientations=counted(data.survey.orientation[good], range(9)),
        sizes=sizes(data),
    )


def sample(data: Described) -> np.ndarray:
    """Numbers of images for the contact sheet, from all classes in turn."""
    label = data.label[:, 0]
    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], label[order])
    rank = np.arange(len(order)) - starts
    first = order[np.argsort(rank, kind="stable")[: contact_sheet.SHOWN]]
    return data.survey.numbers[first]


def draw(data: Described, name: str, folder_: str) -> str:
    """Draws a contact sheet; returns its path."""
    numbers = sample(data)
    rows = np.arange(len(numbers))
    how = pipeline.preparation.Preparation(size=(SIDE, SIDE), target=(SIDE, SIDE))
    threads = hardware.cores()
    most = pipeline.images.most_pixels(threads)
    host = pipeline.Pipeline(
        source=Subset(data.listing, numbers),
        items=pipeline.order.eval_items(len(numbers), len(numbers), rows),
        pixels=pipeline.images.alone(pipeline.images.eval_image(how, most)),
        shapes=pipeline.shapes.of_one(how.size),
        rows=len(numbers),
        steps=1,
        on_corrupt="skip",
        threads=threads,
    )
    path = contact_sheet.file_of(folder_, name)
    batch = next(host.arrays(0, 1, skip_failures=True))
    names = data.listing.class_names if data.listing.num_classes else None
    contact_sheet.draw(batch, names, path)
    return str(path)


def examined(opened: Opened, name: str, out: str) -> dict:
    """The report on the images of a listing, plain JSON but for the findings."""
    listing = opened.listing
    parts = splits.without_aliases(listing.splits)
    numbers = np.unique(np.concatenate([np.empty(0, np.int64), *parts.values()]).astype(np.int64))
    if not len(numbers):  # none is in a class folder
        numbers = np.arange(len(listing))
    root = storage.absolute(name.partition(":")[2])
    if not name.startswith("folder:"):
        root = os.path.dirname(root)
    data = Described(listing, root, parts, survey.read(listing, numbers))
    faults, warnings = findings.of_images(data)
    equal_faults, equal_warnings = findings.of_equal_images(data)
    similar = findings.of_similar_images(data)
    report = contents(data, parts)
    of_classes = findings.of_classes(report["classes"])
    report["faults"] = [*opened.faults, *faults, *equal_faults]
    report["warnings"] = [*opened.warnings, *of_classes, *warnings, *equal_warnings, *similar]
    if len(numbers):
        report["sheet"] = draw(data, name, out)
    return report


def run(given: str, out: str, labelled: bool) -> dict:
    """Checks files, prints and returns a report; `ready` is true if there is no fault.

    Args:
      labelled: whether the images have classes, or are for training without labels.
    """
    out_folder.make(out)
    tf.config.set_visible_devices([], "GPU")
    name = name_of(given)
    opened = open_files(name, labelled)
    report = dict(faults=opened.faults, warnings=opened.warnings)
    if opened.listing is not None:
        report = examined(opened, name, out)
    show.report(name, report)
    faults = report["faults"]
    summary = f"{name} has faults: {'; '.join(map(str, faults))}: see above" if faults else ""
    found = {key: [vars(each) for each in report[key]] for key in ("faults", "warnings")}
    return dict(ready=not faults, summary=summary, name=name) | report | found
