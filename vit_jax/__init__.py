"""Pretrain, fine-tune and evaluate Vision Transformers in JAX, from one device to a pod.

    import vit_jax

    pretrained = vit_jax.from_pretrained("my_run/final")
    vit_jax.classify(pretrained, ["cat.jpg", "dog.jpg"])

`from_pretrained` loads weights of any format, `classify` and `embed` apply them to images,
`preprocess`, `features` and `intermediates` are the steps of which these consist, and `fit` and
`score` train and evaluate what a config says. A mistake in what they are given is a `UserError`, of
one line: what is wrong, where, and what to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax import errors
from vit_jax.errors import UserError

if TYPE_CHECKING:
    import jax
    import ml_collections
    import numpy as np
    from PIL import Image

    from vit_jax.evaluate.predictions import Prediction
    from vit_jax.models.classifier import Classifier
    from vit_jax.weights.pretrained import Pretrained

    OneImage = str | os.PathLike | Image.Image | np.ndarray
    Images = OneImage | Sequence[OneImage]

__version__ = "0.1.0"

__all__ = [
    "UserError",
    "classify",
    "create_model",
    "embed",
    "features",
    "fit",
    "from_pretrained",
    "intermediates",
    "load_config",
    "preprocess",
    "score",
]

# Before JAX sets it to 1: TensorFlow would log Python's traceback for every damaged image, and more
# that concerns nobody. What fails is raised all the same.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# python -m vit_jax.COMMAND, whose imports follow
if sys.argv[:1] == ["-m"] and any(f"{word}.".startswith("vit_jax.") for word in sys.orig_argv):
    errors.end_on_signals()


def __dir__() -> list[str]:
    return __all__


# --- models and weights ---


def create_model(
    variant: str | None = None,
    num_classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    **overrides: Any,
) -> Classifier:
    """Builds a model, without parameters.

        model = vit_jax.create_model("Ti/16", num_classes=10)
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]

    Args:
      variant: a name such as "B/16", "R50+B/16" or "Mixer-B/16"; None to give every size by
        keyword.
      num_classes: of the head; 0 for none, so that the model returns features.
      image_size: side in pixels, or (height, width).
      overrides: any field of the model, such as `pool`, `dtype` or `depth`; see
        `vit_jax.models.vit.VisionTransformer`.

    Returns:
      A Flax module: image [batch, height, width, 3], float32 and normalised, to logits [batch,
      classes], float32.

    Raises:
      UserError: the name or a field is unknown, or they do not fit together.
    """
    from vit_jax.models import create

    return create.create(variant, num_classes, image_size, **overrides)


def from_pretrained(
    path: str | os.PathLike,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    **overrides: Any,
) -> Pretrained:
    """Loads weights, and builds the model that they are for.

        model, params = vit_jax.from_pretrained("my_run/final")
        logits = model.apply({"params": params}, vit_jax.preprocess(model, "cat.jpg"))

    The pair that is returned also has `class_names` and `report`, and a notebook shows it as a
    table: what was loaded, resampled, dropped and new.

    Args:
      path: a workdir or checkpoint of ours, an .npz of vision_transformer or big_vision, a
        .safetensors of timm or Hugging Face or a folder with one and its config.json; local, gs://
        or https://; or a name of published weights, such as "augreg/B_16", a model of timm, or
        "hf:ORG/NAME" of the Hugging Face hub.
      num_classes: of a new head, which starts at zero; pre_logits are dropped unless
        `pre_logits=True`.
      image_size: side or (height, width) in pixels; the position embedding is resampled.
      grid: (height, width) of the saved patch tokens, if the file does not show it.
      overrides: `allow`, a regular expression for names of parameters that may be missing (they are
        initialised) or unused (they are dropped); `objective="mae"`, for a masked autoencoder with
        its decoder; and any field of the model, see `create_model`.

    Returns:
      (model, params), with more attributes: see `vit_jax.weights.pretrained.Pretrained`.

    Raises:
      UserError: the weights can't be read or do not fit.
    """
    from vit_jax.weights import load

    return load.from_pretrained(path, num_classes, image_size, grid, **overrides)


# --- from images to results ---


def preprocess(model: Classifier, images: Images) -> jax.Array:
    """Prepares images as the weights expect them, as evaluation and prediction do.

        image = vit_jax.preprocess(model, ["cat.jpg", "dog.jpg"])

    Args:
      model: says how, by `model.preprocess` and more of its fields.
      images: one image or a list of them, of any size: paths, local or gs://; Pillow images; arrays
        [height, width, 3], uint8 or floats from 0 to 1, of which one with a batch axis counts as
        a list.

    Returns:
      [batch, height, width, 3], float32 and normalised: what `model.apply` and `features` take.

    Raises:
      UserError: one can't be read, or is an array of another shape or range.
    """
    from vit_jax.data import given_images

    return given_images.preprocess(model, images)


def classify(
    pretrained: Pretrained | tuple[Classifier, dict],
    images: Images,
    top_k: int = 5,
    batch_size: int = 32,
) -> list[list[Prediction]]:
    """The most probable classes of images, by name, in batches on all devices.

        for predictions in vit_jax.classify(pretrained, ["cat.jpg", "dog.jpg"]):
            print(predictions[0].name, predictions[0].probability)

    Args:
      pretrained: what `from_pretrained` returns; the classes of a plain pair (model, params) are
        called by their numbers.
      images: as `preprocess` takes them.
      top_k: the number of classes for each image.
      batch_size: images that are computed at once, on all devices together.

    Returns:
      For each image `top_k` predictions (name, probability, label), the most probable first.

    Raises:
      UserError: an image can't be read, or the model has no head.
    """
    from vit_jax.evaluate import predictions

    return predictions.classify(pretrained, images, top_k, batch_size)


def embed(
    pretrained: Pretrained | tuple[Classifier, dict], images: Images, batch_size: int = 32
) -> np.ndarray:
    """Features of images, in batches on all devices.

        x = vit_jax.embed(pretrained, ["cat.jpg", "dog.jpg"])

    Args:
      pretrained: what `from_pretrained` returns, or any pair (model, params).
      images: as `preprocess` takes them.
      batch_size: images that are computed at once, on all devices together.

    Returns:
      [images, embed], float32: what the head reads, as `features` returns it.

    Raises:
      UserError: an image can't be read.
    """
    from vit_jax.evaluate import predictions

    return predictions.embed(pretrained, images, batch_size)


def features(model: Classifier, params: dict, image: jax.Array) -> jax.Array:
    """What the head reads, for images that are prepared already; may be traced by `jax.jit`.

        x = vit_jax.features(model, params, vit_jax.preprocess(model, "cat.jpg"))

    Args:
      image: [batch, height, width, 3], float32 and normalised.

    Returns:
      [batch, embed], float32.

    Raises:
      UserError: the image has another shape or dtype.
    """
    from vit_jax.weights import load

    return load.features(model, params, image)


def intermediates(model: Classifier, params: dict, image: jax.Array) -> dict[str, Any]:
    """Everything on the way from images to logits: tokens, attention weights, feature maps.

        found = vit_jax.intermediates(model, params, vit_jax.preprocess(model, "cat.jpg"))
        to_patches = found["attention"][-1, 0, :, 0, found["num_prefix"]:]

    The results do not depend on `scan`, `remat` and how attention is computed: attention weights
    are computed by themselves even with a fused kernel, so the length squared must fit in memory.

    Args:
      image: [batch, height, width, 3], float32 and normalised.

    Returns:
      What the architecture has of these. Length counts prefix tokens and patches.

      - `tokens`: [depth + 1, batch, length, embed]: the input of the first layer, with its position
        embedding, and the output of every layer (ViT, Mixer).
      - `attention`: [depth, batch, heads, length, length], float32; each row, of a query, sums to 1
        (ViT).
      - `pooling_attention`: [batch, heads, 1, patches], float32 (ViT with attention pooling).
      - `stem`: feature map of the first convolutions, [batch, h, w, channels] (hybrids, BiT).
      - `stages`: list of the feature maps of the stages (BiT).
      - `encoded`: tokens, or the last feature map, after the final normalisation.
      - `pre_logits`: [batch, embed], what the head reads.
      - `logits`: [batch, classes].
      - `grid`: (height, width) of the patch tokens, or of the last feature map.
      - `num_prefix`: how many tokens come before the patches.

    Raises:
      UserError: the image has another shape or dtype.
    """
    from vit_jax.models import intermediates as recorded

    return recorded.intermediates(model, params, image)


# --- runs ---


def load_config(
    config: str | os.PathLike | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
    """Makes the checked config of a run.

        config = vit_jax.load_config("configs/demo.py", {"optim.lr": 1e-3, "total_steps": 100})

    Args:
      config: FILE.py or FILE.py:ARG, as `--config` of the commands; or a dict of keys, such as a
        config that was loaded before.
      overrides: keys with other values, nested or with dots.

    Returns:
      All keys with their values; those that have no effect are missing.

    Raises:
      UserError: a key is unknown, its value is wrong or impossible, or it has no effect.
    """
    from vit_jax import config as configs

    return configs.load_in_python(config, {} if overrides is None else overrides)


def fit(
    config: str | os.PathLike | Mapping[str, Any],
    workdir: str | os.PathLike,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Trains what a config says, or continues the run in `workdir`, like the command `train`.

        short = {"total_steps": 20, "optim.warmup_steps": 2}
        metrics = vit_jax.fit("configs/demo.py", "demo_run", short)

    It takes over no signals: an interrupted cell leaves a workdir that the same call continues from
    its last checkpoint.

    Args:
      config, overrides: as `load_config` takes them.
      workdir: where the run writes, local or gs://.

    Returns:
      The last value of every metric, as metrics.jsonl names them, such as "train/loss" and
      "eval/test/top1".

    Raises:
      UserError: the config, its data or the workdir can't be used, or the run can't go on.
    """
    from vit_jax.train import fit as runs

    return runs.fit(load_config(config, overrides), os.fspath(workdir))


def score(
    config: str | os.PathLike | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike | None = None,
) -> dict[str, float]:
    """Evaluates weights on the data that a config says, like the command `evaluate`.

        metrics = vit_jax.score("configs/evaluate.py:digits,test", {"init_from": "demo_run"})

    Args:
      config, overrides: as `load_config` takes them; `init_from` has the weights.
      out: a folder, local or gs://, for what the model gets wrong; docs/mistakes.md says what is in
        it.

    Returns:
      The metrics by name, such as "eval/test/top1".

    Raises:
      UserError: the config, the data or the weights can't be used.
    """
    from vit_jax.evaluate import __main__ as command

    return command.score(load_config(config, overrides), os.fspath(out) if out else "")
