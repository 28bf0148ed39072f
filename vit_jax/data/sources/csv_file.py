"""A CSV file as a data set: one line per image with its path, its label and, if there are splits,
its split.

With a column `labels` instead of `label` an image has any number of labels, separated by
semicolons. Training without labels needs neither, and reads none.
"""

import csv
import difflib
import io
import itertools
import logging
import os
from collections.abc import Iterator

import numpy as np

from vit_jax.data.sources import index_cache, storage, unlabelled
from vit_jax.data.sources.alike import check_alike, visible
from vit_jax.data.sources.listing import Files, Listing, clean_label, distinct, number_classes
from vit_jax.data.sources.unlabelled import INSTEAD
from vit_jax.errors import UserError, one_line

log = logging.getLogger(__name__)

KNOWN = PATH, LABEL, LABELS, SPLIT = "path", "label", "labels", "split"  # columns
ALIKE = 0.8  # similarity, from which on a column is a misspelled one: "split" and "spilt"
INDEX = "csv_rows"  # those of earlier versions, called csv, may lack the splits of a column Split
INDEX_WITHOUT_LABELS = "csv_images"


def column_name(text: str) -> str:
    """The name of a column as it is compared: "split" for " Split"."""
    return visible(text).casefold()


def check_columns(columns: list[str], where: str, labelled: bool) -> None:
    """Raises UserError for columns that are missing or repeated, and a misspelled `split`; warns of
    others, which are ignored.
    """
    kind = LABELS if LABELS in columns and LABEL not in columns else LABEL
    needed = {PATH: PATH}  # column -> how messages call it
    if labelled:
        needed[kind] = f"{LABEL} (or {LABELS})"
    for column in needed:
        if column not in columns:
            instead = "" if column == PATH else f", {INSTEAD}"
            raise UserError(
                f"CSV file {where} has no column {column!r}, it has "
                f"{', '.join(map(repr, columns)) or 'no line'}: its first line must name the "
                f"columns {', '.join(needed.values())} and, if there are splits, {SPLIT}{instead}"
            )
    twice = [column for column in columns if column and columns.count(column) > 1]
    if twice:
        raise UserError(f"CSV file {where} has the column {twice[0]!r} twice: remove one")
    if labelled and LABEL in columns and LABELS in columns:
        raise UserError(
            f"CSV file {where} has both columns {LABEL!r} and {LABELS!r}: remove one, or rename it"
        )
    others = [column for column in columns if column not in KNOWN]
    similar = difflib.get_close_matches(SPLIT, others, 1, ALIKE)
    if similar and SPLIT not in columns:
        raise UserError(
            f"CSV file {where} has the column {similar[0]!r}, which is not known: call it "
            f"{SPLIT!r}, or, if it is something else, choose a name that is not so similar"
        )
    if others:
        log.warning("CSV file %s: columns %s are ignored", where, ", ".join(map(repr, others)))


def table(where: str) -> Iterator[tuple[int, list[str]]]:
    """(number, cells) of each line that is not empty; of a row over several lines, the last.

    Raises:
      UserError: it is not CSV.
    """
    try:
        text = storage.read(where).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{where} is not a CSV file in UTF-8 ({one_line(error)}): correct it"
        ) from None


def texts_of(row: dict[str, str]) -> list[str]:
    """The labels of an image as they are written."""
    if LABEL in row:
        return [row[LABEL]]
    return [text for text in row[LABELS].split(";") if text.strip()]


def row_of(columns: list[str], cells: list[str], line: str, labelled: bool) -> dict:
    """Text by column, and the list of the labels as `labels`."""
    if len(cells) > len(columns):
        raise UserError(
            f"{line} has {len(cells)} cells for {len(columns)} columns: put a cell that has commas "
            "in quotation marks"
        )
    row = dict(itertools.zip_longest(columns, cells, fillvalue=""))
    if SPLIT in row:
        row[SPLIT] = row[SPLIT].strip()
    needed = (PATH, LABEL, SPLIT) if labelled else (PATH, SPLIT)
    missing = [column for column in needed if row.get(column) == ""]
    if missing:
        raise UserError(f"{line} has no {missing[0]}: add it")
    texts = texts_of(row) if labelled else []
    row[LABELS] = [clean_label(text, line) for text in texts]
    return row


def rows(where: str, labelled: bool) -> tuple[list[int], list[dict]]:
    """(number of the line, row) of every image."""
    lines = table(where)
    columns = [column_name(text) for text in next(lines, (0, []))[1]]
    check_columns(columns, where, labelled)
    numbers = []
    found = []
    for number, cells in lines:
        numbers.append(number)
        found.append(row_of(columns, cells, f"line {number} of CSV file {where}", labelled))
    if not found:
        raise UserError(
            f"CSV file {where} lists no images: add a line for each, below the names of the columns"
        )
    return numbers, found


def check(where: str, numbers: list[int], paths: list[str], root: str) -> None:
    """Raises UserError for images that are listed twice, do not exist, or are folders."""
    first: dict[str, int] = {}
    for number, path in zip(numbers, paths, strict=True):
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
            f"first is {paths[missing[0]]} in line {numbers[missing[0]]}: correct the paths, which "
            "are relative to the folder of the CSV file"
        )
    for number, path, file in zip(numbers, paths, full, strict=True):
        # On a store every image would cost a request.
        if storage.is_local(file) and storage.is_folder(file):
            raise UserError(
                f"line {number} of CSV file {where} names the folder {path}: name an image file"
            )


def scan(where: str, labelled: bool) -> dict[str, np.ndarray]:
    numbers, found = rows(where, labelled)
    paths = [row[PATH] for row in found]
    check(where, numbers, paths, os.path.dirname(where))
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


def load(where: str, labelled: bool = True) -> Listing:
    """Lists the images of a CSV file."""
    where = storage.absolute(where)
    storage.must_exist(where, "CSV file", "correct data.name=csv:PATH")
    if storage.is_folder(where):
        raise UserError(f"{where} is a folder: give the CSV file as data.name=csv:PATH")

    def is_current(arrays) -> bool:
        return tuple(arrays["stamp"]) == storage.stamp(where)

    index = INDEX if labelled else INDEX_WITHOUT_LABELS
    arrays = index_cache.cached(index, where, lambda: scan(where, labelled), is_current)
    paths = index_cache.Strings.of(arrays, "paths")
    texts = index_cache.Strings.of(arrays, "labels")
    names, split = distinct(index_cache.Strings.of(arrays, "splits"))
    check_alike(names, f"CSV file {where}", "splits")
    splits = {name: np.flatnonzero(split == number) for number, name in enumerate(names)}
    if labelled:
        labels, class_names, num_classes = numbered(arrays["counts"], texts, splits, where)
    else:
        labels, class_names, num_classes = unlabelled.numbered(len(paths))
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
