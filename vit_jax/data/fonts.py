"""Fonts for captions: of those on this machine, one that has the characters."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator

from PIL import ImageFont

SIZE = 11  # pixels


def candidates() -> Iterator[str]:
    """Paths of fonts: Matplotlib's DejaVu, IPA's for Chinese and Japanese, then the system's."""
    import matplotlib  # takes a tenth of the start of `vit_jax.train`

    yield os.path.join(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    package = importlib.util.find_spec("matplotlib_fontja")
    if package:
        yield os.path.join(package.submodule_search_locations[0], "fonts/ipaexg.ttf")
    from matplotlib import font_manager  # makes a list of all fonts, which takes a while

    yield from sorted(font_manager.findSystemFonts())


@functools.cache
def characters(path: str) -> frozenset[int]:
    """The code points that a font has; none if it can't be used."""
    from matplotlib.ft2font import FT2Font

    with contextlib.suppress(Exception):  # damaged fonts, and those of other kinds
        ImageFont.truetype(path, SIZE)
        return frozenset(FT2Font(path).get_charmap())
    return frozenset()


def coverage(path: str, text: str) -> int:
    """How many of the characters of a text a font has."""
    return sum(ord(c) in characters(path) for c in text)


@functools.cache
def font_for(text: str) -> ImageFont.FreeTypeFont:
    """The first font that has all characters, or as many as any."""
    needed = "".join(sorted(set(text) - set(" \n")))
    best = ""
    for path in candidates():
        if not best or coverage(path, needed) > coverage(best, needed):
            best = path
        if coverage(best, needed) == len(needed):
            break
    return ImageFont.truetype(best, SIZE)
