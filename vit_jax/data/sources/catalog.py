"""Facts about data sets without reading their records, for recipes and dry runs. Needs no
TensorFlow.
"""

import dataclasses

from vit_jax.config import is_own, meanings, uses_labels
from vit_jax.data.sources import csv_file, digits, folder, ignored, own, splits, tars, vtab_tasks
from vit_jax.data.sources.listing import Listing
from vit_jax.data.sources.unlabelled import without_labels
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Entry:
    """Classes, examples by split, and the split that results are reported on."""

    num_classes: int
    examples: dict[str, int]
    test: str


# Counts: the data sets' own pages (TFDS catalog). ImageNet-21k: fall 2011 release with the
# 21,843-way label space of the published heads. jft300m: arXiv 2010.11929 section 4.1 (303M images)
# with the 18,291 classes of arXiv 1707.02968; JFT is not public, its entry is for planning the
# paper's recipes.
CATALOG = {
    "imagenet2012": Entry(1_000, {"train": 1_281_167, "validation": 50_000}, "validation"),
    "imagenet21k": Entry(21_843, {"train": 14_197_122}, "train"),
    "jft300m": Entry(18_291, {"train": 303_000_000}, "train"),
    "imagenet2012_real": Entry(1_000, {"validation": 50_000}, "validation"),
    "imagenet_v2": Entry(1_000, {"test": 10_000}, "test"),
    "imagenet_a": Entry(1_000, {"test": 7_500}, "test"),
    "imagenet_r": Entry(1_000, {"test": 30_000}, "test"),
    "imagenet_sketch": Entry(1_000, {"test": 50_889}, "test"),
    "cifar10": Entry(10, {"train": 50_000, "test": 10_000}, "test"),
    "cifar100": Entry(100, {"train": 50_000, "test": 10_000}, "test"),
    "oxford_iiit_pet": Entry(37, {"train": 3_680, "test": 3_669}, "test"),
    "oxford_flowers102": Entry(102, {"train": 1_020, "validation": 1_020, "test": 6_149}, "test"),
    "digits": Entry(10, {"train": 1_077, "val": 360, "test": 360}, "test"),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the model and the schedule need to know about the training data."""

    num_examples: int
    num_classes: int
    class_names: tuple[str, ...] = ()
    set_size: int = 0  # labels of an example at most, if it may have several; else 0


# Prefix of data.name, before the colon -> how image files are listed.
LISTED = {"folder": folder.load, "tars": tars.load, "csv": csv_file.load}


def listing(name: str, labelled: bool = True) -> Listing | None:
    """The listing of a data set of image files, or None for one that TFDS prepares."""
    kind, _, where = name.partition(":")
    if name == "digits":
        return digits.load() if labelled else without_labels(digits.load())
    if kind not in LISTED:
        return None
    found = LISTED[kind](where, labelled)
    ignored.report(name, found.ignored)
    return found


def mixture_parts(data) -> list[tuple[str, str, float]]:
    """(name, split, weight) of `data.mixture`, whose entries are NAME@SPLIT, or NAME for
    `data.split`.
    """
    parts = []
    for text, weight in data.mixture:
        name, _, split = text.rpartition("@")
        if not name or "/" in split:  # the @ is part of the name, or there is none
            name = text
            split = data.split
        parts.append((name, split, weight))
    return parts


def data_sets(data) -> list[str]:
    """The names of what `config.data` trains on."""
    if data.name == "mixture":
        return [name for name, *_ in mixture_parts(data)]
    return [data.name]


def size_of(
    name: str, split: str, data_dir: str = "", user=None, labelled: bool = True
) -> tuple[int, int, tuple[str, ...]]:
    """(examples, classes, class names) without opening a prepared data set; 0 if not known.

    `data_dir`, `user`: `config.user`: for a data set of the user's own.
    """
    if is_own(name):
        source = own.load(name, split, data_dir, user, labelled)
        return len(source), source.num_classes, tuple(source.class_names)
    if name.startswith(vtab_tasks.PREFIX):
        task = vtab_tasks.vtab(name.removeprefix(vtab_tasks.PREFIX))
        return task.splits.get(split, ("", 0))[1], task.num_classes, ()
    if name in CATALOG:
        parts = {split: range(count) for split, count in CATALOG[name].examples.items()}
        examples = sum(map(len, splits.pieces(split, parts, name)))
        return examples, CATALOG[name].num_classes, ()
    opened = listing(name, labelled)
    if opened is None:
        return 0, 0, ()
    examples = sum(map(len, splits.pieces(split, opened.splits, name)))
    return examples, opened.num_classes, tuple(opened.class_names)


def size_of_mixture(data, user=None, labelled: bool = True) -> tuple[int, int, tuple[str, ...]]:
    """The same for `data.mixture`: classes are united by name if all parts have names."""
    parts = [
        size_of(name, split, data.data_dir, user, labelled)
        for name, split, _ in mixture_parts(data)
    ]
    sizes = [size for size, *_ in parts]
    examples = sum(sizes) if all(sizes) else 0
    names = ()
    if all(own for *_, own in parts):
        names = tuple(dict.fromkeys(name for *_, own in parts for name in own))
    return examples, len(names) or max(classes for _, classes, _ in parts), names


def declared(config) -> Facts:
    """Facts without reading a record: from the config, else the catalog, else a listing."""
    data = config.data
    labelled = uses_labels(config)
    if data.name == "mixture":
        examples, classes, names = size_of_mixture(data, config.user, labelled)
    else:
        parts = (data.name, data.split, data.data_dir, config.user)
        examples, classes, names = size_of(*parts, labelled)
        if data.subset and examples:
            examples = splits.amount(data.subset, examples, data.name)
    examples = data.num_examples or examples
    where = f"{data_name(data)} is not known without the data"
    meant = meanings.data_set_meant(data.name)
    if not labelled:
        if not examples:
            raise UserError(f"the number of examples of {where}: set data.num_examples{meant}")
        return Facts(examples, 0)
    classes = config.model.num_classes or classes
    if not examples or not classes:
        raise UserError(
            f"the number of examples and classes of {where}: set data.num_examples and "
            f"model.num_classes{meant}"
        )
    return Facts(examples, classes, names)


def data_name(data) -> str:
    """What `config.data` trains on, for messages."""
    if data.name == "mixture":
        return " + ".join(f"{weight:g} {name}" for name, weight in data.mixture)
    name = f"{data.name} {data.split}"
    return f"{name}, {data.subset} of it" if data.subset else name


def found(config, source) -> Facts:
    """Facts of an opened source, compared with what the config says."""
    name = data_name(config.data)
    examples = config.data.num_examples
    if examples not in (0, len(source)):
        raise UserError(
            f"config key data.num_examples={examples}, but {name} has {len(source)}: correct it, "
            "or set it to 0"
        )
    if not uses_labels(config):
        return Facts(len(source), 0)
    classes = config.model.num_classes
    if classes and classes < source.num_classes:
        raise UserError(
            f"config key model.num_classes={classes} is less than the {source.num_classes} classes "
            f"of {name}: set it to 0"
        )
    if source.set_size and config.loss == "softmax_xent":
        raise UserError(
            f"images of {name} have several labels each, but loss=softmax_xent takes one: set "
            "sigmoid_xent"
        )
    return Facts(
        len(source),
        classes or source.num_classes,
        tuple(source.class_names),
        source.set_size,
    )
