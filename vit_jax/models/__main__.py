"""Prints a table of the named models, for 1,000 classes at 224 x 224 pixels: parameters, FLOPs (a
multiply-add counts as 2 FLOPs), tokens, and the formats of their weights.

python -m vit_jax.models
"""

import math
import sys

import jax

from vit_jax import cli
from vit_jax.models import create

IMAGE_SIZE = 224
NUM_CLASSES = 1000

FORMATS = ("published", "big_vision", "timm", "hf", "ours")
VITS = ("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14", "g/14", "G/14")
DISTILLED = ("Ti/16", "S/16", "B/16")
HYBRIDS = ("R+Ti/16", "R26+S/32", "R50+B/16", "R50+L/32", "R50+L/16")
MIXERS = ("S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "H/14")
RESNETS = ("R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4")

# (variant, other arguments of create_model, formats).
ROWS = [
    *((variant, {}, FORMATS) for variant in VITS),
    ("So400m/14", dict(pool="map"), ("big_vision", "timm", "ours")),
    ("giant2/14", dict(layer_scale=1e-5), ("timm", "hf", "ours")),
    *((variant, dict(distilled=True), ("timm", "hf", "ours")) for variant in DISTILLED),
    *((variant, {}, ("published", "ours")) for variant in HYBRIDS),
    *((f"Mixer-{size}", {}, ("published", "big_vision", "ours")) for size in MIXERS),
    *((variant, {}, ("published", "ours")) for variant in RESNETS),
]


def num_params(model) -> int:
    """Parameters of a model, from shapes alone; stacked layers are traced once."""
    shapes = create.abstract_params(model.with_scan(True))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def line(cells) -> str:
    return f"| {' | '.join(cells)} |"


def row(variant: str, options: dict, formats: tuple[str, ...]) -> str:
    model = create.create(variant, NUM_CLASSES, IMAGE_SIZE, **options)
    name = ", ".join([f"`{variant}`", *(f"`{key}={value!r}`" for key, value in options.items())])
    tokens = math.prod(model.grid) + model.num_prefix
    flops = f"{model.flops / 1e9:,.2f}"
    marks = ["x" if name in formats else "" for name in FORMATS]
    return line([name, f"{num_params(model):,}", flops, str(tokens), *marks])


def table() -> str:
    """The table as Markdown."""
    head = ["name", "parameters", "GFLOPs", "tokens", *FORMATS]
    rule = ["---", "--:", "--:", "--:", *(":-:" for _ in FORMATS)]
    return "\n".join([line(head), line(rule), *(row(*entry) for entry in ROWS)])


def work(args) -> None:
    print(table())


COMMAND = cli.Command("models", __doc__, work)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
