"""Whether the 1,000 examples of a task are those of VTAB-1k: by the keys that TFDS orders them by,
and their pixels.
"""

import concurrent.futures
import hashlib
import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data import images
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.data.sources.vtab_tasks import Task
from vit_jax.errors import UserError, one_line
from vit_jax.vtab import sprites

# SHA-256, first 16 digits, of the keys of train800 and val200, one a line. They follow by
# `tfds_order` from the keys of the whole data set, where these are known without it: numbers, or
# names in lists that TFDS has.
MANIFEST = {
    "cifar100": ("5b25ee0661c3bc4a", "93377e439662509b"),
    "svhn_cropped": ("901fe4f6d4f65bc8", "36ae944d2e322a4f"),
    "dsprites": ("54130b46ffd22579", "86005e8c04783edc"),
    "patch_camelyon": ("c1122cb7e413b8b3", "b3998b44bc8423a1"),
    "clevr": ("5dc1033102716488", "9a9150228251ccef"),
    "sun397/tfds": ("bbfe318c912bf278", "ed3f4079a4f342a7"),
    "eurosat/rgb": ("7dac90dec1b73063", "5c9a3ab3702faf20"),
    "resisc45": ("7c42d524f21f8a68", "2a2bb0da49b4bb17"),
}
SUPPOSED = (
    "eurosat/rgb",
    "resisc45",
)  # of these, on the supposition that files are numbered from 1 on
CHUNK, THREADS = 100, 4  # records held at a time, and decoded at a time
NAMES = ("id", "file_name", "image/file_name", "filename", "name")  # features that name an example
FACTORS = tuple(f"label_{name}" for name in sprites.NAMES)


def key_of(builder: str, example: dict[str, np.ndarray]) -> str | None:
    """What TFDS orders an example by, from its features; None where they do not tell."""
    if builder == "dsprites":
        return str(np.ravel_multi_index([int(example[name]) for name in FACTORS], sprites.SIZES))
    name = next((example[key].decode() for key in NAMES if key in example), None)
    if name is None:
        return None
    if builder in ("cifar100", "svhn_cropped"):  # as train_00042
        return str(int(re.sub(r"\D", "", name)))
    if builder in ("eurosat/rgb", "resisc45"):
        return f"{name.rpartition('_')[0]}_{name}"
    return name


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def features_of(
    source, found: vtab_source.Found, names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    """The values of the features `names` of all records."""
    features = found.builder.info.features
    if not names:
        return [{}] * len(source)
    partial = type(features)({name: features[name] for name in names})
    parse = tf.function(partial.deserialize_example, input_signature=[tf.TensorSpec([], tf.string)])
    return [
        {name: value.numpy() for name, value in parse(record).items()}
        for first in range(0, len(source), CHUNK)
        for record in source.read(range(first, min(first + CHUNK, len(source))))
    ]


def ids(name: str, task: Task, found: vtab_source.Found) -> dict:
    """Of train800val200: a digest `ids`, and `is_known`, whether they are VTAB's (None: that can't
    be known).
    """
    source = vtab_source.open_part(name, task, found, "train800val200")
    wanted = (*NAMES, *(FACTORS if task.builder == "dsprites" else ()))
    examples = features_of(
        source, found, [key for key in wanted if key in found.builder.info.features]
    )
    keys, known = (
        [key_of(task.builder, example) for example in examples],
        MANIFEST.get(task.builder),
    )
    parts = None if None in keys else (digest(keys[:800]), digest(keys[800:]))
    is_known = parts == known if known and parts else None
    if task.builder in SUPPOSED and not is_known:
        is_known = None
    return dict(ids=parts and "-".join(parts), is_known=is_known)


def pixels(name: str, task: Task, found: vtab_source.Found) -> str:
    """A digest of the decoded images of train800val200 and their labels.

    Raises:
      UserError: one can't be decoded.
    """
    source, whole = vtab_source.open_part(name, task, found, "train800val200"), hashlib.sha256()

    @tf.function(input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)])
    def parse(record, i):
        encoded, label = source.parse(record, i)
        return images.decode(encoded), label

    def one(record: bytes, i: int) -> tuple[np.ndarray, int]:
        try:
            image, label = parse(record, i)
        except tf.errors.OpError as error:
            raise UserError(
                f"{source.describe(i)} can't be decoded ({one_line(error)[:100]}): prepare the "
                "data set again"
            ) from None
        return image.numpy(), int(label)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(source), CHUNK):
            numbers = range(first, min(first + CHUNK, len(source)))
            for image, label in pool.map(one, source.read(numbers), numbers):
                whole.update(repr((image.shape, label)).encode() + image.tobytes())
    return whole.hexdigest()[:16]
