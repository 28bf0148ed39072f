"""Whether the 1,000 examples of a task are those of VTAB-1k: by the keys that TFDS sorts them by,
and by their pixels.
"""

import concurrent.futures
import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from vit_jax.data import images
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.data.sources.source import Source
from vit_jax.data.sources.vtab_tasks import Task
from vit_jax.errors import UserError, one_line

# SHA-256, first 16 digits, of the keys of train800 and of val200, one a line. They follow from the
# order of TFDS (by the MD5 of a key) and the keys of the whole data set, if these are known without
# the data: numbers, or names in lists that TFDS has.
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
ASSUMED = ("eurosat/rgb", "resisc45")  # these assume that the files of a class are numbered from 1
CHUNK = 100  # records in memory at a time
THREADS = 4  # that decode images
NAMES = ("id", "file_name", "image/file_name", "filename", "name")  # features that name an example
# Of dSprites, whose examples are numbered by their latents: feature -> number of values.
LATENTS = {
    "label_shape": 3,
    "label_scale": 6,
    "label_orientation": 40,
    "label_x_position": 32,
    "label_y_position": 32,
}


def key_of(builder: str, example: dict[str, np.ndarray]) -> str | None:
    """The key that TFDS sorts an example by, from its features; None if they don't contain it."""
    if builder == "dsprites":
        latents = [int(example[name]) for name in LATENTS]
        return str(np.ravel_multi_index(latents, tuple(LATENTS.values())))
    name = next((example[key].decode() for key in NAMES if key in example), None)
    if name is None:
        return None
    if builder in ("cifar100", "svhn_cropped"):  # such as train_00042
        return str(int(re.sub(r"\D", "", name)))
    if builder in ("eurosat/rgb", "resisc45"):
        return f"{name.rpartition('_')[0]}_{name}"
    return name


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def chunks(source: Source) -> Iterator[range]:
    """The numbers of all records, `CHUNK` at a time."""
    for first in range(0, len(source), CHUNK):
        yield range(first, min(first + CHUNK, len(source)))


def read_features(source: Source, features, names: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """The values of the features `names` of all records."""
    if not names:
        return [{}] * len(source)
    partial = type(features)({name: features[name] for name in names})
    parse = tf.function(partial.deserialize_example, input_signature=[tf.TensorSpec([], tf.string)])
    return [
        {name: value.numpy() for name, value in parse(record).items()}
        for numbers in chunks(source)
        for record in source.read(numbers)
    ]


def ids(name: str, task: Task, found: vtab_source.Found) -> dict:
    """Of train800val200: a digest `ids`, and `is_known`, whether the examples are those of VTAB-1k
    (None: can't be known).
    """
    source = vtab_source.open_part(name, task, found, "train800val200")
    features = found.builder.info.features
    candidates = [*NAMES, *LATENTS] if task.builder == "dsprites" else NAMES
    examples = read_features(source, features, [key for key in candidates if key in features])
    keys = [key_of(task.builder, example) for example in examples]
    if None in keys:
        return dict(ids=None, is_known=None)
    parts = (digest(keys[:800]), digest(keys[800:]))
    is_known = None
    if task.builder in MANIFEST:
        is_known = parts == MANIFEST[task.builder]
    if task.builder in ASSUMED and not is_known:
        is_known = None
    return dict(ids="-".join(parts), is_known=is_known)


def pixels(name: str, task: Task, found: vtab_source.Found) -> str:
    """A digest of the decoded images of train800val200 and their labels.

    Raises:
      UserError: one can't be decoded.
    """
    source = vtab_source.open_part(name, task, found, "train800val200")
    total = hashlib.sha256()

    @tf.function(input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)])
    def parse(record, i):
        encoded, label = source.parse(record, i)
        return images.decode(encoded), label

    def decode(record: bytes, i: int) -> tuple[np.ndarray, int]:
        try:
            image, label = parse(record, i)
        except tf.errors.OpError as error:
            raise UserError(
                f"{source.describe(i)} can't be decoded ({one_line(error)[:100]}): prepare the "
                "data set again"
            ) from None
        return image.numpy(), int(label)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for numbers in chunks(source):
            for image, label in pool.map(decode, source.read(numbers), numbers):
                total.update(repr((image.shape, label)).encode() + image.tobytes())
    return total.hexdigest()[:16]
