"""Pictures in a page, as data URIs that stay below a size all together."""

import base64
import dataclasses
import io
import warnings
from collections.abc import Sequence

from markupsafe import Markup
from PIL import Image

from vit_jax.report.files import Folder

BUDGET = 1_150_000  # bytes of all pictures of a page, before base64 adds a third
LEAST = 12_000  # bytes of one picture; with less there is nothing to see
KINDS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
# Longest side in pixels and quality of JPEG, from the best on, until a picture is small enough.
STEPS = (
    (1800, 85),
    (1400, 80),
    (1400, 60),
    (1000, 75),
    (1000, 50),
    (700, 60),
    (500, 50),
    (350, 40),
)
MOST_PIXELS = 60_000_000
WIDE = 1_300  # pixels
SMALL = 200  # pixels of the longer side


@dataclasses.dataclass
class Picture:
    """A picture of a workdir; `uri` is None until `Gallery.fill` has read it."""

    folder: Folder
    name: str  # of the file, in the folder
    title: str
    uri: Markup | None = None
    size: tuple[int, int] = (0, 0)  # width and height of the file, in pixels
    note: str = ""

    @property
    def path(self) -> str:
        return self.folder.path_of(self.name)

    @property
    def is_small(self) -> bool:
        """Whether its pixels are to be seen."""
        return max(self.size) < SMALL

    @property
    def is_wide(self) -> bool:
        """Whether it needs the width of the page, such as a contact sheet."""
        return self.size[0] > WIDE


class Gallery:
    """All pictures of a page."""

    def __init__(self):
        self.pictures: list[Picture] = []

    def add(self, folder: Folder, name: str, title: str) -> Picture:
        picture = Picture(folder, name, title)
        self.pictures.append(picture)
        return picture

    def fill(self) -> None:
        """Reads the pictures, and makes the large ones smaller, so that all fit."""
        found = [(picture, picture.folder.read(picture.name)) for picture in self.pictures]
        found = [(picture, content) for picture, content in found if content]
        found = sorted(found, key=lambda pair: len(pair[1]))
        left = BUDGET
        for i, (picture, content) in enumerate(found):
            share = max(left // (len(found) - i), LEAST)
            if share > left:
                picture.note = "left out: the page would become too large"
                continue
            left -= embed(picture, content, share)


def embed(picture: Picture, content: bytes, most: int) -> int:
    """Sets what a page shows; returns how many bytes it is."""
    try:
        kind, shown, picture.size = fitted(content, most)
    except Exception as error:  # of many types, whatever a damaged file leads to
        picture.folder.note(picture.name, error)
        return 0
    if not shown:
        picture.note = "left out: it is too large"
        return 0
    if shown is not content:
        picture.note = "made smaller for this page"
    picture.uri = Markup(f"data:{kind};base64,{base64.b64encode(shown).decode()}")
    return len(shown)


def fitted(content: bytes, most: int) -> tuple[str, bytes, tuple[int, int]]:
    """(type, content, size in pixels) of a picture of at most so many bytes; the content itself if
    it is small enough, empty if that is not possible.

    Raises:
      Exception: of many types; it is not a picture, or damaged.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(content), formats=list(KINDS))
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels")
    kind = KINDS[image.format]
    image.load()
    if len(content) <= most:
        return kind, content, image.size
    return KINDS["JPEG"], smaller(on_white(image), most), image.size


def on_white(image: Image.Image) -> Image.Image:
    """In RGB; what is transparent becomes white."""
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def smaller(image: Image.Image, most: int) -> bytes:
    """As a JPEG of at most so many bytes; empty if that is not possible."""
    for side, quality in STEPS:
        copy = image.copy()
        copy.thumbnail((side, side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        copy.save(file, "jpeg", quality=quality, optimize=True)
        if file.tell() <= most:
            return file.getvalue()
    return b""


def files_of(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(ENDINGS)]
