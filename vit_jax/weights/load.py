"""Weights from anywhere: finds their location, their format, and the model that they are for."""

import dataclasses
import pathlib
import re
import tempfile

import numpy as np

from vit_jax import config as configs
from vit_jax.checkpoints import read as checkpoint
from vit_jax.cli import regular
from vit_jax.cli.log import silent
from vit_jax.errors import UserError, one_line
from vit_jax.models import classifier, create
from vit_jax.models.mae import MaskedAutoencoder
from vit_jax.weights import autoencoder
from vit_jax.weights.adapt import HEADS, adapt_and_report, resample_posemb
from vit_jax.weights.formats import (
    big_vision,
    download,
    fetch,
    huggingface,
    npz,
    safetensors_folder,
    timm,
    vision_transformer,
)
from vit_jax.weights.formats.weights import Weights, naming
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.scan_layout import flatten, stack_blocks, unstack_blocks

__all__ = ["Weights", "build", "features", "from_pretrained", "read", "resample_posemb"]

# Errors that a config.json with values of wrong types can cause.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


# Fields of a saved model that say how it was trained, not what it is; the softmax keeps the dtype
# that it was trained with.
INFERENCE = {
    name: key.default
    for name, key in configs.MODEL.items()
    if not key.state and name != "softmax_dtype"
}


BLOCK = re.compile(r"Transformer/encoderblock_\d+/|MixerBlock_\d+/|block\d+/unit\d+/")


def check_blocks(model: classifier.Classifier, params: dict) -> None:
    """Raises ValueError if a model has another number of blocks than its parameters: building one
    with thousands takes minutes.
    """
    found = {match[0] for match in map(BLOCK.match, params) if match}
    declared = model.depth + sum(getattr(model, "units", None) or model.stem_units or ())
    if len(found) != declared:
        raise ValueError(f"it declares {declared} blocks, but the parameters are of {len(found)}")


def read_checkpoint(path, grid=None) -> Weights:
    """Weights and architecture of our own workdir or checkpoint; a `grid` that contradicts them is
    an error.
    """
    folder = checkpoint.find(path)
    meta = checkpoint.read_meta(folder)
    with silent("absl"):  # Orbax warns of files that ours do without
        params = checkpoint.read_params(folder)
    try:
        model = create.create(None, **meta["model"])
        extra = meta.get("extra", ())  # what the objective of the run had besides
        fields = create.fields(model)
        fields |= {name: value for name, value in INFERENCE.items() if name in fields}
        if "Transformer" in params:
            params = unstack_blocks(params)
        class_names = tuple(meta["class_names"]) if model.num_classes else ()
        config = meta["config"]
        objective = config.get("objective", "")
        weights = Weights(
            flatten({name: value for name, value in params.items() if name not in extra}),
            fields,
            class_names,
            config.get("loss", ""),
            step=int(folder.name) if folder.name.isdecimal() else None,
            objective=objective,
            settings=config.get(objective, {}),
            extra=flatten({name: value for name, value in params.items() if name in extra}),
        )
        if not configs.is_own(model.architecture):
            check_blocks(model, weights.params)
    except MALFORMED as error:
        raise UserError(
            f"{folder}/meta is damaged ({one_line(error)}): choose another checkpoint"
        ) from error
    if grid is not None and create.pair(grid) != model.grid:
        raise UserError(
            f"{path} is for {model.grid[0]} x {model.grid[1]} patch tokens: remove grid={grid}"
        )
    return weights


def kind_of_file(path) -> str:
    """ "npz" or "safetensors", by the first bytes; a UserError for any other file."""
    size = path.stat().length
    with regular.open_file(path) as file:
        start = file.read(9)
    if start.startswith(b"PK"):
        return "npz"
    if len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
        return "safetensors"
    if not size:
        problem = "it is empty"
    elif start[:1] == b"\x80":
        problem = "it is a pickle, which may run code"
    else:
        problem = "it has another format, or is damaged"
    raise UserError(
        f"{path} can't be read as .npz or .safetensors: {problem}; fetch the file again, or save "
        "it as one of these"
    )


def read_arrays(location, path, grid, image_size, num_heads, posemb) -> Weights:
    """Weights from a file, or from a folder of timm or Hugging Face."""
    if not location.is_dir() and kind_of_file(location) == "npz":
        arrays = npz.read(location, big_vision.tower)
        if big_vision.is_big_vision(arrays):
            return big_vision.read(arrays, path, grid, image_size)
        return vision_transformer.read(arrays, path, grid, image_size, posemb)
    settings = (path, grid, image_size, num_heads)
    weights = None
    try:
        arrays, config, processor = safetensors_folder.read(location)
        if timm.PATCHES in arrays:
            weights = timm.read(arrays, config, *settings)
        elif huggingface.is_huggingface(arrays):
            weights = huggingface.read(arrays, config, processor, *settings)
        if weights:  # values that no model accepts are found here
            model = create.create(**weights.fields)
            model.normalize(np.zeros((1, 1, 1, 3), np.uint8))
            return weights
    except MALFORMED as error:
        raise UserError(
            f"config.json of {path}, or a file beside it, is damaged "
            f"({one_line(error)[:160]}): fetch it again"
        ) from error
    raise UserError(
        f"{path} is not a ViT of timm or Hugging Face: it has {', '.join(sorted(arrays)[:3])}, "
        "..., but neither patch_embed.proj.weight nor "
        "embeddings.patch_embeddings.projection.weight"
    )


def read(path, grid=None, image_size=None, num_heads=None, posemb=None) -> Weights:
    """Reads weights in any supported format, which is detected from the content.

    Args:
      path: a workdir or checkpoint of ours, an .npz, a .safetensors, or a folder with config.json
        and model.safetensors; local, gs:// or https://; or a name of published weights, such as
        "augreg/B_16" or "hf:timm/vit_base_patch16_224.augreg_in21k" (docs/published_weights.md).
      grid: (h, w) of the saved patch tokens, if the file does not show it.
      image_size: determines the grid in the same way, if it has exactly as many tokens.
      num_heads: if the file does not show it.
      posemb: position embedding of the model, if a file of vision_transformer has none.

    Raises:
      UserError: it can't be read, or the file does not show enough.
    """
    if image_size is not None:
        image_size = create.pair(image_size)
    name = download.shown(path)
    with tempfile.TemporaryDirectory() as folder, naming(name):
        location = fetch.locate(path, pathlib.Path(folder))
        if location.is_dir() and not safetensors_folder.is_folder(location):
            if not checkpoint.is_ours(location):
                raise UserError(
                    f"{name} has neither a checkpoint of ours nor model.safetensors: give a "
                    "workdir, a checkpoint, or a folder of timm or Hugging Face (PyTorch pickles, "
                    ".bin and .pth, are never read)"
                )
            weights = read_checkpoint(location, grid)
        else:
            weights = read_arrays(location, name, grid, image_size, num_heads, posemb)
    return dataclasses.replace(weights, path=name)


def from_pretrained(
    path,
    num_classes=None,
    image_size=None,
    grid=None,
    allow: str = "",
    objective: str | None = None,
    **overrides,
) -> Pretrained | tuple[MaskedAutoencoder, dict]:
    """Loads weights and creates the model that they are for.

    Args:
      path: a workdir or checkpoint of ours, an .npz of vision_transformer or big_vision, a
        .safetensors of timm or Hugging Face or a folder with one and its config.json; local, gs://
        or https://; or a name of published weights, see `read`.
      num_classes: of a new zero head; drops pre_logits unless `pre_logits=True`.
      image_size: side or (h, w) in pixels; resamples the position embedding.
      grid: (h, w) of the saved patch tokens, if the file does not show it.
      allow: regular expression for names of parameters that may be missing (they are initialised)
        or unused (they are dropped).
      objective: "mae" for the whole autoencoder that the weights were trained as, with its decoder.
      **overrides: fields of the model, such as `pool`, `patch_size`, `gelu`, `dtype`; see
        `models.create.create`. Of an autoencoder also `mask_ratio` and `norm_pixels`.

    Returns:
      (model, params): logits = model.apply({"params": params}, image). The pair also has the class
      names and the report of all changes, which are logged, too. With objective="mae":
      (autoencoder, params), as `train.objectives.mae.forward` takes them.

    Raises:
      UserError: the file can't be read or does not fit.
    """
    weights = read(path, grid, image_size, overrides.get("num_heads"), overrides.get("posemb"))
    if objective is not None:
        autoencoder.check_wanted(objective, num_classes, allow)
        return autoencoder.build(weights, image_size, **overrides)
    return build(weights, num_classes, image_size, allow, **overrides)


def pooled_as(weights: Weights, pool: str | None) -> dict:
    """Fields of the weights' model with another pooling; None: with its own.

    Then timm's models and autoencoders still have a class token, as in timm and in the published
    code; others do not.
    """
    fields = weights.fields
    if fields["architecture"] != "vit" or pool in (None, fields["pool"]):
        return fields
    keeps_token = weights.format == "timm" or weights.objective == "mae"
    has_token = keeps_token and "cls" in weights.params
    return fields | dict(pool=pool, class_token=has_token)


def build(
    weights: Weights, num_classes=None, image_size=None, allow: str = "", **overrides
) -> Pretrained:
    """(model, params) of loaded weights: see `from_pretrained`."""
    fields = pooled_as(weights, overrides.get("pool")) | overrides
    if num_classes is not None:
        fields |= dict(num_classes=num_classes, head_bias=overrides.get("head_bias", 0.0))
        if weights.fields.get("pre_logits"):
            fields["pre_logits"] = overrides.get("pre_logits", 0)
    if overrides.get("pre_logits") is True and weights.fields.get("pre_logits"):
        fields["pre_logits"] = weights.fields["pre_logits"]
    if image_size is not None:
        fields["image_size"] = image_size
    model = create.create(**fields)
    has_new_head = num_classes is not None
    params, report = adapt_and_report(weights, model, has_new_head, allow)
    if model.scan:
        params = stack_blocks(params)
    class_names = () if has_new_head else weights.class_names
    loss = "" if has_new_head else weights.loss
    return Pretrained(model, params, class_names, report, weights.path, loss)


def features(model: classifier.Classifier, params: dict, image):
    """The input of the head: image [batch, H, W, 3] -> [batch, embed]."""
    headless = {name: leaf for name, leaf in params.items() if name not in HEADS}
    return model.clone(num_classes=0).apply({"params": headless}, image)
