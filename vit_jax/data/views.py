"""The views of an image that DINO compares (arXiv 2104.14294): decoded once, cropped several times.

Flips and colours follow on the device (augment/views.py).
"""

from collections.abc import Callable

import tensorflow as tf

from vit_jax.data import image_ops, images
from vit_jax.data.pillow import MAX_PIXELS
from vit_jax.data.shapes import GLOBAL_VIEWS


def boxes(views, shape, seed):
    """(y, x, height, width) of every view of an image of `shape`, int32 [views, 4]: first the two
    global ones, then the local ones.

    Args:
      views: `config.data.views`.
      seed: of the example, int32 [2].
    """
    areas = GLOBAL_VIEWS * [views.global_area] + views.local_count * [views.local_area]
    return image_ops.torchvision_boxes(shape, seed, areas)


def crop(image, box, side: int):
    """A window (y, x, height, width) of an image, resized to uint8 [side, side, 3]."""
    y, x, height, width = tf.unstack(box)
    window = tf.slice(image, [y, x, 0], [height, width, -1])
    return image_ops.resize(window, side, "bicubic_pillow")


def train_views(config, most: int = MAX_PIXELS) -> Callable:
    """f(encoded, seed int32 [2], rotates) -> dict of `image`, the global views, and `local`, uint8
    [views, side, side, 3]; see shapes.py. `most`: pixels of the largest image; `rotates`: see
    `images.decode`.
    """
    views = config.data.views

    def crops(image, boxes, side: int):
        return tf.stack([crop(image, box, side) for box in tf.unstack(boxes)])

    def make(encoded, seed, rotates=False) -> dict:
        # The whole image: together, the views need most of it.
        image = images.decode(encoded, most, rotates)
        found = boxes(views, tf.shape(image), seed)
        result = dict(image=crops(image, found[:GLOBAL_VIEWS], config.image_size))
        if views.local_count:
            result["local"] = crops(image, found[GLOBAL_VIEWS:], views.local_size)
        return result

    return make
