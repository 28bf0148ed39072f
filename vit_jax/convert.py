"""Converts weights from any format to another, and writes them only if both give the same logits,
of images that both prepare alike.

python -m vit_jax.convert WEIGHTS DST [--format=published|big_vision|timm|hf|ours] [--json=FILE]
"""

import dataclasses
import itertools
import logging
import os
import pathlib
import sys
import tempfile

import numpy as np
from etils import epath
from PIL import Image

from vit_jax import cli, errors
from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli import objects
from vit_jax.config import is_own
from vit_jax.errors import NegativeResult, UserError, printable
from vit_jax.models import classifier, create, preparation
from vit_jax.models.classifier import Classifier
from vit_jax.weights import load as pretrained
from vit_jax.weights import same_outputs
from vit_jax.weights.formats import (
    big_vision,
    huggingface,
    npz,
    safetensors_folder,
    timm,
    vision_transformer,
)
from vit_jax.weights.scan_layout import unflatten

log = logging.getLogger("vit_jax.convert")

# Of prepared images: the largest difference, in levels of 0 to 255, and the share of numbers that
# may differ by more than one level.
PIXEL_TOLERANCE = 8.0
PIXEL_SHARE = 1e-3
IMAGE_SHAPES = ((375, 500), (500, 333), (257, 257), (61, 83))  # of the images for it

ARCHIVES = {"published": vision_transformer, "big_vision": big_vision}  # one .npz
FOLDERS = {"timm": timm, "hf": huggingface}  # config.json and model.safetensors
FORMATS = (*ARCHIVES, *FOLDERS, "ours")


def write(weights: pretrained.Weights, model, path: pathlib.Path, target: str) -> None:
    """Writes weights to a local path in the format `target`."""
    if target in ARCHIVES:
        npz.write(path, ARCHIVES[target].write(weights))
    elif target in FOLDERS:
        path.mkdir()
        arrays, configs = FOLDERS[target].write(weights, model)
        safetensors_folder.write(path, arrays, **configs)
    else:
        config = dict(loss=weights.loss)
        if weights.objective:
            config |= {"objective": weights.objective, weights.objective: weights.settings}
        meta = dict(
            config=config,
            model=create.fields(model),
            extra=extra_names(weights),
            class_names=weights.class_names,
        )
        checkpoint.write_params(path, unflatten(weights.params | weights.extra), meta)


def extra_names(weights: pretrained.Weights) -> list[str]:
    """What weights have besides the model, by the first part of its names."""
    return sorted({name.split("/")[0] for name in weights.extra})


def has_place(weights: pretrained.Weights, target: str) -> bool:
    """Whether a format can hold what weights have besides the model."""
    return target == "ours" or (target == "hf" and weights.objective == "mae")


def obstacles(weights: pretrained.Weights, model, target: str) -> list[str]:
    """Features of a model that the format can't represent."""
    if target == "ours":
        return []
    if is_own(model.architecture):
        return [f"the model {model.architecture} of your own"]
    return (ARCHIVES | FOLDERS)[target].obstacles(weights, model)


def smooth_image(height: int, width: int) -> Image.Image:
    """A random image whose colours change slowly, as those of photographs do."""
    coarse = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def pixel_difference(before: Classifier, after: Classifier) -> tuple[float, float]:
    """(largest difference of prepared images in levels of 0 to 255, share of numbers that differ by
    more than one level).

    Images for `before` are prepared by the library of `after`, which resizes in its own way.
    """
    from vit_jax.data import pillow

    hows = [preparation.expected(before), preparation.expected(after)]
    hows[0] = dataclasses.replace(hows[0], pixels_of=after.pixels_of)
    levels = []
    for image in itertools.starmap(smooth_image, IMAGE_SHAPES):
        pixels = [pillow.prepare(image, how) for how in hows]
        values = classifier.normalize(pixels[0], before.mean, before.std)
        values -= classifier.normalize(pixels[1], after.mean, after.std)
        levels.append(np.abs(values * 255 * np.asarray(before.std)).ravel())
    levels = np.concatenate(levels)
    return float(levels.max()), float(np.mean(levels > 1.01))


def check_destination(destination: str, target: str) -> epath.Path:
    """The path of DST; UserError if it can't be written, or if files would be overwritten."""
    path = epath.Path(destination)
    if "://" not in destination:
        path = epath.Path(os.path.realpath(destination))
    if target == "ours":
        checkpoint.check_name(destination)
    objects.must_be_reachable(destination, f"DST {destination}")
    if destination.endswith((".npz", ".safetensors")) and (target in FOLDERS or target == "ours"):
        raise UserError(f"{target} weights are a folder, but DST is {destination}: give a folder")
    if target in ARCHIVES and not destination.endswith(".npz"):
        raise UserError(
            f"{target} weights are one file, but DST is {destination}: give a name that ends in "
            ".npz"
        )
    if path.is_file() or (path.is_dir() and (target in ARCHIVES or any(path.iterdir()))):
        raise UserError(
            f"DST {destination} exists and is not overwritten: remove it, or give another name"
        )
    if "://" not in destination and not path.resolve().parent.is_dir():
        raise UserError(
            f"the folder of DST {destination} does not exist: create it, or give another name"
        )
    return path


def move(made: pathlib.Path, destination: epath.Path) -> None:
    """Moves the written weights to DST; to a remote store, file by file."""
    if "://" not in str(destination):
        if destination.is_dir():
            destination.rmdir()
        made.rename(destination)
    elif made.is_file():
        copy(made, destination)
    else:
        for file in sorted(made.rglob("*")):
            if file.is_file():
                copy(file, destination / file.relative_to(made).as_posix())


def copy(file: pathlib.Path, target: epath.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    epath.Path(file).copy(target)


def verify(weights, made: pathlib.Path, model, target: str) -> dict:
    """Reads the written weights back, and returns the content of `--json`.

    Raises:
      NegativeResult: the logits differ.
    """
    grid = model.grid if target in ARCHIVES else None  # archives do not show it
    converted = pretrained.read(made, grid=grid)
    largest, tolerance = same_outputs.difference(weights, converted, model)
    if not largest <= tolerance:  # also if it is nan
        before = create.fields(model)
        after = create.fields(create.create(**converted.fields))
        changes = [
            f"{name}={before[name]} becomes {after.get(name)}"
            for name in ("gelu", "ln_eps")
            if before.get(name) != after.get(name)
        ]
        reason = f" ({', '.join(changes)})" if changes else ""
        raise NegativeResult(
            f"the logits of {weights.path} as {target} differ by {largest:.3g}, more than "
            f"{tolerance:.3g}{reason}: nothing is written"
        )
    if target not in ARCHIVES:  # which do not say how images are prepared
        check_pixels(weights, model, create.create(**converted.fields), target)
    return dict(
        source_format=weights.format,
        target_format=target,
        max_abs_diff=largest,
        tolerance=tolerance,
    )


def check_pixels(weights, before: Classifier, after: Classifier, target: str) -> None:
    """Raises NegativeResult if prepared images differ, and warns if the library that prepares them
    does.
    """
    how = preparation.expected(before)
    levels, share = pixel_difference(before, after)
    if not (levels <= PIXEL_TOLERANCE and share <= PIXEL_SHARE):
        raise NegativeResult(
            f"images prepared for {weights.path} as {target} differ by up to {levels:.3g} of 255 "
            f"levels, {how} becomes {preparation.expected(after)}: nothing is written"
        )
    if how.pixels_of == after.pixels_of:
        return
    if how.pixels_of == "tensorflow" and how.method == "bilinear":
        log.warning("%s resizes with antialiasing, which %s does not expect", target, weights.path)
    elif how.is_cropped:
        log.warning("%s rounds odd borders otherwise: crops of some images move by a pixel", target)


def convert(source: str, destination: str, target: str) -> dict:
    """Converts, verifies and writes; returns the content of `--json`.

    Raises:
      UserError: the source can't be read, the target can't represent it, or the destination can't
        be written.
      NegativeResult: the logits differ; nothing is written.
    """
    path = check_destination(destination, target)
    weights = pretrained.read(source)
    left_out = [] if has_place(weights, target) else extra_names(weights)
    if left_out:
        weights = dataclasses.replace(weights, extra={})
    model, _ = pretrained.build(weights)
    features = obstacles(weights, model, target)
    if features:
        raise UserError(
            f"{target} weights can't represent {', '.join(features)} of {weights.path}: choose "
            "another --format"
        )
    if target in ARCHIVES and model.pixels_of != "tensorflow":
        how = preparation.expected(model)
        log.warning("%s weights do not say how images are prepared; these expect %s", target, how)
    parent = None
    if "://" not in destination:  # beside it, so that the last step is one rename
        parent = pathlib.Path(destination).resolve().parent
    try:
        with tempfile.TemporaryDirectory(prefix=".converting_", dir=parent) as folder:
            made = pathlib.Path(folder) / ("weights.npz" if target in ARCHIVES else "weights")
            write(weights, model, made, target)
            result = verify(weights, made, model, target)
            if left_out:
                result["left_out"] = left_out
            move(made, path)
    except Exception as error:
        problem = errors.storage_problem(error)
        if isinstance(error, UserError) or problem is None:
            raise
        raise UserError(
            f"DST {destination} can't be written ({problem}): fix it, or give another path"
        ) from error
    return result


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "source",
        metavar="WEIGHTS",
        help=cli.WEIGHTS,
    )
    parser.add_argument(
        "destination",
        metavar="DST",
        help="a new .npz (published, big_vision) or folder (the others)",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of DST (default: published for .npz, ours for a folder)"
    )


def work(args) -> None:
    target = args.format or ("published" if args.destination.endswith(".npz") else "ours")
    with cli.logging_to(None):
        result = convert(args.source, args.destination, target)
    text = (
        f"{args.source} ({result['source_format']}) -> {args.destination} ({target}): largest "
        f"difference of the logits {result['max_abs_diff']:.3g}, tolerance "
        f"{result['tolerance']:.3g}"
    )
    if "left_out" in result:
        text += f"; {target} has no place for {', '.join(result['left_out'])}: left out"
    print(printable(text))
    cli.write_json(args.json, result)


COMMAND = cli.Command(
    "convert",
    __doc__,
    work,
    add_arguments,
    json="write the result here",
    recovery="DST was not written; run the same command again",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
