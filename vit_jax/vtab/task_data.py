"""The images of a task as the suite uses them: a training set in memory, and batches of the other
parts.
"""

import dataclasses
from collections.abc import Iterator

import ml_collections
import numpy as np

from vit_jax.data.sources import vtab_tasks
from vit_jax.distributed import sharding
from vit_jax.errors import NegativeResult, UserError

DECODE = 100  # images decoded at a time
EXAMPLES = 1_000
CHOOSING = 800  # of them, the first ones train where a setting is chosen


@dataclasses.dataclass(frozen=True)
class TrainingSet:
    """Decoded images uint8 [N, s, s, 3] and labels int32 [N] of train800val200; `choosing` of them
    are of train800.
    """

    image: np.ndarray
    label: np.ndarray
    choosing: int


class Missing(NegativeResult):
    """The data of a task are not there."""


def locate(name: str, config):
    """The `data.sources.vtab.Found` of a task; where it is not there and the config allows it, of
    made-up data.
    """
    from vit_jax.data.sources import vtab as vtab_source

    task, data_dir = vtab_tasks.vtab(name), config.data.data_dir
    found = vtab_source.find(task, data_dir)
    if found.state in ("missing", "manual") and config.vtab.generated:
        made_up = vtab_source.find(task, vtab_source.generated_dir(data_dir))
        return made_up if made_up.state == "ready" else found
    return found


def find(name: str, config):
    """Like `locate`.

    Raises:
      Missing: they are not there.
      UserError: they are not as they must be.
    """
    found = locate(name, config)
    if found.state in ("missing", "manual"):
        raise Missing(f"its data are {found.detail}: see `python -m vit_jax.vtab check`")
    if found.state != "ready":
        raise UserError(
            f"its data have {found.state} ({found.detail}): see `python -m vit_jax.vtab check`"
        )
    return found


def training_set(name: str, found, config, size: int) -> TrainingSet:
    """Decodes train800val200, resized to `size`.

    Raises:
      UserError: an image can't be read, and data.on_corrupt is "error"; or fewer than half of them
        can.
    """
    from vit_jax.data import pipeline
    from vit_jax.data.sources import vtab as vtab_source

    source = vtab_source.open_part(name, vtab_tasks.vtab(name), found, "train800val200")
    whole = ml_collections.ConfigDict(dict(crop="resize", method=""))
    common = (size, config.data.on_corrupt, config.data.threads)
    host = pipeline.eval_pipeline(whole, source, np.arange(DECODE), DECODE, *common)
    batches = list(host.batches())
    image, label, mask = (
        np.concatenate([batch[key] for batch in batches]) for key in ("image", "label", "mask")
    )
    good = mask > 0
    if (choosing := int(good[:CHOOSING].sum())) < EXAMPLES // 2:
        raise UserError(
            f"only {choosing} of the first {CHOOSING} training images can be read: look at the data"
        )
    return TrainingSet(image[good], label[good], choosing)


def batches_of(name: str, found, part: str, config, mesh) -> tuple[int, Iterator[dict]]:
    """(number of examples, their batches on the mesh) of val200 or test, as
    `config.evals.test.data` says.
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
    common = (config.image_size, config.data.on_corrupt, config.data.threads)
    host = pipeline.eval_pipeline(data, opened, rows, size, *common)
    return len(opened), to_device.to_device(host.batches(), mesh, rows, size, config.data.prefetch)
