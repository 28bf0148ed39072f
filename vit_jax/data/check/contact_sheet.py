"""Some images of a data set with their classes, in one picture."""

import pathlib
import re
import tempfile

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.data.check import fonts
from vit_jax.data.sources import index_cache
from vit_jax.errors import UserError, one_line, printable

SHOWN = 64  # images
COLUMNS = 8
LINES = 2  # of a caption
LINE_HEIGHT = 13  # pixels
LONGEST_NAME = 200  # bytes of the file name; file systems allow 255


def file_of(folder: str, *parts: str) -> pathlib.Path:
    """The file of a contact sheet; a name that is too long is shortened and gets a hash."""
    stem = re.sub(r"[^\w.-]+", "_", "_".join(parts)).strip("_")
    encoded = stem.encode(errors="replace")
    if len(encoded) > LONGEST_NAME:
        short = encoded[: LONGEST_NAME - 20].decode(errors="ignore")
        stem = f"{short}_{index_cache.digest(stem)[:8]}"
    return pathlib.Path(folder) / f"{stem}.png"


def write_error(folder: str, error: OSError) -> UserError:
    return UserError(
        f"--out={folder} can't be written ({error.strerror or one_line(error)}): choose another "
        "folder"
    )


def must_be_writable(folder: str) -> None:
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise write_error(folder, error) from None


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
    width = side + 4
    height = side + LINES * LINE_HEIGHT
    examples, columns = pictures(batch)
    rows = -(-len(examples) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (image, label, mask) in enumerate(examples):
        x = i % columns * width
        y = i // columns * height
        sheet.paste(Image.fromarray(image).resize((side, side)), (x, y))
        caption = printable(caption_of(label, names)) if mask else "can't be read"
        font = fonts.font_for(caption)
        color = "black" if mask else "red"
        for number, line in enumerate(wrapped(pen, caption, font, side)):
            pen.text((x + 2, y + side + number * LINE_HEIGHT), line, fill=color, font=font)
    try:
        sheet.save(path)
    except OSError as error:
        raise write_error(str(path.parent), error) from None


def caption_of(label: np.ndarray, names) -> str:
    """The classes of one image, which has one label or several."""
    if names is None:
        return ""
    classes = [i for i in np.atleast_1d(label) if i >= 0]
    return ", ".join(str(names[i]) if names else f"class {i}" for i in classes)


def wrapped(pen: ImageDraw.ImageDraw, text: str, font, width: int) -> list[str]:
    """The first lines of a text in lines of at most `width` pixels; ends in ... if it has more."""
    lines = []
    rest = text
    while rest and len(lines) < LINES:
        count = fitting(pen, rest, font, width)
        space = rest.rfind(" ", 0, count + 1)
        if space > 0 and count < len(rest):
            count = space
        lines.append(rest[:count].strip())
        rest = rest[count:].lstrip()
    if rest:
        last = lines[-1]
        lines[-1] = last[: fitting(pen, last, font, width - pen.textlength("...", font))] + "..."
    return lines


def fitting(pen: ImageDraw.ImageDraw, text: str, font, width: float) -> int:
    """How many of the first characters, at least one, are at most `width` pixels wide."""
    count = len(text)
    while count > 1 and pen.textlength(text[:count], font) > width:
        count -= 1
    return count
