"""Converts weights from any format to another, and writes them only when both give the same logits.

python -m vit_jax.convert SRC DST [--format=published|big_vision|timm|hf|ours] [--json=FILE]
"""

import logging
import pathlib
import sys
import tempfile

import jax
import numpy as np
from etils import epath

from vit_jax import cli, errors
from vit_jax.checkpoints import read as checkpoint
from vit_jax.errors import NegativeResult, UserError
from vit_jax.models import create
from vit_jax.weights import load as pretrained
from vit_jax.weights.formats import (
    big_vision,
    huggingface,
    npz,
    safetensors_folder,
    timm,
    vision_transformer,
)
from vit_jax.weights.scan_layout import unflatten

# Largest difference of the logits, relative to the largest logit, of a conversion that is right.
TOLERANCE = 1e-4

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
        meta = dict(
            config=dict(loss=weights.loss),
            model=create.fields(model),
            class_names=weights.class_names,
        )
        checkpoint.write_params(path, unflatten(weights.params), meta)


def obstacles(weights: pretrained.Weights, model, target: str) -> list[str]:
    """Features of a model that the format has no place for."""
    form = (ARCHIVES | FOLDERS).get(target)
    return form.obstacles(weights, model) if form else []


def logits(weights: pretrained.Weights, image) -> np.ndarray:
    """Output of the model that the weights are for, in full float32: [batch, classes].

    Of a head that is all zeros, which would hide every error, it is what the head reads.
    """
    model, params = pretrained.build(weights)
    blind = not any(
        value.any()
        for name, value in weights.params.items()
        if name in ("head/kernel", "head_dist/kernel")
    )

    def apply(params, image):
        return (
            pretrained.features(model, params, image)
            if blind
            else model.apply({"params": params}, image)
        )

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(apply)(params, image))


def difference(weights, converted, model) -> tuple[float, float]:
    """(largest difference of the logits on two random images, what is tolerated of it)."""
    image = np.random.default_rng(0).uniform(-1, 1, (2, *model.image_size, 3)).astype(np.float32)
    before, after = logits(weights, image), logits(converted, image)
    if before.shape != after.shape:
        return float("inf"), 0.0
    return float(np.abs(before - after).max()), TOLERANCE * float(np.abs(before).max())


def check_destination(destination: str, target: str) -> epath.Path:
    """Raises UserError when nothing can be written there, or when something would be lost."""
    path = epath.Path(destination)
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


def place(made: pathlib.Path, destination: epath.Path) -> None:
    """Moves what was made to where it belongs; at a remote store, file by file."""
    if "://" not in str(destination):
        if destination.is_dir():
            destination.rmdir()
        made.rename(destination)
        return
    for file in [made] if made.is_file() else sorted(made.rglob("*")):
        if file.is_file():
            goal = destination / file.relative_to(made).as_posix() if made.is_dir() else destination
            goal.parent.mkdir(parents=True, exist_ok=True)
            epath.Path(file).copy(goal)


def prove(weights, made: pathlib.Path, model, target: str, source: str) -> dict:
    """Reads back what was made, and returns what `--json` holds.

    Raises:
      NegativeResult: the logits differ.
    """
    settings = dict(grid=model.grid) if target in ARCHIVES else {}
    converted = pretrained.read(made, **settings)
    largest, tolerance = difference(weights, converted, model)
    if not largest <= tolerance:  # true for nan, too
        before = create.fields(model)
        after = create.fields(create.create(**converted.fields))
        lost = [
            f"{name}={before[name]} becomes {after.get(name)}"
            for name in ("gelu", "ln_eps")
            if before.get(name) != after.get(name)
        ]
        raise NegativeResult(
            f"the logits of {source} as {target} differ by {largest:.3g}, more than {tolerance:.3g}"
            f"{' (' + ', '.join(lost) + ')' if lost else ''}: nothing is written"
        )
    return dict(
        source_format=weights.format,
        target_format=target,
        max_abs_diff=largest,
        tolerance=tolerance,
    )


def convert(source: str, destination: str, target: str) -> dict:
    """Converts, verifies and writes; returns what `--json` holds.

    Raises:
      UserError: the source can't be read, the target can't express it, or the destination can't be
        written.
      NegativeResult: the logits differ; nothing is written.
    """
    path = check_destination(destination, target)
    weights = pretrained.read(source)
    model, _ = pretrained.build(weights)
    if found := obstacles(weights, model, target):
        raise UserError(
            f"{target} weights have no place for {', '.join(found)} of {source}: choose another "
            "--format"
        )
    # Beside the destination where that is local, so that placing it is one rename.
    beside = None if "://" in destination else pathlib.Path(destination).resolve().parent
    try:
        with tempfile.TemporaryDirectory(prefix=".converting_", dir=beside) as folder:
            made = pathlib.Path(folder) / ("weights.npz" if target in ARCHIVES else "weights")
            write(weights, model, made, target)
            result = prove(weights, made, model, target, source)
            place(made, path)
    except Exception as error:
        problem = errors.storage_problem(error)
        if isinstance(error, UserError) or problem is None:
            raise
        raise UserError(
            f"DST {destination} can't be written ({problem}): mend it, or give another place"
        ) from error
    return result


def main(argv: list[str]) -> int:
    parser = cli.ArgumentParser(
        "vit_jax.convert", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="weights in any format: file, folder, workdir, gs:// or https://",
    )
    parser.add_argument(
        "destination",
        metavar="DST",
        help="a new .npz (published, big_vision) or folder (the others)",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of DST; else published for .npz, ours for a folder"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)

    def work():
        cli.check(args.json)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        target = args.format or ("published" if args.destination.endswith(".npz") else "ours")
        result = convert(args.source, args.destination, target)
        print(
            f"{args.source} ({result['source_format']}) -> {args.destination} ({target}): largest "
            f"difference of the logits {result['max_abs_diff']:.3g}, tolerance "
            f"{result['tolerance']:.3g}"
        )
        cli.write(args.json, result)

    return cli.run(work, args.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
