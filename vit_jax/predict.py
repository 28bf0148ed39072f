"""Predicts classes or features of images with any weights.

python -m vit_jax.predict --init_from=WEIGHTS IMAGE_OR_FOLDER... [--top_k=5] [--out=FILE.csv|.npz]
"""

import csv
import dataclasses
import io
import logging
import sys
from collections.abc import Iterator, Sequence

import jax
import ml_collections
import numpy as np
from etils import epath

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.cli.csv_cell import cell
from vit_jax.distributed import runtime
from vit_jax.errors import NegativeResult, UserError, one_line, printable
from vit_jax.evaluate import predictions
from vit_jax.models import preparation
from vit_jax.weights import load as pretrained
from vit_jax.weights.pretrained import Pretrained

log = logging.getLogger("vit_jax.predict")

PER_DEVICE = 32  # images per batch and device
KINDS = (".csv", ".npz")
TOP_K = 5


def batches_of(model, listing, rows: int) -> Iterator[dict]:
    """Batches of `rows` decoded images as the model expects them; mask 0 marks padding and images
    that can't be read.
    """
    from vit_jax.data import pipeline
    from vit_jax.data.skipped import Skipped

    log.info("images: %s", preparation.expected(model))
    as_expected = ml_collections.ConfigDict(configs.eval_defaults()["data"])
    all_rows = np.arange(rows)
    host = pipeline.eval_pipeline(
        as_expected, listing, all_rows, rows, model.image_size, "skip", model=model
    )
    return dataclasses.replace(host, skipped=Skipped(is_limited=False)).batches()


def classes_per_image(loaded: Pretrained, top_k: int | None) -> int:
    """How many classes are asked for, or, with None, what the weights can give; 0: features."""
    if top_k is None and loaded.model.num_classes:
        return TOP_K
    if top_k is None:
        log.warning(
            "%s has no head and so no classes, as after training without labels: the results are "
            "features; fine-tune it for classes",
            loaded.path,
        )
        return 0
    if top_k:
        predictions.check_has_head(loaded, "--top_k=0")
    return top_k


def predict(
    weights: pretrained.Weights, paths: Sequence[str], top_k: int | None, image_size: int | None
) -> dict:
    """Predictions for the images in `paths`, which may be folders.

    Args:
      top_k: classes per image, 0 for features; None: what the weights can give.

    Returns:
      Arrays by name: `path`, `features` [N, embed], `label` and `probability` [N, k] of the images
      that can be read (the last two only if `top_k` > 0); `unreadable`, the paths of the other
      images; `names` of the classes.
    """
    from vit_jax.data.sources import file_list, ignored

    loaded = pretrained.build(weights, image_size=image_size)
    top_k = classes_per_image(loaded, top_k)
    files, listing = file_list.load(paths)
    ignored.report(", ".join(paths), listing.ignored)
    predictor = predictions.Predictor(loaded, min(top_k, loaded.model.num_classes))
    rows = predictor.rows(PER_DEVICE * jax.device_count())
    outputs = []
    ids = []
    for batch, output in predictor(batches_of(loaded.model, listing, rows)):
        outputs.append(output)
        ids.append(batch["id"][batch["mask"] > 0])
    columns = [np.concatenate(column) for column in zip(*outputs, strict=True)]
    ids = np.concatenate(ids)
    unreadable = sorted(set(range(len(files))) - set(ids.tolist()))
    predictions.check_finite(loaded.path, columns, [files[i] for i in ids])
    return dict(zip(("features", "label", "probability"), columns, strict=False)) | dict(
        path=[files[i] for i in ids],
        unreadable=[files[i] for i in unreadable],
        names=loaded.class_names,
    )


def as_csv(result: dict) -> str:
    """One line per image: its path, then classes and probabilities by rank, or the features."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if "label" not in result:
        writer.writerow(["path", *(f"feature_{i}" for i in range(result["features"].shape[1]))])
        writer.writerows(
            [cell(path), *map(repr, row.tolist())]
            for path, row in zip(result["path"], result["features"], strict=True)
        )
        return text.getvalue()
    ranks = range(1, result["label"].shape[1] + 1)
    writer.writerow(
        ["path", *(f"{what}_{rank}" for rank in ranks for what in ("class", "probability"))]
    )
    rows = zip(result["path"], result["label"], result["probability"], strict=True)
    for path, labels, probabilities in rows:
        cells = [cell(path)]
        for i, probability in zip(labels, probabilities, strict=True):
            cells += [cell(result["names"][i]), f"{probability:.6g}"]
        writer.writerow(cells)
    return text.getvalue()


def write(path: str, result: dict) -> None:
    """Writes .csv or .npz."""
    try:
        if path.endswith(".csv"):
            cli.replace_file(epath.Path(path), as_csv(result))
            return
        arrays = {key: np.asarray(value) for key, value in result.items() if key != "unreadable"}
        content = io.BytesIO()  # np.savez reads what it wrote, which files on a store do not allow
        np.savez(content, **arrays)
        cli.replace_file(epath.Path(path), content.getvalue())
    except OSError as error:
        raise UserError(
            f"--out={path} can't be written ({error.strerror or one_line(error)}): choose another"
        ) from None


def show(result: dict) -> None:
    for row, path in enumerate(result["path"]):
        if "label" not in result:
            count = result["features"].shape[1]
            first = result["features"][row, 0]
            print(printable(f"{path}: {count} features, the first {first:.6g}"))
            continue
        best = zip(result["label"][row], result["probability"][row], strict=True)
        text = ", ".join(f"{result['names'][i]} {p:.1%}" for i, p in best)
        print(printable(f"{path}: {text}"))


def add_arguments(parser, part: str) -> None:
    parser.add_argument(
        "--init_from",
        "--checkpoint",
        dest="weights",
        metavar="WEIGHTS",
        required=True,
        help=cli.WEIGHTS,
    )
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE_OR_FOLDER", help="folders are searched at any depth"
    )
    parser.add_argument(
        "--top_k",
        type=int,
        help=f"classes per image; 0: features (default: {TOP_K}, without a head 0)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"where to write: {' or '.join(KINDS)} (default: the terminal)",
    )
    parser.add_argument(
        "--image_size", type=int, help="side in pixels (default: that of the weights)"
    )


def work(args) -> None:
    if (args.top_k or 0) < 0 or (args.image_size is not None and args.image_size < 1):
        raise UserError("--top_k and --image_size can't be negative: correct them")
    if args.out and not args.out.endswith(KINDS):
        raise UserError(f"--out={args.out} must end in {' or '.join(KINDS)}: rename it")
    cli.check_file(args.out, "--out")
    runtime.keep_programs()
    runtime.keep_memory()
    with cli.logging_to(None):
        weights = pretrained.read(args.weights, image_size=args.image_size)
        result = predict(weights, args.images, args.top_k, args.image_size)
    if args.out:
        write(args.out, result)
        log.info("%d images: the results are in %s", len(result["path"]), args.out)
    else:
        show(result)
    if result["unreadable"]:
        raise NegativeResult(
            f"{len(result['unreadable'])} of the images can't be read, the first is "
            f"{result['unreadable'][0]}: they are left out"
        )


COMMAND = cli.Command("predict", __doc__, work, add_arguments)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
