"""What a recipe depends on: facts of the data, of the weights, and of the device."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from vit_jax.cli import objects
from vit_jax.config import is_own
from vit_jax.data.sources import catalog, splits, vtab_tasks
from vit_jax.distributed import hardware, runtime
from vit_jax.errors import UserError
from vit_jax.models import create, variants
from vit_jax.weights.formats.weights import Weights
from vit_jax.weights.pretrained import all_names

VAL = ("val", "valid", "validation")
TEST = ("test", "testing")

# Of the memory that is free. The rest is for evaluations and batches that wait, and on a CPU also
# for reading images.
SHARE = 0.9
SHARE_OF_CPU = 0.7


@dataclasses.dataclass(frozen=True)
class Data:
    """The data set; `labels` are those of the split to train on."""

    name: str
    split: str
    labels: np.ndarray
    class_names: tuple[str, ...]  # of all classes
    num_classes: int
    many_labels: bool = False  # an image may have several
    val: str = ""  # the split to hold out; "": none
    num_val: int = 0
    test: str = ""  # the split to report at the end; "": none

    @property
    def counts(self) -> np.ndarray:
        """Images of each class."""
        return self.count(self.labels)

    @property
    def largest(self) -> tuple[str, float]:
        """(class with the most images, its share of them); "" if an image may have several
        labels.
        """
        if self.many_labels:
            return "", 0.0
        counts = self.counts
        number = int(counts.argmax())
        return self.class_names[number], float(counts[number] / counts.sum())

    def count(self, labels: np.ndarray) -> np.ndarray:
        """How often each class occurs; -1 is an image without any."""
        return np.bincount(labels[labels >= 0], minlength=self.num_classes)


@dataclasses.dataclass(frozen=True)
class Start:
    """The weights to start from."""

    path: str
    variant: str
    image_size: int


@dataclasses.dataclass(frozen=True)
class Device:
    """What computes, over all processes."""

    kind: str
    is_cpu: bool
    count: int
    memory: int | None  # bytes that a step may take on each; None: not known
    bfloat16: bool  # is it fast?


def data_set(text: str) -> str:
    """The name of a data set for `data.name`, from what a user types: a folder, a CSV file, a tar
    file, or a name.
    """
    kind = text.partition(":")[0]
    if text.startswith(vtab_tasks.PREFIX):
        raise UserError(
            f"{text} is a task of VTAB, which has a protocol of its own: run vit_jax.vtab, or "
            f"--config=configs/finetune.py:VARIANT,{text}"
        )
    if kind in catalog.LISTED or is_own(text):
        return text
    if objects.is_object(text):
        return f"folder:{text}"
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path):
        return f"folder:{path}"
    if os.path.isfile(path) and path.endswith(".csv"):
        return f"csv:{path}"
    if os.path.isfile(path) and path.endswith(".tar"):
        return f"tars:{path}"
    if os.path.exists(path) or not is_data_set(text):
        raise UserError(
            f"{text} is neither a folder of images, a .csv or .tar file, nor a data set that TFDS "
            "knows: give the folder that has a folder of images for each class"
        )
    return text


def is_data_set(name: str) -> bool:
    if name in catalog.CATALOG:
        return True
    from vit_jax.data.sources import tfds  # takes seconds to import

    return tfds.is_known(name)


def read_data(config) -> Data:
    """Facts of `config.data`. Reads the labels, which may take long for records of TFDS."""
    from vit_jax.data.sources import open as sources

    data = config.data
    source = sources.open_training(data, config.user)
    sizes = sources.split_sizes(data.name, data.data_dir)
    trained = splits.names(data.split, data.name)
    test = first_free(TEST, sizes, trained)
    if data.name in catalog.CATALOG:
        test = catalog.CATALOG[data.name].test
        test = "" if {"all", *splits.names(test, data.name)} & set(trained) else test
    val = first_free([name for name in VAL if name != test], sizes, trained)
    labels = np.asarray(source.labels())
    return Data(
        name=data.name,
        split=data.split,
        labels=labels,
        class_names=all_names(source.class_names, source.num_classes),
        num_classes=source.num_classes,
        many_labels=bool(source.set_size),
        val=val,
        num_val=sizes.get(val, 0),
        test=test,
    )


def first_free(names: Sequence[str], sizes: Mapping[str, int], trained: Sequence[str]) -> str:
    """The first of some names of a split that there is; "" if it is trained on, by any of them."""
    if {"all", *names} & set(trained):
        return ""
    return next((name for name in names if name in sizes), "")


def of_weights(weights: Weights) -> Start:
    fields = create.fields(create.create(**weights.fields))
    size = max(create.pair(fields["image_size"]))
    return Start(weights.path, variants.name_of(fields) or fields["architecture"], size)


def read_device() -> Device:
    device = jax.local_devices()[0]
    is_cpu = hardware.is_cpu()
    memory = (device.memory_stats() or {}).get("bytes_limit")
    if is_cpu:
        memory = runtime.free_memory() // jax.local_device_count()
    if memory:
        memory = int(memory * (SHARE_OF_CPU if is_cpu else SHARE))
    kind = "CPU" if is_cpu else device.device_kind
    return Device(kind, is_cpu, jax.device_count(), memory, hardware.has_fast_bfloat16())
