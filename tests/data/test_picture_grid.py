"""Captions of contact sheets fit below their pictures."""

import pytest
from PIL import Image

from vit_jax.data import fonts, picture_grid
from vit_jax.data.picture_grid import Caption, Cell

TEXTS = ["short.jpg", "many words " * 20, "/folder" * 40 + "/last.jpg", "中国" * 60]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [30, 160])
def test_captions_are_shortened_to_the_width(text, width):
    font = fonts.font_for(text)
    lines = picture_grid.wrapped(text, font, width)
    assert 1 <= len(lines) <= picture_grid.LINES
    assert all(font.getlength(line) <= width for line in lines)
    end = picture_grid.ending(text, font, width)
    assert font.getlength(end) <= width and text.endswith(end.removeprefix("..."))
    is_whole = font.getlength(text) <= width
    assert (end == text) == is_whole and end.startswith("...") != is_whole


def test_pictures_are_in_rows_above_their_captions():
    cells = [Cell(Image.new("RGB", (20, 10), (i, 0, 0)), [Caption(f"{i}")]) for i in range(5)]
    sheet = picture_grid.draw(cells, 2, gap=3)
    height = 10 + picture_grid.LINE_HEIGHT + 3
    assert sheet.size == (2 * 23, 3 * height)
    for i in range(5):
        assert sheet.getpixel((i % 2 * 23 + 19, i // 2 * height + 9)) == (i, 0, 0)
    assert sheet.getpixel((45, 3 * height - 1)) == (255, 255, 255)  # the sixth cell is empty
