"""Contact sheets of images that a model gets wrong, or is least sure of, each beside where the
model looks.
"""

import io
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image

from vit_jax.data import fonts, picture_grid
from vit_jax.data.picture_grid import Caption, Cell
from vit_jax.distributed import sharding
from vit_jax.evaluate.mistakes.records import Records
from vit_jax.evaluate.splits import Split
from vit_jax.figures.attention import attention_bytes, attention_map
from vit_jax.figures.overlay import overlay
from vit_jax.models.classifier import Classifier
from vit_jax.models.intermediates import intermediates

log = logging.getLogger("vit_jax.evaluate")

SHOWN = 24  # images of a sheet
COLUMNS = 4
SIDE = 160  # pixels of the longer side of an image
GAP = 12  # pixels between two of them
INNER_GAP = 2  # pixels between an image and its attention map
QUALITY = 90  # of the JPEG
MOST_ATTENTION = 2**30  # bytes of the attention weights of one image
AT_ONCE = 2**28  # bytes of those of all images of a batch on one device


class Look(NamedTuple):
    """An image, uint8 [H, W, 3], and where the model looks, [h, w] by patch; None: not known."""

    image: np.ndarray
    attention: np.ndarray | None


def make_step(model: Classifier) -> Callable:
    """f(params, batch) -> (image uint8 [batch, H, W, 3], attention map float32 [batch, h, w] or
    None), replicated on all devices.
    """
    has_maps = 0 < attention_bytes(model) <= MOST_ATTENTION

    def step(params, batch):
        image = batch["image"]
        maps = None
        if has_maps:
            found = intermediates(model, params, model.normalize(image))
            maps = sharding.constrain(attention_map(model, found), None, None, None)
        return sharding.constrain(image, *[None] * image.ndim), maps

    return jax.jit(step)


def looks(model: Classifier, params, split: Split, ids: np.ndarray) -> dict[int, Look]:
    """Reads some images again, and computes where the model looks, inside of `jax.set_mesh`.

    Args:
      ids: int [n], of images in the split.

    Returns:
      id -> Look.
    """
    if not len(ids):
        return {}
    needed = attention_bytes(model)
    if needed > MOST_ATTENTION:
        log.warning("no attention maps: those of one image need %.1f GiB", needed / 2**30)
    shards = sharding.batch_shards(jax.sharding.get_abstract_mesh())
    per_device = max(1, min(-(-len(ids) // shards), AT_ONCE // max(needed, 1)))
    step = make_step(model)
    found = []
    for batch in split.chosen(ids, shards * per_device)(model):
        images, maps = jax.device_get(step(params, batch))
        found += zip(images, maps if maps is not None else [None] * len(images), strict=True)
    return {int(i): Look(*look) for i, look in zip(ids, found, strict=False)}  # then padding


def enlarged(image: np.ndarray) -> Image.Image:
    """An image whose longer side has SIDE pixels; small ones keep their pixels visible."""
    picture = Image.fromarray(image)
    scale = SIDE / max(picture.size)
    size = [max(1, round(scale * side)) for side in picture.size]
    how = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC
    return picture.resize(size, how)


def picture_of(look: Look) -> Image.Image:
    """The image, and beside it the same under its attention map."""
    image = enlarged(look.image)
    if look.attention is None:
        return image
    left = image.width + INNER_GAP
    both = Image.new("RGB", (left + image.width, image.height), "white")
    both.paste(image, (0, 0))
    both.paste(Image.fromarray(overlay(np.asarray(image), look.attention)), (left, 0))
    return both


def draw(
    records: Records,
    rows: Sequence[int],
    found: dict[int, Look],
    class_names: Sequence[str],
    describe: Callable[[int], str],
) -> bytes | None:
    """A contact sheet of some images as JPEG: name, true and predicted class, probability; None
    without images.

    Args:
      rows: of the records.
      found: what `looks` returns.
      describe: f(id) -> the name of an image.
    """
    cells = []
    for row in rows:
        picture = picture_of(found[int(records.id[row])])
        name = describe(int(records.id[row]))
        font = fonts.font_for(name)
        labels = [class_names[i] for i in records.label_sets[row] if i >= 0]
        predicted = class_names[records.top[row, 0]]
        color = "green" if records.correct[row] else "firebrick"
        captions = [
            Caption(picture_grid.ending(name, font, picture.width), "dimgrey"),
            Caption(f"true: {', '.join(labels)}"),
            Caption(f"predicted: {predicted}, {records.probability[row, 0]:.1%}", color),
        ]
        cells.append(Cell(picture, captions))
    if not cells:
        return None
    columns = COLUMNS if found[int(records.id[rows[0]])].attention is not None else 2 * COLUMNS
    file = io.BytesIO()
    sheet = picture_grid.draw(cells, min(columns, len(cells)), GAP)
    sheet.save(file, "jpeg", quality=QUALITY)
    return file.getvalue()
