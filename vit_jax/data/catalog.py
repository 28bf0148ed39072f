"""What is known of public data sets without reading them, for recipes and dry runs. Needs no TensorFlow."""

import dataclasses

import numpy as np

from vit_jax.data import folder, splits
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Entry:
    """Classes, examples by split, and the split that results are reported on."""

    num_classes: int
    examples: dict[str, int]
    test: str


# Counts: the data sets' own pages (TFDS catalog). ImageNet-21k: fall 2011 release with the 21,843-way label space of
# the published heads. jft300m: arXiv 2010.11929 section 4.1 (303M images) with the 18,291 classes of arXiv 1707.02968;
# JFT is not public, its entry lets the paper's recipes be planned and priced.
CATALOG = {
    "imagenet2012": Entry(1_000, {"train": 1_281_167, "validation": 50_000}, "validation"),
    "imagenet21k": Entry(21_843, {"train": 14_197_122}, "train"),
    "jft300m": Entry(18_291, {"train": 303_000_000}, "train"),
    "cifar10": Entry(10, {"train": 50_000, "test": 10_000}, "test"),
    "cifar100": Entry(100, {"train": 50_000, "test": 10_000}, "test"),
    "oxford_iiit_pet": Entry(37, {"train": 3_680, "test": 3_669}, "test"),
    "oxford_flowers102": Entry(102, {"train": 1_020, "validation": 1_020, "test": 6_149}, "test"),
    "digits": Entry(10, {"train": 1_077, "val": 360, "test": 360}, "test"),
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the model and the schedule need to know of the training data."""

    num_examples: int
    num_classes: int
    class_names: tuple[str, ...] = ()


def declared(config) -> Facts:
    """Facts without reading a record: from the config, else from the catalog, else from the listing of a folder.

    Raises:
      UserError: none of them knows.
    """
    if config.data.name.startswith("folder:"):
        root = config.data.name.removeprefix("folder:")
        names, _, _, parts = folder.load(root)
        examples = len(splits.select(config.data.split, parts, root))
        return Facts(examples, config.model.num_classes or len(names), tuple(names))
    known = CATALOG.get(config.data.name)
    examples = config.data.num_examples
    if known and not examples:
        parts = {name: np.arange(count) for name, count in known.examples.items()}
        examples = len(splits.select(config.data.split, parts, config.data.name))
    classes = config.model.num_classes or (known.num_classes if known else 0)
    if not examples or not classes:
        raise UserError(
            f"the number of examples and classes of {config.data.name} {config.data.split} is not known without the "
            "data: set data.num_examples and model.num_classes"
        )
    return Facts(examples, classes)


def found(config, source) -> Facts:
    """Facts of an opened source, compared with what the config says.

    Raises:
      UserError: they disagree.
    """
    name, examples, classes = (
        f"{config.data.name} {config.data.split}",
        config.data.num_examples,
        config.model.num_classes,
    )
    if examples not in (0, source.num_examples):
        raise UserError(
            f"config key data.num_examples={examples}, but {name} has {source.num_examples}: correct it, or set it to 0"
        )
    if classes and classes < source.num_classes:
        raise UserError(
            f"config key model.num_classes={classes} is less than the {source.num_classes} classes of {name}: "
            "set it to 0"
        )
    return Facts(source.num_examples, classes or source.num_classes, tuple(source.class_names))
