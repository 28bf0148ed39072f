"""The shapes of an example's images, by name in the batch: one image, or several views of it."""

import math
from collections.abc import Mapping

from vit_jax.config import has_views

GLOBAL_VIEWS = 2

Shapes = Mapping[str, tuple[int, ...]]


def of_one(size: tuple[int, int]) -> Shapes:
    """Those of one image of `size` (height, width)."""
    return dict(image=(*size, 3))


def of_training(config) -> Shapes:
    """`image`, and if there are local views `local`."""
    side = config.image_size
    if not has_views(config):
        return of_one((side, side))
    views = config.data.views
    shapes = dict(image=(GLOBAL_VIEWS, side, side, 3))
    if views.local_count:
        shapes["local"] = (views.local_count, views.local_size, views.local_size, 3)
    return shapes


def num_views(config) -> int:
    """How many images training makes of one example."""
    if not has_views(config):
        return 1
    return GLOBAL_VIEWS + config.data.views.local_count


def num_bytes(shapes: Shapes) -> int:
    """Of an example's uint8 pixels."""
    return sum(math.prod(shape) for shape in shapes.values())
