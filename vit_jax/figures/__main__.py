"""Draws what a model has learned: filters, position embeddings, where it looks, what its tokens
hold.

python -m vit_jax.figures WEIGHTS [IMAGE_OR_FOLDER...] --out=FOLDER
"""

import argparse
import re
import sys

import numpy as np

from vit_jax import cli
from vit_jax.distributed import runtime
from vit_jax.errors import NegativeResult, printable
from vit_jax.figures import drawings, embeddings, of_images, tokens
from vit_jax.figures.attention import distances
from vit_jax.figures.folder import Folder
from vit_jax.figures.of_images import Measurements
from vit_jax.models.intermediates import OF
from vit_jax.weights import load
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.scan_layout import flatten

OF_TOKENS = "attention distance, rollout, heads, and token norms"
OF_PATCHES = "colours and similarity of patches"


def check_finite(pretrained: Pretrained) -> None:
    """Raises NegativeResult if a parameter is not finite."""
    for name, leaf in flatten(pretrained.params).items():
        if not np.isfinite(leaf).all():
            raise NegativeResult(
                f"{pretrained.path} has numbers that are not finite in {name}: these weights are "
                "damaged, choose others"
            )


def leave_out(what: str, why: str) -> None:
    print(printable(f"left out: {what}, because {why}"))


# --- of weights alone ---


def draw_weights(pretrained: Pretrained, folder: Folder) -> None:
    draw_filters(pretrained, folder)
    draw_positions(pretrained, folder)


def draw_filters(pretrained: Pretrained, folder: Folder) -> None:
    found = embeddings.first_kernel(*pretrained)
    if found is None:
        leave_out("filters", "no parameter is a convolution of pixels")
        return
    name, kernel = found
    filters = embeddings.filters(kernel)
    text = f"the first {len(filters)} principal components of the {kernel.shape[-1]} filters {name}"
    folder.add("embedding_filters", drawings.filters(filters), text, filters=filters)


def draw_positions(pretrained: Pretrained, folder: Folder) -> None:
    similar = embeddings.position_similarity(*pretrained)
    if similar is None:
        is_known = pretrained.model.architecture in OF
        why = "the model has none" if is_known else "those of a model of your own are not known"
        leave_out("position embeddings", why)
        return
    text = f"cosine similarity of the position embeddings (posemb={pretrained.model.posemb})"
    numbers = dict(position_similarity=similar.astype(np.float32))
    folder.add("position_similarity", drawings.positions(similar), text, **numbers)


# --- of images ---


def draw_images(pretrained: Pretrained, paths: list[str], folder: Folder) -> dict[int, str]:
    """Returns the numbers of the images that can't be read, and why."""
    skipped: dict[int, str] = {}
    measurements = of_images.measure_all(pretrained, paths, skipped)
    if measurements.count:
        arrays = measurements.arrays()
        draw_attention(pretrained, measurements, arrays, folder)
        draw_tokens(pretrained, arrays, folder)
        draw_patches(arrays, folder)
    return skipped


def draw_attention(
    pretrained: Pretrained, measurements: Measurements, arrays: dict, folder: Folder
) -> None:
    if "rollout" not in arrays:
        leave_out("attention", "the model has none")
        return
    model = pretrained.model
    by_head = measurements.mean_distance()
    uniform = distances(model.grid, model.cell).mean()
    text = f"mean attention distance by layer and head (images: {measurements.count})"
    folder.add("attention_distance", drawings.distance(by_head, uniform), text, distance=by_head)
    image = arrays["image"]
    text = f"attention rollout (images: {len(image)})"
    rollout = arrays["rollout"]
    folder.add("attention_rollout", drawings.rollouts(image, rollout), text, rollout=rollout)
    where = "attention pooling" if model.pool == "map" else "the last layer"
    text = f"attention of each head of {where}, from the tokens that the classifier reads"
    heads = arrays["heads"]
    folder.add("attention_heads", drawings.heads(image, heads), text, heads=heads)


def draw_tokens(pretrained: Pretrained, arrays: dict, folder: Folder) -> None:
    if "norms" not in arrays:
        leave_out("token norms", "the model has no tokens")
        return
    model = pretrained.model
    norms = arrays["norms"]
    text = "norms of tokens by layer, and after the last one"
    folder.add("token_norms", drawings.norms(norms, model.prefix), text, norms=norms)
    maps = norms[:, -1, model.num_prefix :].reshape(-1, *model.grid)
    text = "norms of patch tokens after the last layer"
    folder.add("token_norm_maps", drawings.norm_maps(arrays["image"], maps), text)


def draw_patches(arrays: dict, folder: Folder) -> None:
    image = arrays["image"]
    features = arrays["features"]
    colors = tokens.principal_colors(features)
    text = "the three principal components of the features of patches, as colours"
    folder.add("patch_colors", drawings.colors(image, colors), text, colors=colors)
    queries = tokens.spread_queries(features.shape[1:3])
    similar = tokens.patch_similarity(features, queries)
    text = "cosine similarity of the features of marked patches with all others"
    numbers = dict(patch_similarity=similar, queries=np.array(queries))
    folder.add("patch_similarity", drawings.similarity(image, similar, queries), text, **numbers)


# --- the command ---


def draw(pretrained: Pretrained, paths: list[str], folder: Folder) -> dict[int, str]:
    """Draws all that there is; returns the numbers of the images that can't be read, and why.

    Raises:
      NegativeResult: the weights, or what they give, are not finite.
    """
    check_finite(pretrained)
    draw_weights(pretrained, folder)
    skipped = {}
    if pretrained.model.architecture not in OF:
        leave_out("figures of images", "what a model of your own computes is not known")
    elif paths:
        skipped = draw_images(pretrained, paths, folder)
    else:
        print(f"with images: {OF_TOKENS}; {OF_PATCHES}")
    folder.close()
    return skipped


def list_images(images: list[str]) -> list[str]:
    """The given images, and those below the given folders. Those that are drawn come first, and
    are spread evenly over all: the first files of a folder are often of one class.
    """
    from vit_jax.data.sources import file_list, ignored

    paths, listing = file_list.load(images)
    ignored.report(", ".join(images), listing.ignored)
    drawn = np.linspace(0, len(paths) - 1, min(of_images.SHOWN, len(paths))).round().astype(int)
    rest = np.setdiff1d(np.arange(len(paths)), drawn)
    return [paths[i] for i in (*drawn, *rest)]


def size(text: str) -> tuple[int, int]:
    """(height, width) of 224 or 224x160."""
    sides = re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", text)
    if not sides:
        raise argparse.ArgumentTypeError("give a side in pixels, or HEIGHTxWIDTH, such as 32x48")
    height, width = sides.groups()
    return int(height), int(width or height)


def add_arguments(parser, part: str) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help=cli.WEIGHTS)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE_OR_FOLDER", help="folders are searched at any depth"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", required=True, help="where to write, local or gs://"
    )
    parser.add_argument(
        "--image_size",
        type=size,
        metavar="SIZE",
        help="side in pixels, or HEIGHTxWIDTH (default: that of the weights)",
    )


def work(args) -> None:
    runtime.keep_programs()
    runtime.keep_memory()
    with cli.logging_to(None):
        paths = list_images(args.images) if args.images else []
        folder = Folder(args.out)
        weights = load.read(args.weights, image_size=args.image_size)
        pretrained = load.build(weights, image_size=args.image_size)
        skipped = draw(pretrained, paths, folder)
    if skipped:
        raise NegativeResult(
            f"{len(skipped)} of {len(paths)} images can't be read, and are left out: "
            f"{next(iter(skipped.values()))}"
        )


COMMAND = cli.Command("figures", __doc__, work, add_arguments)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
