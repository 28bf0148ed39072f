"""Pictures of a run, always of the same images, the first ones that it trains on: how training sees
them, where the model looks, and what the objective predicts of them.
"""

import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import cli
from vit_jax.cli.spool import Files
from vit_jax.data import picture_grid
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.data.picture_grid import Cell
from vit_jax.distributed import sharding
from vit_jax.errors import one_line
from vit_jax.figures.attention import attention_bytes, attention_map
from vit_jax.figures.overlay import magnified, overlay
from vit_jax.models.intermediates import intermediates
from vit_jax.train import metrics, run_data
from vit_jax.train.experiment import Experiment

log = logging.getLogger("vit_jax.train")

SHOWN = 8  # images
GAP = 2  # white pixels between two pictures
MOST_ATTENTION = 2**31  # bytes of the attention weights that a device computes for them
SHEET_WIDTH = 800  # pixels that the rows of a sheet fill, if they are not wider each


def as_pixels(x):
    """0 to 1 -> uint8."""
    return jnp.round(255 * jnp.clip(x, 0, 1)).astype(jnp.uint8)


def make_prepare(experiment: Experiment):
    """f(uint8 batch) -> the batch as the objective gets it."""
    config = experiment.config
    model = experiment.model
    preprocess = make_preprocess(config, model.normalize, model.num_classes)
    key = jax.random.key(config.seed, impl=config.prng)
    return lambda batch: preprocess(batch, key)


def make_draw_inputs(experiment: Experiment):
    """f(uint8 batch) -> augmented images, uint8 [batch, H, W, 3], on all devices; those of each
    view, if there are several.
    """
    prepare = make_prepare(experiment)

    def draw(batch) -> list:
        ready = prepare(batch)
        views = [ready[name] for name in ("image", "local") if name in ready]
        if views[0].ndim == 5:  # [batch, views, H, W, 3]
            views = [view for group in views for view in jnp.moveaxis(group, 1, 0)]
        return [as_pixels(experiment.model.denormalize(view)) for view in views]

    return jax.jit(draw, out_shardings=sharding.replicated(experiment.mesh))


def draws_attention(experiment: Experiment) -> bool:
    """Whether the model has attention, and its weights for the images fit in memory."""
    rows = -(-SHOWN // sharding.batch_shards(experiment.mesh))
    needed = rows * attention_bytes(experiment.model)
    if needed > MOST_ATTENTION:
        log.warning(
            "no pictures of attention: its weights for %d images would need %.1f GiB",
            *(SHOWN, needed / 2**30),
        )
    return 0 < needed <= MOST_ATTENTION


def make_draw(experiment: Experiment):
    """f(params, uint8 batch) -> (the pictures of `Objective.pictures`, uint8 [batch, H, W, 3] each;
    attention to each patch of the first view, float32 [batch, h, w], None without attention), on
    all devices.
    """
    model = experiment.model
    objective = experiment.objective
    prepare = make_prepare(experiment)
    has_attention = draws_attention(experiment)

    def attention(params, image):
        if not has_attention:
            return None
        image = image if image.ndim == 4 else image[:, 0]
        return attention_map(model, intermediates(model, objective.of_model(params), image))

    def draw(params, batch) -> tuple:
        ready = prepare(batch)
        found = objective.pictures(params, ready) if objective.draws else ()
        return [as_pixels(x) for x in found], attention(params, ready["image"])

    return jax.jit(draw, out_shardings=sharding.replicated(experiment.mesh))


def side_by_side(kinds: list[np.ndarray]) -> np.ndarray:
    """Kinds of pictures of the same images, uint8 [n, H, W, 3] each -> [n, largest H, W of all,
    3].
    """
    kinds = [magnified(pictures) for pictures in kinds]
    height = max(pictures.shape[1] for pictures in kinds)
    columns = []
    for pictures in kinds:
        below = height - pictures.shape[1]
        margins = ((0, 0), (0, below), (0, GAP), (0, 0))
        columns.append(np.pad(pictures, margins, constant_values=255))
    return np.concatenate(columns, axis=2)[:, :, :-GAP]


def png(pictures: np.ndarray) -> bytes:
    """One image of all pictures, uint8 [n, H, W, 3], in rows from left to right."""
    columns = max(1, SHEET_WIDTH // pictures.shape[2])
    cells = [Cell(Image.fromarray(picture), ()) for picture in pictures]
    file = io.BytesIO()
    picture_grid.draw(cells, min(columns, len(cells)), GAP).save(file, "png")
    return file.getvalue()


class Pictures:
    """Those of the first images that a run trains on."""

    def __init__(self, experiment: Experiment, source, files: Files):
        self.experiment = experiment
        self.files = files
        self.batch = run_data.first_rows(experiment, source, SHOWN)
        self.draw_inputs = make_draw_inputs(experiment)
        self.draw = make_draw(experiment)

    def write_inputs(self, number: int, writer: metrics.MetricWriter) -> None:
        """Draws how training sees the images, at a start after `number` updates."""
        views = jax.device_get(self.draw_inputs(self.batch))
        self.publish(f"{number}_inputs", number, "inputs", views, writer)

    def write(self, number: int, params, writer: metrics.MetricWriter) -> None:
        """Draws them for the parameters after `number` updates, into TensorBoard and
        WORKDIR/pictures.
        """
        kinds, attention = jax.device_get(self.draw(params, self.batch))
        if kinds:
            name = ", ".join(self.experiment.objective.draws)
            self.publish(str(number), number, name, kinds, writer)
        if attention is not None:
            images = jax.device_get(self.draw_inputs(self.batch))[0]
            looks = np.stack([overlay(*pair) for pair in zip(images, attention, strict=True)])
            self.publish(f"{number}_attention", number, "attention", [images, looks], writer)

    def publish(
        self, stem: str, number: int, name: str, kinds: list, writer: metrics.MetricWriter
    ) -> None:
        """Writes kinds of pictures, uint8 [batch, H, W, 3] each, side by side; process 0 does it
        for all.
        """
        if jax.process_index() != 0:
            return
        rows = side_by_side([pictures[:SHOWN] for pictures in kinds])
        writer.write_pictures(number, name, rows)
        try:
            cli.replace_file(self.files.path(f"pictures/{stem}.png"), png(rows))
        except OSError as error:
            log.warning("pictures/%s.png can't be written (%s)", stem, one_line(error)[:160])


def make_pictures(experiment: Experiment, source, files: Files) -> Pictures | None:
    """None if the config wants none."""
    return Pictures(experiment, source, files) if experiment.config.pictures_every else None
