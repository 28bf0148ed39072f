"""A folder of photos as it comes from phones, cameras, Macs and years: made by code."""

import io
import os
import pathlib
import zlib

import numpy as np
import pillow_heif
from PIL import Image
from sklearn import datasets

pillow_heif.register_heif_opener()
WIDTH, HEIGHT = 96, 64
LONG = "l" * 176 + ".jpg"
NOT_UTF8 = os.fsdecode(b"\xe9t\xe9.png")
# Files that are images and can be decoded, by their class.
NUM_GOOD = {"owl": 20, "jay": 9}


def photos(count: int, seed: int = 0, width: int = WIDTH, height: int = HEIGHT):
    """Pieces of two photographs, all different, as Pillow images."""
    rng = np.random.default_rng(seed)
    whole = [Image.fromarray(image) for image in datasets.load_sample_images().images]
    for i in range(count):
        x, y = (int(rng.integers(0, side)) for side in (320, 180))
        yield whole[i % 2].crop((x, y, x + 300, y + 200)).resize((width, height))


def encoded(image: Image.Image, kind: str, orientation: int = 0, **options) -> bytes:
    """An image file; `orientation`: of EXIF, 0 for none."""
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][274] = orientation
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def sixteen_bits(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def good_owls(pictures) -> dict[str, bytes]:
    """Every format, orientation and kind of name."""
    files = {
        "heic.HEIC": encoded(next(pictures), "HEIF", quality=90),
        "avif.avif": encoded(next(pictures), "AVIF", quality=90),
        "tiff.tif": encoded(next(pictures), "TIFF"),
        "webp.webp": encoded(next(pictures), "WEBP"),
        "cmyk.jpg": encoded(next(pictures).convert("CMYK"), "JPEG"),
        "16.png": encoded(sixteen_bits(next(pictures)), "PNG"),
        "16.TIFF": encoded(sixteen_bits(next(pictures)), "TIFF"),
        'it\'s "quoted".jpg': encoded(next(pictures), "JPEG"),
        "\U0001f989.png": encoded(next(pictures), "PNG"),
        "two\nlines.bmp": encoded(next(pictures), "BMP"),
        LONG: encoded(next(pictures), "JPEG"),
        NOT_UTF8: encoded(next(pictures), "PNG"),
    }
    turned = {f"exif{i}.jpg": encoded(next(pictures), "JPEG", i) for i in range(1, 9)}
    return files | turned


def write(files: dict[str, bytes], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def make(root: pathlib.Path) -> pathlib.Path:
    """Writes the folder: 20 good owls, 9 good jays (one a link, one with a wrong suffix), 5 files
    that are no images in spite of their names, and 12 other files.
    """
    pictures = photos(60)
    write(good_owls(pictures), root / "owl")
    jays = {f"{i}.jpg": encoded(next(pictures), "JPEG") for i in range(7)}
    jays["png.jpg"] = encoded(next(pictures), "PNG")
    whole = encoded(next(pictures), "JPEG")
    jays |= {
        "empty.jpg": b"",
        "cut.jpg": whole[: len(whole) // 2],
        "text.png": b"not an image",
        "float.tif": encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
        "huge.png": whole_png_of(30_000, 30_000),
    }
    write(jays, root / "jay")
    elsewhere = root.with_name(root.name + "_elsewhere")
    write({"linked.jpg": encoded(next(pictures), "JPEG")}, elsewhere)
    (root / "jay/linked.jpg").symlink_to(elsewhere / "linked.jpg")
    write({"._0.jpg": b"\0\5\x16\7", ".DS_Store": b"x", "clip.mov": b"x"}, root / "jay")
    write({"CLIP.MOV": b"x", "notes": b"x", "sidecar.xmp": b"x"}, root / "owl")
    write({"._1.jpg": b"x", "2.jpg": b"x"}, root / "__MACOSX/jay")
    write({"cover.jpg": encoded(next(pictures), "JPEG")}, root)
    write({"thumb.jpg": b"x"}, root / ".thumbnails")
    (root / "owl/gone.jpg").symlink_to(elsewhere / "nothing.jpg")
    (root / "owl/loop").symlink_to(root)
    return root


def whole_png_of(width: int, height: int) -> bytes:
    """A PNG that declares more pixels than it has."""
    content = bytearray(encoded(Image.new("RGB", (8, 8)), "PNG"))
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)
