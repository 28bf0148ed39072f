"""A CSV file as a data set: one line per image with its path, its label and, if there are splits,
its split.

With a column `labels` instead of `label` an image has any number of labels, separated by
semicolons.
"""

import csv
import io
import os

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.listing import Files, Listing, clean_label, distinct, number_classes
from vit_jax.errors import UserError, one_line

PATH, LABEL, LABELS, SPLIT = "path", "label", "labels", "split"


def rows(where: str) -> list[dict[str, str]]:
    """The lines of a CSV file, each with the list of its labels as `labels`."""
    try:
        reader = csv.DictReader(io.StringIO(storage.read(where).decode("utf-8-sig"), newline=""))
        columns = reader.fieldnames or []
        found = list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{where} is not a CSV file in UTF-8 ({one_line(error)}): correct it"
        ) from None
    kind = LABELS if LABELS in columns and LABEL not in columns else LABEL
    for column in (PATH, kind):
        if column not in columns:
            raise UserError(
                f"CSV file {where} has no column {column!r}, it has "
                f"{', '.join(map(repr, columns)) or 'no line'}: its first line must name the "
                f"columns {PATH}, {LABEL} (or {LABELS}) and, if there are splits, {SPLIT}"
            )
    required = [column for column in (PATH, LABEL, SPLIT) if column in columns]
    for number, row in enumerate(found, 2):
        line = f"line {number} of CSV file {where}"
        missing = [column for column in required if not row[column]]
        if missing:
            raise UserError(f"{line} has no {missing[0]}: add it")
        texts = [row[LABEL]] if kind == LABEL else (row[LABELS] or "").split(";")
        texts = [text for text in texts if text.strip() or kind == LABEL]
        row[LABELS] = [clean_label(text, line) for text in texts]
    if not found:
        raise UserError(
            f"CSV file {where} lists no images: add a line for each, below the names of the columns"
        )
    return found


def check(where: str, paths: list[str], root: str) -> None:
    """Raises UserError for images that are listed twice, do not exist, or are folders."""
    first: dict[str, int] = {}
    for number, path in enumerate(paths, 2):
        # For comparison only: behind a link to a folder, "link/../a.jpg" is another file than
        # "a.jpg".
        file = os.path.normpath(os.path.join(root, path))
        if file in first:
            raise UserError(
                f"CSV file {where} lists {path} twice, in lines {first[file]} and {number}: remove "
                "one"
            )
        first[file] = number
    full = [os.path.join(root, path) for path in paths]
    missing = storage.missing(full)
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(paths)} images in CSV file {where} do not exist, the "
            f"first is {paths[missing[0]]} in line {missing[0] + 2}: correct the paths, which are "
            "relative to the folder of the CSV file"
        )
    for number, path in enumerate(paths, 2):
        # On a store every image would cost a request.
        if storage.is_local(full[number - 2]) and storage.is_folder(full[number - 2]):
            raise UserError(
                f"line {number} of CSV file {where} names the folder {path}: name an image file"
            )


def scan(where: str) -> dict[str, np.ndarray]:
    found = rows(where)
    paths = [row[PATH] for row in found]
    check(where, paths, os.path.dirname(where))
    labels = [text for row in found for text in row[LABELS]]
    counts = [-1 if LABEL in row else len(row[LABELS]) for row in found]
    splits = [row.get(SPLIT) or "train" for row in found]
    return dict(
        stamp=np.asarray(storage.stamp(where)),
        counts=np.asarray(counts, np.int64),
        **index_cache.Strings.pack(paths).arrays("paths"),
        **index_cache.Strings.pack(labels).arrays("labels"),
        **index_cache.Strings.pack(splits).arrays("splits"),
    )


def numbered(counts: np.ndarray, texts, splits: dict[str, np.ndarray], where: str):
    """Like `number_classes` for images with `counts` labels each: the labels are int32 [images,
    largest count], padded with -1. A count of -1 means that each image has exactly one label.
    """
    if (counts < 0).all():
        return number_classes(texts, splits, where)
    if not counts.any():
        raise UserError(
            f"CSV file {where} has no label in its column {LABELS}: add some, separated by "
            "semicolons"
        )
    owner = np.repeat(np.arange(len(counts)), counts)
    parts = {name: np.flatnonzero(np.isin(owner, numbers)) for name, numbers in splits.items()}
    flat, class_names, num_classes = number_classes(texts, parts, where)
    labels = np.full((len(counts), counts.max()), -1, np.int32)
    labels[owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)] = flat
    return labels, class_names, num_classes


def load(where: str) -> Listing:
    """Lists the images of a CSV file."""
    where = storage.absolute(where)
    storage.must_exist(where, "CSV file", "correct data.name=csv:PATH")
    if storage.is_folder(where):
        raise UserError(f"{where} is a folder: give the CSV file as data.name=csv:PATH")

    def is_current(arrays) -> bool:
        return tuple(arrays["stamp"]) == storage.stamp(where)

    arrays = index_cache.cached("csv", where, lambda: scan(where), is_current)
    paths = index_cache.Strings.of(arrays, "paths")
    texts = index_cache.Strings.of(arrays, "labels")
    names, split = distinct(index_cache.Strings.of(arrays, "splits"))
    splits = {name: np.flatnonzero(split == number) for number, name in enumerate(names)}
    labels, class_names, num_classes = numbered(arrays["counts"], texts, splits, where)
    content = [paths.bytes, paths.ends, texts.bytes, texts.ends]
    content.append("\n".join(names[i] for i in split.tolist()))
    if labels.ndim == 2:
        content.append(arrays["counts"])
    root = os.path.dirname(where)
    return Files(
        path=lambda i: os.path.join(root, paths[i]),
        all_labels=labels,
        splits=splits,
        class_names=class_names,
        num_classes=num_classes,
        fingerprint=index_cache.digest(*content),
    )
