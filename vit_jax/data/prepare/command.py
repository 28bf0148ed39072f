"""Prepares a data set for fast training: with TFDS, from ImageNet-21k's tars, or as a copy with
smaller images.

python -m vit_jax.data prepare --config=FILE.py[:ARG]                   what TFDS downloads
python -m vit_jax.data prepare --config=... --from=FOLDER [--partial]   imagenet21k from class tars
python -m vit_jax.data prepare --config=... --out=DIR [--short_side=256]   a copy of any data set
"""

import functools
import io
import logging
import pathlib
import re
from collections.abc import Callable

from PIL import Image

from vit_jax import config as configs
from vit_jax.config import is_own
from vit_jax.data import pillow
from vit_jax.data.prepare import download, imagenet21k, writer
from vit_jax.data.prepare.shards import Corrupt, Reader
from vit_jax.data.sources import storage
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources.source import Source, Subset
from vit_jax.distributed import hardware
from vit_jax.errors import UserError, one_line

log = logging.getLogger("vit_jax.data.prepare")

QUALITY = 90  # of JPEG; chroma is 4:2:0, the default of Pillow's encoder
NOT_IN_TFDS = ("TIFF", "HEIF", "AVIF")  # formats that TFDS does not decode
LOSSLESS = ("PNG", "BMP", "TIFF")
SAME_SIZE_QUALITY = 95  # of a JPEG that is converted without being shrunk; chroma is 4:4:4
# A JPEG is decoded at a half, quarter or eighth of its size if that is still so many times the size
# to write: twice as fast for photos of 1600 x 1200, with a PSNR of 50 dB against full decoding, far
# above that of the encoder.
DRAFT = 2


def run(config, args) -> dict:
    """Prepares a data set.

    Returns:
      {"status": "prepared" | "already prepared", "name", "data_dir", "folder", "num_classes",
      "examples" by split, "skipped": names of corrupt images, "use": config overrides, "origin" of
      a data set that we wrote}, plain JSON.
    """
    check_arguments(config, args)
    if args.source:
        return from_tars(config, args)
    if args.out:
        return copy(config, args)
    return download.prepare(config, splits_used(config))


def check_arguments(config, args) -> None:
    name = config.data.name
    if args.source and name != "imagenet21k":
        raise UserError(
            f"--from is for data.name=imagenet21k, not {name}: leave it out, or correct the config"
        )
    if args.partial and not args.source:
        raise UserError(
            "--partial has no effect without --from: give the folder of tars, or leave it out"
        )
    for key in ("short_side", "workers"):
        if getattr(args, key) < 0:
            raise UserError(f"--{key}={getattr(args, key)} is negative: correct it")
    writes = args.source or args.out
    if not writes and (args.short_side or args.name):
        raise UserError(
            "--short_side and --name have no effect without --out: add the folder of the copy as "
            "--out=DIR"
        )
    if name == "mixture":
        raise UserError(
            "a mixture can't be prepared as one: prepare its parts, each with "
            "--config.data.name=PART"
        )
    if name == "imagenet21k" and not writes:
        raise UserError(
            "imagenet21k is not a TFDS data set: give --from=FOLDER with its tars, one per class"
        )
    is_read_there = name == "digits" or name.startswith(("folder:", "tars:", "csv:"))
    if not writes and (is_read_there or is_own(name)):
        raise UserError(
            f"{name} is read where it is and needs no preparation: train on it directly, or copy "
            "it with --out=DIR"
        )


def workers(args) -> int:
    return args.workers or hardware.cores()


def splits_used(config) -> list[str]:
    """The splits of `data` that the config names, without slices: "train" of "train[:99%]"."""
    data = config.data
    used = [data.split]
    for entry in config.evals.values():
        if entry.data.name in ("", data.name) and entry.data.data_dir in ("", data.data_dir):
            used.append(entry.data.split)
    parts = [part for text in used for part in text.split("+")]
    return list(dict.fromkeys(part.partition("[")[0].strip() for part in parts))


def needs_labels(config) -> bool:
    """Whether training or an evaluation reads the labels of `data`."""
    of_evals = [entry.data.name for entry in config.evals.values()]
    return configs.uses_labels(config) or bool({"", config.data.name} & set(of_evals))


def make_check(threads: int, rotates: bool) -> Callable[[bytes], bytes]:
    """f(encoded) -> the same bytes, or `converted` if TFDS would not show the image as training
    does; Corrupt if training could not decode it, or if so many threads have no memory for it.

    Args:
      rotates: whether images are turned upright as their EXIF says.
    """
    import tensorflow as tf

    from vit_jax.data import images

    most = images.most_pixels(threads)
    limited = functools.partial(images.decode, most=most)
    decode = tf.function(limited, input_signature=[tf.TensorSpec([], tf.string)])

    def check(encoded: bytes) -> bytes:
        try:
            decode(encoded)
            return converted(encoded, most, rotates)
        except Exception as error:  # decoders raise errors of many types
            raise Corrupt(one_line(error)[:160]) from None

    return check


def converted(encoded: bytes, most: int, rotates: bool) -> bytes:
    """The same bytes of an image that is upright and in a format of TFDS; otherwise an upright PNG
    of a lossless one, and a JPEG of others.
    """
    with pillow.open_image(encoded) as image:
        is_upright = not rotates or pillow.orientation(image) == 1
        kind = image.format
    if is_upright and kind not in NOT_IN_TFDS:
        return encoded
    image = pillow.decode(encoded, most, rotates)
    out = io.BytesIO()
    if kind in LOSSLESS:
        image.save(out, "PNG")
    else:
        image.save(out, "JPEG", quality=SAME_SIZE_QUALITY, subsampling="4:4:4")
    return out.getvalue()


def shrunk(image: Image.Image, side: int, rotates: bool) -> bytes:
    """The image with a shorter side of `side` pixels (bicubic, antialiased), as a JPEG without
    metadata, upright if `rotates`. Grey images stay grey.
    """
    scale = side / min(image.size)
    size = tuple(max(side, round(length * scale)) for length in image.size)
    drafted = image.draft(None, tuple(DRAFT * length for length in size))
    box = drafted and drafted[1]  # in pixels of the draft; it may end inside the last ones
    image.load()
    found = pillow.orientation(image) if rotates else 1
    image = pillow.as_8_bits(image)
    if image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    image = image.resize(size, Image.Resampling.BICUBIC, box)
    if found != 1:
        image = image.transpose(pillow.UPRIGHT[found])
    image.info = {}
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def make_shrink(side: int, threads: int, rotates: bool) -> Callable[[bytes], bytes]:
    """f(encoded) -> what `make_check` gives if the shorter side is at most `side`, else `shrunk`.

    f raises Corrupt if the image can't be decoded.
    """
    from vit_jax.data import images

    check = make_check(threads, rotates)
    most = images.affordable_pixels(threads)
    Image.MAX_IMAGE_PIXELS = None  # a guard against attacks, but these are the user's own images

    def shrink(encoded: bytes) -> bytes:
        try:
            with pillow.open_image(encoded) as image:
                images.must_be_within(pillow.num_pixels(image), most)
                if min(image.size) > side:
                    return shrunk(image, side, rotates)
        except Exception as error:
            raise Corrupt(one_line(error)[:160]) from None
        return check(encoded)

    return shrink


def origin_of(name: str, short_side: int, **more) -> dict:
    if not short_side:
        return dict(source=name, **more)
    return dict(source=name, short_side=short_side, jpeg_quality=QUALITY, chroma="4:2:0", **more)


def report(target: writer.Target, found: dict, is_new: bool) -> dict:
    """Reports what was done and how to use it, in the log and as plain JSON."""
    use = [f"--config.data.name={target.name}", f"--config.data.data_dir={target.data_dir}"]
    status = "prepared" if is_new else "already prepared"
    if found["skipped"]:
        log.warning(
            "%d corrupt images were skipped, the first is %s",
            len(found["skipped"]),
            found["skipped"][0],
        )
    sizes = ", ".join(f"{split} {count:,}" for split, count in found["examples"].items())
    log.info("%s in %s: %s examples, %d classes", status, target.folder, sizes, target.num_classes)
    log.info("use it with %s", " ".join(use))
    return dict(
        status=status,
        name=target.name,
        data_dir=target.data_dir,
        folder=str(target.folder),
        num_classes=target.num_classes,
        examples=found["examples"],
        skipped=found["skipped"],
        use=use,
        origin=found["inputs"]["origin"],
    )


def write(
    target: writer.Target, parts: dict[str, Source], config, args, rotates: bool = False
) -> dict:
    threads = workers(args)
    side = args.short_side
    transform = make_shrink(side, threads, rotates) if side else make_check(threads, rotates)
    reader = Reader(transform, config.data.on_corrupt == "skip")
    is_new, found = writer.write(target, parts, reader, threads)
    return report(target, found, is_new)


def from_tars(config, args) -> dict:
    """Prepares ImageNet-21k from one tar per class."""
    data_dir = storage.absolute(args.out or config.data.data_dir or tfds_source.default_data_dir())
    suffix = f"_{args.short_side}" if args.short_side else ""
    name = args.name or f"imagenet21k{suffix}"
    target = writer.Target(name, data_dir, imagenet21k.ids(), imagenet21k.NUM_CLASSES, {})
    if target.folder.exists():
        return report(target, writer.read_summary(target), is_new=False)
    listing, facts = imagenet21k.load(args.source, args.partial)
    origin = origin_of("imagenet21k", args.short_side, **facts)
    target = writer.Target(name, data_dir, listing.class_names, listing.num_classes, origin)
    parts = {"train": Subset(listing, listing.splits["train"])}
    return write(target, parts, config, args)


def default_name(name: str, short_side: int) -> str:
    """ "folder:/data/My-Photos" -> "my_photos_256"; "eurosat/rgb:2.*.*" -> "eurosat_rgb_256"."""
    kind, _, where = name.partition(":")
    if kind in ("folder", "tars", "csv"):
        kind = pathlib.Path(where.split("{")[0].split("*")[0]).stem
    kind = re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")
    if not kind[:1].isalpha():
        kind = f"data_{kind}"
    return f"{kind}_{short_side or 'copy'}"


def copy(config, args) -> dict:
    """Copies any data set as array_record, with smaller images if `short_side` is set."""
    from vit_jax.data.sources import open as sources

    data = config.data
    name = args.name or default_name(data.name, args.short_side)
    if tfds_source.is_known(name):
        raise UserError(
            f"--name={name} is a data set of TFDS, which would be opened instead: choose another"
        )
    labelled = needs_labels(config)
    parts = {
        split: sources.open_source(data.name, split, data.data_dir, config.user, labelled)
        for split in splits_used(config)
    }
    source = parts[next(iter(parts))]
    if source.set_size:
        raise UserError(
            "images with several labels each can't be copied as a TFDS data set: train on them "
            "directly"
        )
    rotates = data.exif_rotation and source.rotates(0)
    origin = origin_of(data.name, args.short_side)
    if not data.exif_rotation:
        origin["exif_rotation"] = False
    if not labelled:
        origin["labels"] = False
    data_dir = storage.absolute(args.out)
    target = writer.Target(name, data_dir, source.class_names, source.num_classes, origin)
    return write(target, parts, config, args, rotates)
