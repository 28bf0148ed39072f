"""Prints the tables of weights that have a name, as docs/published_weights.md has them.

python -m references.published

Accuracies are those of imagenet.csv; parameters are counted in the models here.
"""

import functools
import re

from references import check
from vit_jax.models import create
from vit_jax.models.__main__ import line, num_params
from vit_jax.weights import published

HUB = "https://huggingface.co"
# Paths of files that were not fine-tuned after ImageNet-21k, and their classes.
IMAGENET21K = re.compile(r"/imagenet21k/|_i21k_|/BiT-M-\w+$|-i21k-(?!.*--)")
CLASSES21K = 21_843
TIMM = re.compile(
    r"timm/(vit|deit3?|flexivit)_(tiny|small|base|large|huge)(_distilled)?"
    r"(?:_patch(\d+)_\d+)?\.\w+"
)
SIZES = dict(tiny="Ti", small="S", base="B", large="L", huge="H")
# Collection -> heading.
COLLECTIONS = {
    "imagenet21k": "Pretrained on ImageNet-21k (arXiv 2010.11929; Mixer: 2105.01601)",
    "imagenet21k+imagenet2012": "The same, fine-tuned on ImageNet",
    "augreg": "AugReg (arXiv 2106.10270): ImageNet-21k, and -224 and -384 fine-tuned on ImageNet",
    "imagenet1k": "Mixer trained on ImageNet (arXiv 2105.01601)",
    "sam": "Trained with SAM on ImageNet (arXiv 2106.01548)",
    "gsam": "Mixer trained with GSAM on ImageNet (arXiv 2203.08065)",
    "bit_models": "BiT (arXiv 1912.11370), and distilled ones (arXiv 2106.05237)",
    "big_vision": "Plain ViT-S/16 (arXiv 2205.01580) and FlexiViT (arXiv 2212.08013)",
}
HEAD = [
    line(["name", "parameters", "pixels", "top-1 %", "source"]),
    "| --- | --: | --: | --: | --- |",
]


count = functools.cache(num_params)


@functools.cache
def accuracies() -> dict[str, dict]:
    """Path on Google's storage without suffix, or ORG/NAME on the hub -> row of imagenet.csv."""
    found = {}
    for row in check.read_table(check.IMAGENET):
        path = re.sub(rf"^(gs:/|{published.STORE}|{HUB})/", "", row["weights"])
        path = path.removesuffix(published.SUFFIX).removesuffix("/resolve/main")
        if row["data"] == "imagenet2012":
            found[path] = row
    return found


def accuracy(path: str) -> list[str]:
    """The last two cells of a row."""
    row = accuracies().get(path)
    return [f"{row['top1']:g}", row["source"]] if row else ["", ""]


def image_size(path: str) -> int:
    """Of the last training of a published file, by the papers and lists of files."""
    if "flexivit/" in path:
        return 240
    if path.endswith("-ILSVRC2012"):
        return 480
    if "imagenet21k+imagenet2012/" in path and not path.endswith("-224"):
        return 384
    match = re.search(r"[_-](160|224|384)$", path)
    return int(match[1]) if match else 224


def model_of(path: str):
    """The model of a published file."""
    name = published.model_of(path)
    options = {}
    if name.startswith("flexivit"):
        name = f"{name[-1].upper()}/16"
    if "vit_s16_i1k" in path:
        options = dict(pool="gap", posemb="sincos2d", pre_logits=True)
    if path.startswith("vit_models/imagenet21k/"):
        options = dict(pre_logits=True)
    classes = CLASSES21K if IMAGENET21K.search(path) else 1000
    # BiT's parameters are the same at any size.
    side = 224 if path.startswith("bit_models") else image_size(path)
    return create.create(name, classes, side, **options)


def hub_model_of(name: str, side: int):
    """The model of weights of timm; None if its size has no name here."""
    match = TIMM.fullmatch(name)
    if not match:
        return None
    kind, size, distilled, patch = match.groups()
    options = dict(distilled=True) if distilled else {}
    if kind == "deit3":
        options = dict(layer_scale=1e-6)
    return create.create(f"{SIZES[size]}/{patch or 16}", 1000, side, **options)


def published_rows(collection: str) -> list[str]:
    rows = []
    for name, path in published.PATHS.items():
        if name.split("/")[0] == collection:
            link = f"[`{name}`]({published.address(path)})"
            cells = [link, f"{count(model_of(path)):,}", str(image_size(path))]
            rows.append(line([*cells, *accuracy(path)]))
    return rows


def hub_rows() -> list[str]:
    rows = []
    for name, row in accuracies().items():
        if "/deit" in name or name.startswith("timm/"):
            model = hub_model_of(name, int(row["image_size"]))
            params = f"{count(model):,}" if model else ""
            link = f"[`hf:{name}`]({HUB}/{name})"
            rows.append(line([link, params, row["image_size"], *accuracy(name)]))
    return rows


def tables() -> str:
    """The tables as Markdown."""
    parts = []
    for collection, heading in COLLECTIONS.items():
        parts.append("\n".join([f"### {heading}", "", *HEAD, *published_rows(collection)]))
    parts.append("\n".join(["### Hugging Face hub", "", *HEAD, *hub_rows()]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables())
