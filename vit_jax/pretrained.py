"""Weights from elsewhere: reading published files, the architecture behind them, and fitting them to a model."""

import dataclasses
import difflib
import math
import re
import zipfile
import zlib

import jax
import ml_dtypes
import numpy as np
import scipy.ndimage
from etils import epath

from vit_jax import checkpoint
from vit_jax.errors import UserError, one_line
from vit_jax.layout import flatten, stack_blocks, unflatten, unstack_blocks
from vit_jax.models import create, vit

POSEMB = "Transformer/posembed_input/pos_embedding"

# Linen numbers the sub-modules of a block by class; published names count them through.
LINEN_NAMES = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters by published name (one entry per layer), and the constructor arguments of the model they fit."""

    params: dict[str, np.ndarray]
    fields: dict
    class_names: tuple[str, ...] = ()
    loss: str = ""  # that they were trained with, where it is known


def resample_posemb(posemb, new_grid, old_grid=None, num_prefix: int = 1):
    """Resamples a position embedding as published: linear along each axis, corners aligned; prefix rows untouched.

    Args:
      posemb: [1, length, embed] or [length, embed].
      new_grid: (h, w) of the patch tokens wanted.
      old_grid: (h, w) of those held; None: a square.
      num_prefix: rows before the patch tokens.

    Raises:
      UserError: the rows do not fill the old grid.
    """
    posemb = np.asarray(posemb)
    rows = posemb.reshape(-1, posemb.shape[-1])
    prefix, patches = rows[:num_prefix], rows[num_prefix:]
    if old_grid is None:
        side = math.isqrt(len(patches))
        old_grid = (side, side)
    if math.prod(old_grid) != len(patches):
        raise UserError(
            f"a position embedding of {len(rows)} rows, {num_prefix} of them prefix, does not fill a grid of "
            f"{old_grid[0]} x {old_grid[1]}: give grid=(h, w)"
        )
    if tuple(new_grid) == tuple(old_grid):
        return posemb
    grid = patches.reshape(*old_grid, -1)
    for axis, size in enumerate(new_grid):
        grid = resample_axis(grid, size, axis)
    rows = np.concatenate([prefix, grid.reshape(math.prod(new_grid), -1)])
    return rows.reshape(*posemb.shape[:-2], *rows.shape).astype(posemb.dtype)


def resample_axis(grid: np.ndarray, size: int, axis: int) -> np.ndarray:
    """`size` equally spaced samples from the first to the last along one axis."""
    old = grid.shape[axis]
    if size == old:
        return grid
    zoom = [1.0] * grid.ndim
    zoom[axis] = size / old
    return scipy.ndimage.zoom(grid, zoom, order=1)


def read_npz(path) -> dict[str, np.ndarray]:
    """Reads a published .npz and gives its parameters their published names.

    Raises:
      UserError: the file is missing, damaged, no .npz, or holds pickles or no ViT.
    """
    try:
        with epath.Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            held = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: correct the path of the weights") from None
    except (
        ValueError,
        TypeError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
        NotImplementedError,  # a zip compression that Python lacks
        MemoryError,
    ) as error:
        raise UserError(f"{path} can't be read as .npz ({one_line(error)[:160]}): fetch the file again") from error
    params = {}
    for name, value in held.items():
        if not isinstance(value, np.ndarray):
            raise UserError(f"{path} has the entry {name}, which is no array: these are not the weights of a ViT")
        if value.dtype.kind not in "fV" or not value.ndim:
            raise UserError(
                f"{path} has {name} of type {value.dtype}, shape {value.shape}: weights are arrays of floats"
            )
        if value.dtype.kind == "V":  # bfloat16, which .npz stores as raw bytes
            value = value.view(ml_dtypes.bfloat16) if value.dtype.itemsize == 2 else value
        value = value.astype(np.float32)
        parts = name.split("/")
        if any(part.startswith("encoderblock") for part in parts):
            parts = [LINEN_NAMES.get(part, part) for part in parts]
        is_group_norm = len(parts) > 1 and re.fullmatch(r"gn_\w+|gn\d", parts[-2])  # stored as [1, 1, 1, C]
        params["/".join(parts)] = value.reshape(-1) if is_group_norm else value
    return params


def infer_fields(params: dict[str, np.ndarray], path) -> dict:
    """Constructor arguments that the names and shapes of published parameters show; the grid where it is a square.

    Raises:
      UserError: these are not the parameters of a ViT.
    """

    def shape(name, rank):
        if name in params and (params[name].ndim != rank or not params[name].size):
            raise UserError(f"{path} has {name} of shape {params[name].shape}: these are not the weights of a ViT")
        if name not in params:
            close = difflib.get_close_matches(name, params, n=1)
            hint = f"the nearest name is {close[0]}" if close else f"it has {len(params)} other names"
            raise UserError(f"{path} has no {name} ({hint}): these are not the weights of a ViT")
        return params[name].shape

    def outputs(layer):
        """Width of a layer, 0 where nothing of it is there; `compare` names what is missing of it."""
        return next((value.shape[-1] for name, value in params.items() if name.startswith(f"{layer}/")), 0)

    kernel = shape("embedding/kernel", 4)
    blocks = {int(match[1]) for name in params if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    if blocks != set(range(len(blocks))) or not blocks:
        raise UserError(f"{path} has the encoder blocks {sorted(blocks)}: some are missing, fetch the file again")
    block = "Transformer/encoderblock_0"
    fields = dict(
        width=kernel[-1],
        depth=len(blocks),
        mlp_dim=shape(f"{block}/MlpBlock_3/Dense_0/kernel", 2)[-1],
        num_heads=shape(f"{block}/MultiHeadDotProductAttention_1/query/kernel", 3)[1],
        patch_size=tuple(kernel[:2]),
        pool="tok" if "cls" in params else "map" if "MAPHead_0/probe" in params else "gap",
        posemb="learn" if POSEMB in params else "sincos2d",
        pre_logits=outputs("pre_logits"),
        num_classes=outputs("head"),
    )
    if "conv_root/kernel" in params:
        units = [len({name.split("/")[1] for name in params if name.startswith(f"block{i}/")}) for i in range(1, 9)]
        fields |= dict(
            stem_units=tuple(count for count in units if count), stem_width=params["conv_root/kernel"].shape[-1]
        )
    return fields


def read_checkpoint(path) -> Weights:
    """Weights and architecture from a workdir or checkpoint of ours."""
    folder = checkpoint.find(path)
    meta = checkpoint.read_meta(folder)
    params = unstack_blocks(checkpoint.read_params(folder))
    try:
        fields = meta["model"] | dict(scan=False, remat="none", dtype="float32", dropout=0.0, droppath=0.0)
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        create.create(**fields)
        return Weights(flatten(params), fields, tuple(meta["class_names"]), meta["config"]["loss"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{folder}/meta is damaged ({one_line(error)}): choose another checkpoint") from error


def read(path, grid=None, image_size=None) -> Weights:
    """Reads a workdir or checkpoint of ours, or a published .npz.

    Args:
      path: local or gs://.
      grid: (h, w) of the patch tokens, where the file can't tell.
      image_size: settles the grid likewise, when it has exactly as many tokens.

    Raises:
      UserError: it can't be read, or the grid is neither given nor a square.
    """
    try:
        location = checkpoint.absolute(path)
        exists = location.exists()
    except Exception as error:  # every store has errors of its own
        raise UserError(f"{path} can't be reached ({one_line(error)[:160]}): check path, network and access") from error
    if not exists:
        raise UserError(f"{path} does not exist: give a workdir, a checkpoint folder, or a published .npz file")
    if location.is_dir():
        return read_checkpoint(location)
    params = read_npz(location)
    fields = infer_fields(params, path)
    return Weights(params, fields | dict(image_size=held_image_size(params, fields, path, grid, image_size)))


def held_image_size(params, fields: dict, path, grid, image_size) -> tuple[int, int]:
    """The image size that the held position embedding is for."""
    model = create.create(**fields | dict(image_size=2**14))
    cell = [model.stem_stride * side for side in model.patch_size]
    if POSEMB not in params:
        return create.pair(image_size or 224)
    tokens = params[POSEMB].shape[-2] - model.num_prefix if params[POSEMB].ndim > 1 else 0
    if tokens < 1:
        raise UserError(f"{path} has a position embedding of shape {params[POSEMB].shape}: it has no patch rows")
    grid = create.pair(grid) if grid is not None else None
    wanted = model.clone(image_size=create.pair(image_size)).grid if image_size else None
    side = math.isqrt(tokens)
    if grid is None and wanted is not None and math.prod(wanted) == tokens:
        grid = wanted
    if grid is None and side * side == tokens:
        grid = (side, side)
    if grid is None or math.prod(grid) != tokens:
        raise UserError(
            f"{path} has {tokens} patch tokens, {'no square' if grid is None else f'not {grid[0]} x {grid[1]}'}: "
            "give grid=(h, w), or the image_size= that it was trained at"
        )
    return grid[0] * cell[0], grid[1] * cell[1]


def adapt(weights: Weights, model: vit.VisionTransformer, new_head: bool) -> dict:
    """Fits parameters to `model`: resampled position embedding, another prefix, a new zero head, no pre_logits.

    Args:
      weights: what was read.
      model: where they go; its sizes must be those of the weights.
      new_head: start the head at zero even when its shape would fit.

    Returns:
      The parameter tree (numpy, loop layout).

    Raises:
      UserError: a parameter is missing, left over, or of another shape.
    """
    held = create.create(**weights.fields)
    params = dict(weights.params)
    if POSEMB in params and model.posemb == "learn":
        posemb = params[POSEMB].reshape(1, -1, params[POSEMB].shape[-1])
        posemb = resample_posemb(posemb, model.grid, held.grid, held.num_prefix)
        if held.num_prefix > model.num_prefix:
            posemb = posemb[:, held.num_prefix :]
        elif held.num_prefix < model.num_prefix:
            posemb = np.concatenate([np.zeros_like(posemb[:, :1]), posemb], axis=1)
        params[POSEMB] = posemb
    if held.num_prefix > model.num_prefix:
        params.pop("cls", None)
    elif held.num_prefix < model.num_prefix:
        params["cls"] = np.zeros((1, 1, model.width), np.float32)
    if not model.pre_logits:
        params = {name: leaf for name, leaf in params.items() if not name.startswith("pre_logits/")}
    if new_head or not model.num_classes:
        params = {name: leaf for name, leaf in params.items() if not name.startswith("head/")}
        if model.num_classes:
            params["head/kernel"] = np.zeros((model.pre_logits or model.width, model.num_classes), np.float32)
            params["head/bias"] = np.full((model.num_classes,), model.head_bias, np.float32)
    compare(params, abstract_params(model.clone(scan=False)))
    return unflatten(params)


def abstract_params(model: vit.VisionTransformer) -> dict:
    """The parameter tree of a model as ShapeDtypeStructs."""
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), np.float32)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.eval_shape(model.init, jax.random.key(0), image)["params"]


def compare(params: dict[str, np.ndarray], wanted_tree: dict) -> None:
    """Raises UserError naming the first parameter that is missing, left over, or of another shape."""
    wanted = flatten(wanted_tree)

    def nearest(name, names):
        close = difflib.get_close_matches(name, names, n=1)
        return f"; the nearest name is {close[0]}" if close else ""

    missing, extra = sorted(wanted.keys() - params.keys()), sorted(params.keys() - wanted.keys())
    if missing:
        raise UserError(
            f"the weights lack {missing[0]} ({len(missing)} missing, {len(extra)} left over"
            f"{nearest(missing[0], extra)}): they are of another architecture, choose a model that fits"
        )
    if extra:
        raise UserError(
            f"the weights have {extra[0]}, which the model has not ({len(extra)} left over"
            f"{nearest(extra[0], wanted)}): they are of another architecture, choose a model that fits"
        )
    for name, leaf in wanted.items():
        if params[name].shape != leaf.shape:
            raise UserError(
                f"{name} of the weights is {params[name].shape}, but the model has {leaf.shape}: "
                "they are of another architecture, choose a model that fits"
            )


def from_pretrained(path, num_classes=None, image_size=None, grid=None, **overrides):
    """Loads weights with the model that they are for.

    Args:
      path: a workdir or checkpoint of ours, or a published .npz; local or gs://.
      num_classes: gives a new zero head, and drops pre_logits unless `pre_logits=True`.
      image_size: side or (h, w); resamples the position embedding.
      grid: (h, w) of the held patch tokens, where the file can't tell.
      **overrides: fields of `models.vit.VisionTransformer`.

    Returns:
      (model, params): logits = model.apply({"params": params}, image).

    Raises:
      UserError: the file can't be read or does not fit.
    """
    return build(read(path, grid, image_size), num_classes, image_size, **overrides)


def build(weights: Weights, num_classes=None, image_size=None, **overrides):
    """(model, params) of weights that were read: see `from_pretrained`."""
    fields = weights.fields | overrides
    if num_classes is not None:
        fields |= dict(num_classes=num_classes, head_bias=overrides.get("head_bias", 0.0))
        fields["pre_logits"] = weights.fields["pre_logits"] if overrides.get("pre_logits") else 0
    if image_size is not None:
        fields["image_size"] = image_size
    model = create.create(**fields)
    params = adapt(weights, model, new_head=num_classes is not None)
    return model, stack_blocks(params) if model.scan else params


def features(model: vit.VisionTransformer, params: dict, image):
    """What the head reads: image [batch, H, W, 3] -> [batch, embed]."""
    headless = {name: leaf for name, leaf in params.items() if name != "head"}
    return model.clone(num_classes=0).apply({"params": headless}, image)
