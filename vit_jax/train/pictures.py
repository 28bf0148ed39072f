"""Pictures of what an objective predicts, always of the same images: the first ones that a run
trains on.
"""

import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import cli
from vit_jax.cli.spool import Files
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.distributed import sharding
from vit_jax.errors import one_line
from vit_jax.figures.overlay import magnified
from vit_jax.train import metrics, run_data
from vit_jax.train.experiment import Experiment

log = logging.getLogger("vit_jax.train")

SHOWN = 8  # images
GAP = 2  # white pixels between two pictures


def make_draw(experiment: Experiment):
    """f(params, uint8 batch) -> the pictures of `Objective.pictures`, uint8 [batch, H, W, 3] each,
    on all devices.
    """
    config = experiment.config
    model = experiment.model
    preprocess = make_preprocess(config, model.normalize, model.num_classes)

    def draw(params, batch) -> list:
        key = jax.random.key(config.seed, impl=config.prng)
        found = experiment.objective.pictures(params, preprocess(batch, key))
        return [jnp.round(255 * jnp.clip(x, 0, 1)).astype(jnp.uint8) for x in found]

    return jax.jit(draw, out_shardings=sharding.replicated(experiment.mesh))


def side_by_side(kinds: list[np.ndarray]) -> np.ndarray:
    """Kinds of pictures of the same images, uint8 [n, H, W, 3] each -> [n, H, W of all, 3]."""
    columns = []
    for pictures in map(magnified, kinds):
        columns += [pictures, np.full((*pictures.shape[:2], GAP, 3), 255, np.uint8)]
    return np.concatenate(columns[:-1], axis=2)


def png(rows: np.ndarray) -> bytes:
    """One image of all rows, uint8 [n, H, W, 3]."""
    sheet = np.pad(rows, ((0, 0), (0, GAP), (0, 0), (0, 0)), constant_values=255)
    file = io.BytesIO()
    Image.fromarray(sheet.reshape(-1, *sheet.shape[2:])[:-GAP]).save(file, "png")
    return file.getvalue()


class Pictures:
    """Those of the first images that a run trains on."""

    def __init__(self, experiment: Experiment, source, files: Files):
        self.experiment = experiment
        self.files = files
        self.batch = run_data.first_rows(experiment, source, SHOWN)
        self.draw = make_draw(experiment)

    def write(self, number: int, params, writer: metrics.MetricWriter) -> None:
        """Draws them for the parameters after `number` updates, into TensorBoard and
        WORKDIR/pictures.
        """
        kinds = jax.device_get(self.draw(params, self.batch))
        if jax.process_index() != 0:
            return
        rows = side_by_side([pictures[:SHOWN] for pictures in kinds])
        writer.write_pictures(number, ", ".join(self.experiment.objective.draws), rows)
        try:
            cli.replace_file(self.files.path(f"pictures/{number}.png"), png(rows))
        except OSError as error:
            log.warning("pictures/%d.png can't be written (%s)", number, one_line(error)[:160])


def make_pictures(experiment: Experiment, source, files: Files) -> Pictures | None:
    """None if the config wants none."""
    return Pictures(experiment, source, files) if experiment.config.pictures_every else None
