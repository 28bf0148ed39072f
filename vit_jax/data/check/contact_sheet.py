"""Some images of a data set with their classes, in one picture."""

import pathlib
import re

import numpy as np
from PIL import Image

from vit_jax.cli import out_folder
from vit_jax.data import picture_grid
from vit_jax.data.picture_grid import Caption, Cell
from vit_jax.data.sources import index_cache

SHOWN = 64  # images
COLUMNS = 8
LONGEST_NAME = 200  # bytes of the file name; file systems allow 255


def file_of(folder: str, *parts: str) -> pathlib.Path:
    """The file of a contact sheet; a name that is too long is shortened and gets a hash."""
    stem = re.sub(r"[^\w.-]+", "_", "_".join(parts)).strip("_")
    encoded = stem.encode(errors="replace")
    if len(encoded) > LONGEST_NAME:
        short = encoded[: LONGEST_NAME - 20].decode(errors="ignore")
        stem = f"{short}_{index_cache.digest(stem)[:8]}"
    return pathlib.Path(folder) / f"{stem}.png"


def pictures(batch: dict) -> tuple[list[tuple], int]:
    """((image, label, mask) of all that is drawn, how many are in a row). Of examples with views,
    each of the first has a row for all of them.
    """
    if batch["image"].ndim == 4:
        return list(zip(batch["image"], batch["label"], batch["mask"], strict=True)), COLUMNS
    found = []
    for i in range(min(len(batch["image"]), SHOWN // COLUMNS)):
        views = [*batch["image"][i], *batch.get("local", batch["image"][:, :0])[i]]
        found += [(view, batch["label"][i], batch["mask"][i]) for view in views]
    return found, len(views)


def draw(batch: dict, names, path: pathlib.Path) -> None:
    """Draws the images of a batch with their classes.

    Args:
      names: of the classes, () if they have only numbers; None if there are no classes.

    Raises:
      UserError: the file can't be written.
    """
    side = max(96, min(batch["image"].shape[-3], 160))
    examples, columns = pictures(batch)
    cells = []
    for image, label, mask in examples:
        caption = Caption("can't be read", "red")
        if mask:
            caption = Caption(caption_of(label, names))
        cells.append(Cell(Image.fromarray(image).resize((side, side)), [caption]))
    try:
        picture_grid.draw(cells, columns).save(path)
    except OSError as error:
        raise out_folder.write_error(str(path.parent), error) from None


def caption_of(label: np.ndarray, names) -> str:
    """The classes of one image, which has one label or several."""
    if names is None:
        return ""
    classes = [i for i in np.atleast_1d(label) if i >= 0]
    return ", ".join(str(names[i]) if names else f"class {i}" for i in classes)
