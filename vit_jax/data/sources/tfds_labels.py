"""How to get the label of an example, and its image, from the features of a TFDS data set."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from vit_jax.data import image_ops

MAX_LABELS = 64  # per example


@dataclasses.dataclass(frozen=True)
class Rule:
    """`label(example)` computes an integer scalar from the features `keys`; `names` are the class
    names; `what` distinguishes rules for the same records.
    """

    keys: tuple[str, ...]
    label: Callable[[dict], tf.Tensor]
    names: Sequence[str]
    what: str = ""
    set_size: int = 0  # the maximum number of labels, if a rule gives several


def bin_of(value, thresholds: Sequence[float]):
    """The largest k with thresholds[k] < value: a value at a threshold is in the bin below it."""
    return tf.reduce_sum(tf.cast(tf.constant(thresholds) < value, tf.int32)) - 1


def bin_names(unit: str, edges: Sequence[str]) -> list[str]:
    """ "up to A", "A to B", ..., "above Z"."""
    between = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
    texts = [f"up to {edges[0]}", *between, f"above {edges[-1]}"]
    return [f"{text} {unit}".strip() for text in texts]


def clevr_count(example):
    return tf.shape(example["objects"]["pixel_coords"])[0] - 3


def clevr_distance(example):
    """Depth of the object closest to the camera, in bins; the third pixel coordinate is depth."""
    depth = tf.reduce_min(example["objects"]["pixel_coords"][:, 2])
    return bin_of(depth, (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def kitti_distance(example):
    """Depth in metres of the closest car, van or truck, in bins; 1000 if there is none."""
    is_vehicle = example["objects"]["type"] < 3
    depths = tf.boolean_mask(example["objects"]["location"][:, 2], is_vehicle)
    return bin_of(tf.reduce_min(tf.concat([depths, [1000.0]], axis=0)), (-100.0, 8.0, 20.0, 999.0))


def merged(key: str, classes: int, groups: int) -> Rule:
    """Merges neighbours among the `classes` values of a feature into `groups`, rounding down in
    float32 as published.
    """

    def label(example):
        value = tf.cast(example[key], tf.float32)
        return tf.cast(tf.math.floor(value / (classes / groups)), tf.int32)

    return Rule((key,), label, [f"{key.removeprefix('label_')} {i}" for i in range(groups)])


NO_LABEL = Rule((), lambda example: tf.zeros([], tf.int32), ())

# By the names in `vtab_tasks`.
RULES = {
    "clevr_count_all": Rule(("objects",), clevr_count, [f"{n} objects" for n in range(3, 11)]),
    "clevr_closest_object_distance": Rule(
        ("objects",), clevr_distance, bin_names("", ("8", "8.5", "9", "9.5", "10"))
    ),
    "kitti_closest_vehicle_distance": Rule(
        ("objects",), kitti_distance, [*bin_names("m", ("8", "20")), "no vehicle"]
    ),
    "dsprites_label_x_position": merged("label_x_position", 32, 16),
    "dsprites_label_orientation": merged("label_orientation", 40, 16),
}


def is_set(feature) -> bool:
    """Whether a feature is a sequence of classes."""
    import tensorflow_datasets as tfds

    return isinstance(feature, tfds.features.Sequence) and isinstance(
        feature.feature, tfds.features.ClassLabel
    )


def padded(labels):
    """int32 [MAX_LABELS]: the labels [n], then -1."""
    count = tf.shape(labels)[0]
    fits = image_ops.require(count <= MAX_LABELS, "an example has too many labels:", count)
    with tf.control_dependencies([fits]):
        return tf.pad(tf.cast(labels, tf.int32), [[0, MAX_LABELS - count]], constant_values=-1)


def of_feature(features, key: str) -> Rule:
    """The rule for a class feature, or for a sequence of them."""
    if is_set(features[key]):
        names = tuple(features[key].feature.names)
        return Rule((key,), lambda example: padded(example[key]), names, set_size=MAX_LABELS)
    return Rule((key,), lambda example: tf.cast(example[key], tf.int32), tuple(features[key].names))


def make_parse(features, image_key: str, rule: Rule, scale: int = 1) -> Callable:
    """f(serialized example) -> (encoded image, label int32).

    Args:
      features: of the TFDS data set.
      scale: factor for the pixels of a grey image, such as 255 if they are 0 and 1.
    """
    import tensorflow_datasets as tfds

    decoders = {image_key: tfds.decode.SkipDecoding()}
    partial = type(features)({key: features[key] for key in (image_key, *rule.keys)})

    def parse(record):
        example = partial.deserialize_example(record, decoders=decoders)
        image = example[image_key]
        if scale != 1:
            image = tf.io.encode_png(tf.io.decode_png(image, channels=1) * scale)
        return image, tf.cast(rule.label(example), tf.int32)

    return parse
