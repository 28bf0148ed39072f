"""Pictures with captions in a grid: contact sheets."""

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw

from vit_jax.data import fonts
from vit_jax.errors import printable

LINES = 2  # of a caption, at most
LINE_HEIGHT = 13  # pixels
GAP = 4  # pixels between two columns


class Caption(NamedTuple):
    """A text below a picture; it takes up to LINES lines."""

    text: str
    color: str = "black"


class Cell(NamedTuple):
    """A picture and what is written below it."""

    picture: Image.Image
    captions: Sequence[Caption]


def draw(cells: Sequence[Cell], columns: int, gap: int = GAP) -> Image.Image:
    """The cells in rows of `columns`, each as large as the largest picture needs; `gap`: pixels
    between them.
    """
    width = max(cell.picture.width for cell in cells)
    height = max(cell.picture.height for cell in cells)
    texts = [lines_of(cell.captions, width) for cell in cells]
    row_height = height + LINE_HEIGHT * max(map(len, texts)) + gap
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * (width + gap), rows * row_height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (cell, lines) in enumerate(zip(cells, texts, strict=True)):
        x = i % columns * (width + gap)
        y = i // columns * row_height
        sheet.paste(cell.picture, (x, y))
        for number, line in enumerate(lines):
            top = y + height + number * LINE_HEIGHT
            pen.text((x + 2, top), line.text, fill=line.color, font=fonts.font_for(line.text))
    return sheet


def lines_of(captions: Sequence[Caption], width: int) -> list[Caption]:
    """Captions as lines of at most `width` pixels."""
    found = []
    for caption in captions:
        text = printable(caption.text, kept="")
        lines = wrapped(text, fonts.font_for(text), width)
        found += [Caption(line, caption.color) for line in lines]
    return found


def wrapped(text: str, font, width: int) -> list[str]:
    """The first lines of a text in lines of at most `width` pixels; ends in ... if it has more."""
    lines = []
    rest = text
    while rest and len(lines) < LINES:
        count = fitting(rest, font, width)
        space = rest.rfind(" ", 0, count + 1)
        if space > 0 and count < len(rest):
            count = space
        lines.append(rest[:count].strip())
        rest = rest[count:].lstrip()
    if rest:
        last = lines[-1]
        lines[-1] = last[: fitting(last, font, width - font.getlength("..."))] + "..."
    return lines


def fitting(text: str, font, width: float) -> int:
    """How many of the first characters, at least one, are at most `width` pixels wide."""
    count = len(text)
    while count > 1 and font.getlength(text[:count]) > width:
        count -= 1
    return count


def ending(text: str, font, width: float) -> str:
    """The end of a text that is at most `width` pixels wide, with ... before it if it has more."""
    if font.getlength(text) <= width:
        return text
    count = fitting(text[::-1], font, width - font.getlength("..."))
    return "..." + text[-count:]
