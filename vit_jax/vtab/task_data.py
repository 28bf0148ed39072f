"""The images of a task as the suite uses them: the training set in memory, and batches of the other
parts.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import ml_collections
import numpy as np

from vit_jax.data.sources import vtab_tasks
from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult, UserError
from vit_jax.models.classifier import Classifier

DECODE = 100  # images decoded at a time
EXAMPLES = 1_000  # of train800val200
TRAIN800 = 800  # the first ones of them


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """The decoded images of train800val200, uint8 [N, s, s, 3], and labels, int32 [N]; the first
    `num_train800` are of train800.
    """

    image: np.ndarray
    label: np.ndarray
    num_train800: int


class Missing(NegativeResult):
    """The data of a task are not there."""


def locate(name: str, config):
    """The `data.sources.vtab.Found` of a task."""
    from vit_jax.data.sources import vtab as vtab_source

    return vtab_source.find(vtab_tasks.vtab(name), config.data.data_dir)


def find(name: str, config):
    """Like `locate`, but for data that must be ready.

    Raises:
      Missing: the data are not there.
      UserError: they differ from the table, or can't be opened.
    """
    found = locate(name, config)
    if found.state in ("missing", "manual"):
        raise Missing(f"its data are {found.detail}: see `python -m vit_jax.vtab check`")
    if found.state != "ready":
        raise UserError(
            f"its data can't be used, {found.state} ({found.detail}): see `python -m vit_jax.vtab "
            "check`"
        )
    return found


def must_have_some(names: Sequence[str], config) -> None:
    """Raises Missing if the data of none of the tasks are there."""
    for name in names:
        try:
            find(name, config)
        except Missing:
            continue
        except UserError:  # `Suite.run` reports it
            return
        return
    raise Missing(
        f"the data of none of the {len(names)} tasks are there, such as {names[0]}: `python -m "
        "vit_jax.vtab check` says where they are looked for, and `prepare` downloads what it can"
    )


def training_set(name: str, found, config, size: int, model: Classifier) -> TrainingSet:
    """Decodes train800val200 and resizes it to `size` pixels, as at evaluation. With
    data.on_corrupt="skip" images that can't be read are left out, unless too few remain.
    """
    from vit_jax.data import pipeline
    from vit_jax.data.sources import vtab as vtab_source

    source = vtab_source.open_part(name, vtab_tasks.vtab(name), found, "train800val200")
    method = config.evals.test.data.method
    resize = ml_collections.ConfigDict(dict(crop="resize", method=method))
    common = (size, config.data.on_corrupt, config.data.threads, model)
    host = pipeline.eval_pipeline(resize, source, np.arange(DECODE), DECODE, *common)
    batches = list(host.batches())
    image, label, mask = (
        np.concatenate([batch[key] for batch in batches]) for key in ("image", "label", "mask")
    )
    readable = mask > 0
    num_train800 = int(readable[:TRAIN800].sum())
    if num_train800 < EXAMPLES // 2:
        raise UserError(
            f"only {num_train800} of the first {TRAIN800} training images can be read: check the "
            "data set"
        )
    return TrainingSet(image[readable], label[readable], num_train800)


def batches_of(
    name: str, found, part: str, config, mesh, model: Classifier
) -> tuple[int, Iterator[dict]]:
    """(number of examples, batches on the mesh) of val200 or test, as `config.evals.test.data`
    says, and otherwise the model expects.
    """
    from vit_jax.data import pipeline, to_device
    from vit_jax.data.sources import source
    from vit_jax.data.sources import vtab as vtab_source

    data = config.evals.test.data
    opened = vtab_source.open_part(name, vtab_tasks.vtab(name), found, part)
    if part == "test" and 0 < config.vtab.max_test_examples < len(opened):
        opened = source.Subset(opened, np.arange(config.vtab.max_test_examples))
    size = data.batch_size or config.data.batch_size
    rows = sharding.local_rows(mesh, size)
    common = (config.image_size, config.data.on_corrupt, config.data.threads, model)
    host = pipeline.eval_pipeline(data, opened, rows, size, *common)
    batches = to_device.to_device(host.batches(), mesh, rows, size, config.data.prefetch)
    return len(opened), batches
