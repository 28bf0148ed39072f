"""Image files of every format, and EXIF orientation, against Pillow's pixels."""

import io
import struct
import sys
import zlib

import nasty
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps
from test_pipeline import SIDE, eval_config, train, train_config

from vit_jax.data import exif, images, pillow, pipeline
from vit_jax.data.sources import source as sources
from vit_jax.data.sources.listing import InMemory
from vit_jax.models import create

ORIENTATIONS = range(1, 9)
LOSSLESS = {
    "PNG": {},
    "WEBP": dict(lossless=True),
    "TIFF": {},
    "AVIF": {},
    "HEIF": dict(quality=90),
    "BMP": {},
}


def compiled():
    return tf.function(
        lambda encoded: images.decode(encoded, rotates=True),
        input_signature=[tf.TensorSpec([], tf.string)],
    )


turn = compiled()


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """A smooth picture without any symmetry."""
    return next(nasty.photos(1, width=90, height=70))


def by_pillow(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def listing(files: list[bytes]) -> InMemory:
    return InMemory(
        name="picture",
        files=files,
        all_labels=np.arange(len(files)),
        splits={},
        class_names=[str(i) for i in range(len(files))],
        num_classes=len(files),
        fingerprint="",
    )


@pytest.mark.parametrize("kind", LOSSLESS)
def test_formats_are_decoded_and_turned_as_by_pillow(kind, picture):
    for orientation in (0, *(ORIENTATIONS if kind != "BMP" else ())):
        encoded = nasty.encoded(picture, kind, orientation, **LOSSLESS[kind])
        np.testing.assert_array_equal(turn(encoded), by_pillow(encoded))
        assert images.shape_of(encoded, True)[:2].numpy().tolist() == list(
            by_pillow(encoded).shape[:2]
        )
        np.testing.assert_array_equal(pillow.decode(encoded, rotates=True), by_pillow(encoded))


def test_heic_is_turned_once(picture):
    """By libheif, whose result is as wide as the stored image is high."""
    encoded = nasty.encoded(picture, "HEIF", 6, quality=95)
    assert images.decode(encoded).shape == images.decode(encoded, rotates=True).shape
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.info["original_orientation"] == 6
        assert images.decode(encoded).shape[:2] == image.size[::-1]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_modes_of_tiff(mode, picture):
    for options in ({}, dict(compression="tiff_lzw")):
        encoded = nasty.encoded(picture.convert(mode), "TIFF", **options)
        np.testing.assert_array_equal(images.decode(encoded), by_pillow(encoded))


def test_sixteen_bits_are_their_upper_byte(picture):
    wanted = np.asarray(picture.convert("L"))
    for kind in ("PNG", "TIFF"):
        encoded = nasty.encoded(nasty.sixteen_bits(picture), kind)
        found = images.decode(encoded).numpy()
        np.testing.assert_array_equal(found, np.repeat(wanted[..., None], 3, axis=2))
        np.testing.assert_array_equal(np.asarray(pillow.decode(encoded)), found)


def test_of_several_pages_the_first_is_taken(picture):
    pages = [picture.convert("L"), picture.rotate(90)]
    encoded = nasty.encoded(picture, "TIFF", save_all=True, append_images=pages)
    np.testing.assert_array_equal(images.decode(encoded), picture)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_known_range_are_an_error(mode, picture):
    with pytest.raises(Exception, match="what is white"):
        images.decode(nasty.encoded(picture.convert(mode), "TIFF"))


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "HEIF", "WEBP"])
def test_too_many_pixels_are_refused_before_they_are_decoded(kind, picture, monkeypatch):
    encoded = nasty.encoded(picture, kind)
    monkeypatch.setattr(Image.Image, "load", None)  # would fail
    with pytest.raises(ValueError, match=r"too many pixels.* 6300"):
        pillow.decode(encoded, most=6299)


def tiled_tiff(side: int, tile: int) -> bytes:
    """A grey TIFF of one tile, which has much less than it declares."""
    data = zlib.compress(bytes(1000))
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile}
    tags |= {324: 8 + 2 + 12 * (len(tags) + 2) + 4, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return header + entries + bytes(4) + data


def test_a_tile_of_a_tiff_that_is_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match=r"too many pixels.* 1600000000"):
        pillow.decode(tiled_tiff(64, 40_000))
    with pytest.raises(OSError, match="decoder error"):  # of such a size it is decoded
        pillow.decode(tiled_tiff(64, 64))


def test_without_the_library_heic_is_an_error_that_says_so(picture, monkeypatch):
    encoded = nasty.encoded(picture, "HEIF")
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    pillow.register_heif.cache_clear()
    with pytest.raises(ValueError, match="pip install pi-heif"):
        pillow.decode(encoded)


def test_damaged_exif_does_not_matter(picture):
    encoded = nasty.encoded(picture, "JPEG", exif=b"Exif\0\0nonsense")
    assert exif.read(encoded) == 1
    np.testing.assert_array_equal(turn(encoded), images.decode(encoded))
    for value in (0, 9, 99):
        encoded = nasty.encoded(picture, "JPEG", 1, exif=with_orientation(value))
        assert exif.read(encoded) == 1


def with_orientation(value: int) -> Image.Exif:
    found = Image.Exif()
    found[274] = value
    return found


@pytest.mark.parametrize("crop", ["inception", "torchvision"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_crop_of_a_turned_jpeg_is_that_of_the_upright_image(orientation, crop, picture):
    """The window is drawn in upright coordinates, and only it is decoded of the stored image."""
    encoded = nasty.encoded(picture, "JPEG", orientation, quality=100, subsampling=0)
    upright = by_pillow(encoded)
    config = train_config(1, crop=crop, area_min=0.1)
    box = images.window(config.data, SIDE)
    for number in range(6):
        seed = tf.constant([number, 7])
        y, x, height, width = box(tf.constant(upright.shape), seed).numpy()
        found = images.decode_box(encoded, seed, box, rotates=True).numpy()
        wanted = upright[y : y + height, x : x + width]
        difference = np.abs(found.astype(int) - wanted)
        # TensorFlow's and Pillow's libjpeg; another window would differ by 50.
        assert difference.max() <= 20 and difference.mean() < 2.5


def test_only_images_with_exif_are_read_in_python(picture, monkeypatch):
    asked = []
    monkeypatch.setattr(exif, "read", lambda encoded: asked.append(1) or np.int32(1))
    plain = nasty.encoded(picture, "JPEG"), nasty.encoded(picture, "PNG")
    turned = nasty.encoded(picture, "JPEG", 6), nasty.encoded(picture, "PNG", 6)
    decode = compiled()
    for encoded in plain:
        np.testing.assert_array_equal(decode(encoded), images.decode(encoded))
    assert not asked
    for encoded in turned:
        decode(encoded)
    assert len(asked) == 2


def test_exif_after_another_segment_is_found(picture):
    encoded = nasty.encoded(picture, "JPEG", 6)
    for size in (100, 65_533):
        segment = b"\xff\xed" + (size + 2).to_bytes(2, "big") + bytes(size)
        behind = encoded[:2] + segment + encoded[2:]
        np.testing.assert_array_equal(turn(behind), turn(encoded))
        assert turn(behind).shape[:2] == picture.size


def turned_and_upright(picture) -> tuple[InMemory, InMemory]:
    """Listings of the same upright pixels, in PNG files with and without EXIF."""
    turned = [nasty.encoded(picture, "PNG", i) for i in ORIENTATIONS]
    upright = [nasty.encoded(Image.fromarray(by_pillow(encoded)), "PNG") for encoded in turned]
    return listing(turned), listing(upright)


@pytest.mark.parametrize("crop", ["inception", "random", "simple"])
def test_training_turns_images(crop, picture):
    turned, upright = turned_and_upright(picture)
    found = train(turned, train_config(8, crop=crop), stop=1)[0]["image"]
    wanted = train(upright, train_config(8, crop=crop), stop=1)[0]["image"]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("pixels_of", ["tensorflow", "timm"])
@pytest.mark.parametrize("key", [True, False])
def test_evaluation_turns_images_by_either_library(pixels_of, key, picture):
    tiny = dict(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=8, num_classes=8)
    model = create.create(**tiny, image_size=SIDE, pixels_of=pixels_of)
    rows = np.arange(8)
    found = [
        next(
            pipeline.eval_pipeline(
                eval_config(), files, rows, 8, SIDE, "error", 2, model, key
            ).batches()
        )["image"]
        for files in turned_and_upright(picture)
    ]
    assert np.array_equal(*found) == key


class AsTfds(InMemory):
    """Records of TFDS, whose EXIF is ignored."""

    @property
    def rotated_parts(self):
        return (False,)


def test_images_of_tfds_are_never_turned(picture):
    turned, _ = turned_and_upright(picture)
    found = train(AsTfds(**vars(turned)), train_config(8, crop="resize"), stop=1)
    wanted = train(turned, train_config(8, crop="resize", exif_rotation=False), stop=1)
    np.testing.assert_array_equal(found[0]["image"], wanted[0]["image"])
    upright = train(turned, train_config(8, crop="resize"), stop=1)
    assert not np.array_equal(found[0]["image"], upright[0]["image"])


def test_in_a_mixture_each_part_keeps_its_way(picture):
    turned, upright = turned_and_upright(picture)
    mixed = sources.mixture([turned, AsTfds(**vars(turned))], [1.0, 1.0], ["files", "tfds"])
    batch = train(mixed, train_config(32, crop="resize"), stop=1)[0]
    stored = listing_of_pixels(AsTfds(**vars(turned)))
    right = listing_of_pixels(upright)
    assert 4 < (batch["id"] < 8).sum() < 28
    for image, i in zip(batch["image"], batch["id"], strict=True):
        np.testing.assert_array_equal(image, right[i] if i < 8 else stored[i - 8])


def listing_of_pixels(files: InMemory) -> np.ndarray:
    rows = np.arange(len(files))
    host = pipeline.eval_pipeline(eval_config(), files, rows, len(rows), SIDE, "error")
    return next(host.batches())["image"]


def test_avif_is_known_by_its_compatible_brands(picture):
    encoded = nasty.encoded(picture, "AVIF")
    other = encoded[:8] + b"mif1" + encoded[12:]
    assert b"avif" in other[16 : int.from_bytes(other[:4], "big")]
    np.testing.assert_array_equal(pillow.decode(other), pillow.decode(encoded))
    assert pillow.is_heif(nasty.encoded(picture, "HEIF"))
