"""A CSV manifest as a data set: one line per image with its path and its label, and its split if
there are some.

With a column `labels` in the place of `label` an image has any number of labels, with semicolons
between them.
"""

import csv
import io
import os

import numpy as np

from vit_jax.data.sources import index_cache, storage
from vit_jax.data.sources.listing import Listing, clean_label, distinct, number_classes
from vit_jax.errors import UserError, one_line

PATH, LABEL, LABELS, SPLIT = "path", "label", "labels", "split"


def rows(where: str) -> list[dict[str, str]]:
    """The lines of a manifest.

    Raises:
      UserError: a column or a value is missing, or a label is too long.
    """
    try:
        reader = csv.DictReader(io.StringIO(storage.read(where).decode("utf-8-sig"), newline=""))
        columns, found = reader.fieldnames or [], list(reader)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"manifest {where} is no CSV file in UTF-8 ({one_line(error)}): correct it"
        ) from None
    kind = LABELS if LABELS in columns and LABEL not in columns else LABEL
    for column in (PATH, kind):
        if column not in columns:
            raise UserError(
                f"manifest {where} has no column {column!r}, it has "
                f"{', '.join(map(repr, columns)) or 'no line'}: its first line must name the "
                f"columns {PATH}, {LABEL} (or {LABELS}) and, if there are splits, {SPLIT}"
            )
    for number, row in enumerate(found, 2):
        if missing := [
            column for column in (PATH, LABEL, SPLIT) if column in columns and not row[column]
        ]:
            raise UserError(f"line {number} of manifest {where} has no {missing[0]}: add it")
        texts = (row[kind] or "").split(";") if kind == LABELS else [row[kind]]
        texts = [text for text in texts if text.strip() or kind == LABEL]
        row[LABELS] = [clean_label(text, f"line {number} of manifest {where}") for text in texts]
    if not found:
        raise UserError(
            f"manifest {where} lists no images: add a line for each, below the names of the columns"
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
                f"manifest {where} lists {path} twice, in lines {first[file]} and {number}: remove "
                "one"
            )
        first[file] = number
    missing = [
        number
        for number, path in enumerate(paths, 2)
        if not storage.exists(os.path.join(root, path))
    ]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(paths)} images in manifest {where} do not exist, the "
            f"first is {paths[missing[0] - 2]} in line {missing[0]}: correct the paths, which are "
            "relative to the manifest's folder"
        )
    for number, path in enumerate(paths, 2):
        if storage.is_folder(os.path.join(root, path)):
            raise UserError(
                f"line {number} of manifest {where} names the folder {path}: name an image file"
            )


def scan(where: str) -> dict[str, np.ndarray]:
    found = rows(where)
    paths = [row[PATH] for row in found]
    check(where, paths, os.path.dirname(where))
    return dict(
        stamp=np.asarray(storage.stamp(where)),
        **index_cache.Strings.pack(paths).arrays("paths"),
        **index_cache.Strings.pack([text for row in found for text in row[LABELS]]).arrays(
            "labels"
        ),
        counts=np.asarray([-1 if LABEL in row else len(row[LABELS]) for row in found], np.int64),
        **index_cache.Strings.pack([row.get(SPLIT) or "train" for row in found]).arrays("splits"),
    )


def numbered(counts: np.ndarray, texts, splits: dict[str, np.ndarray], where: str):
    """Like `number_classes`; where images have `counts` labels each, the labels are int32 [images,
    most of them], -1 behind the last one. `counts` of -1 stand for the only label."""
    if (counts < 0).all():
        return number_classes(texts, splits, where)
    if not counts.any():
        raise UserError(
            f"manifest {where} has no label in its column {LABELS}: add some, with semicolons "
            "between them"
        )
    owner = np.repeat(np.arange(len(counts)), counts)
    parts = {name: np.flatnonzero(np.isin(owner, numbers)) for name, numbers in splits.items()}
    flat, class_names, num_classes = number_classes(texts, parts, where)
    labels = np.full((len(counts), counts.max()), -1, np.int32)
    labels[owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)] = flat
    return labels, class_names, num_classes


def load(where: str) -> Listing:
    """Lists a manifest.

    Raises:
      UserError: it is no file, lacks a column or a value, or names an image twice or one that is no
        file.
    """
    where = storage.absolute(where)
    storage.must_exist(where, "manifest", "correct data.name=csv:PATH")
    if storage.is_folder(where):
        raise UserError(f"manifest {where} is a folder: give the CSV file as data.name=csv:PATH")
    arrays = index_cache.cached(
        "csv",
        where,
        lambda: scan(where),
        lambda arrays: tuple(arrays["stamp"]) == storage.stamp(where),
    )
    paths, texts = index_cache.Strings.of(arrays, "paths"), index_cache.Strings.of(arrays, "labels")
    names, split = distinct(index_cache.Strings.of(arrays, "splits"))
    splits = {name: np.flatnonzero(split == number) for number, name in enumerate(names)}
    labels, class_names, num_classes = numbered(arrays["counts"], texts, splits, where)
    root = os.path.dirname(where)

    def path(i: int) -> str:
        return os.path.join(root, paths[i])

    return Listing(
        class_names=class_names,
        num_classes=num_classes,
        labels=labels,
        splits=splits,
        read=lambda i: storage.read(path(i)),
        describe=lambda i: index_cache.printable(path(i)),
        fingerprint=index_cache.digest(
            paths.bytes,
            paths.ends,
            texts.bytes,
            texts.ends,
            "\n".join(names[i] for i in split.tolist()),
            *([arrays["counts"]] if labels.ndim == 2 else []),
        ),
    )
