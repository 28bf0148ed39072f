"""Fitting weights to a model: one function for training, evaluation and conversion, and the report
of what it did.
"""

import dataclasses
import logging
import math
import re

import jax
import numpy as np

from vit_jax.errors import UserError, one_line
from vit_jax.models import classifier, create
from vit_jax.models.create import abstract_params
from vit_jax.weights.formats.weights import Weights, in_file, naming, nearest
from vit_jax.weights.scan_layout import flatten, unflatten

log = logging.getLogger(__name__)

HEADS = ("head", "head_dist")
# What changes the function of a model but no shape: training's config must say the same as the
# weights.
SAME_FUNCTION = ("gelu", "ln_eps", "mean", "std", "posemb", "posemb_at")
SAME_TOKENS = ("class_token", "distilled", "registers")  # where the pooling is the same


@dataclasses.dataclass
class Report:
    """What became of every parameter."""

    loaded: list[str] = dataclasses.field(default_factory=list)
    changed: list[tuple[str, str, str]] = dataclasses.field(
        default_factory=list
    )  # (what was done, name, detail)

    def note(self, action: str, name: str, detail: str = "") -> None:
        self.changed.append((action, name, detail))

    def __str__(self) -> str:
        lines = [("loaded", f"{len(self.loaded)} parameters", "as they are"), *self.changed]
        widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {n:<{widths[1]}}  {d}".rstrip() for a, n, d in lines)


def resample_posemb(posemb, new_grid, old_grid=None, num_prefix: int = 1):
    """Resamples a position embedding as published: linear along each axis, corners aligned; prefix
    rows untouched.

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
            f"a position embedding of {len(rows)} rows, {num_prefix} of them prefix, does not fill "
            f"a grid of {old_grid[0]} x {old_grid[1]}: give grid=(h, w)"
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
    import scipy.ndimage  # a third of a second, at every start

    zoom = [1.0] * grid.ndim
    zoom[axis] = size / old
    return scipy.ndimage.zoom(grid, zoom, order=1)


def resize_matrix(old: int, new: int) -> np.ndarray:
    """Bilinear resizing of a line of pixels, as a matrix [new, old]: pixel centres aligned, no
    antialiasing.
    """
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.minimum(position.astype(int), max(old - 2, 0))
    matrix = np.zeros((new, old))
    matrix[np.arange(new), low] = 1.0 - (position - low)
    matrix[np.arange(new), np.minimum(low + 1, old - 1)] += position - low
    return matrix


def resample_patches(kernel, new_size: tuple[int, int]):
    """Resamples the patch embedding to another patch size (FlexiViT, arXiv 2212.08013 section 3.4,
    PI-resize).

    The pseudo-inverse of resizing makes the embedding of an enlarged patch equal to that of the
    patch.

    Args:
      kernel: [h, w, channels, embed].
      new_size: (h, w).
    """
    y, x = (
        np.linalg.pinv(resize_matrix(old, new).T)
        for old, new in zip(kernel.shape[:2], new_size, strict=True)
    )
    return np.einsum("hi,wj,ijce->hwce", y, x, kernel, optimize=True).astype(kernel.dtype)


def swap_prefix(params: dict, held, model, report: Report) -> None:
    """Brings the tokens before the patches, and their positions, from those held to those of
    `model`.
    """
    if held.prefix == model.prefix:
        return
    old, new = dict(held.prefix), dict(model.prefix)
    for name in old.keys() - new.keys():
        params.pop(name, None)
        report.note("dropped", name, "the model has no such token")
    for name, count in new.items():
        if old.get(name) != count:
            params[name] = np.zeros((1, count, model.width), np.float32)
            report.note("new", name, f"zero, {params[name].shape}")
    edges = np.cumsum([0, *old.values()])
    place = {name: slice(*span) for name, *span in zip(old, edges[:-1], edges[1:], strict=True)}
    if not held.num_prefix:  # learn2d keeps the rows of prefix tokens apart, where there are any
        for name in [name for name in params if name.endswith("/pos_embedding_y")]:
            params[name.removesuffix("y") + "prefix"] = np.zeros((1, 0, model.width), np.float32)
    for name in [
        name for name in params if name.endswith(("/pos_embedding", "/pos_embedding_prefix"))
    ]:
        rows = params[name]
        if not new and name.endswith("_prefix"):
            del params[name]
            report.note("dropped", name, "the model has no such tokens")
            continue
        zeros = {
            token: np.zeros((1, count, rows.shape[-1]), np.float32) for token, count in new.items()
        }
        kept = [
            rows[:, place[token]] if old.get(token) == new[token] else zeros[token] for token in new
        ]
        params[name] = np.concatenate([*kept, rows[:, held.num_prefix :]], axis=1)
        report.note("rows swapped", name, f"{rows.shape} -> {params[name].shape}")


def resize_positions(params: dict, held, model, report: Report) -> None:
    """Resamples every learned position embedding from the held grid to that of `model`."""
    if held.grid == model.grid:
        return
    for name in [name for name in params if "posembed_input/" in name]:
        axis = {"pos_embedding_y": 1, "pos_embedding_x": 2}.get(name.split("/")[-1])
        old = params[name]
        if name.endswith("pos_embedding"):
            params[name] = resample_posemb(old, model.grid, held.grid, model.num_prefix)
        elif axis:
            params[name] = np.ascontiguousarray(
                resample_axis(old, model.grid[axis - 1], axis), np.float32
            )
        if params[name] is not old:
            report.note("resampled", name, f"{old.shape} -> {params[name].shape}")
    if held.posemb == "relative":
        raise UserError(
            f"relative position embeddings of {held.grid[0]} x {held.grid[1]} tokens do not fit "
            f"{model.grid[0]} x {model.grid[1]}: keep the image size of the weights, "
            f"{held.image_size}"
        )


def fit_tokens(params: dict, held, model, report: Report) -> None:
    """Patches, prefix tokens, positions and pre_logits of a ViT."""
    kernel = params.get("embedding/kernel")
    if kernel is not None and held.patch_size != model.patch_size and model.stem_units is None:
        params["embedding/kernel"] = resample_patches(kernel, model.patch_size)
        report.note(
            "resampled", "embedding/kernel", f"{kernel.shape} -> {params['embedding/kernel'].shape}"
        )
    swap_prefix(params, held, model, report)
    resize_positions(params, held, model, report)
    if not model.pre_logits:
        for name in [name for name in params if name.startswith("pre_logits/")]:
            del params[name]
            report.note("dropped", name, "the model has no pre_logits")


def adapt(weights: Weights, model: classifier.Classifier, new_head: bool, allow: str = "") -> dict:
    """Fits parameters to `model`: resampled positions and patches, another prefix, a new zero head,
    no pre_logits.

    Args:
      weights: what was read.
      model: where they go; its sizes must be those of the weights.
      new_head: start the head at zero even when its shape would fit.
      allow: regular expression on the names of parameters that may be missing (they start as in a
        fresh model) or left over (they are dropped).

    Returns:
      The parameter tree (numpy, loop layout). A report of what was done goes to the log.

    Raises:
      UserError: a parameter is missing, left over, or of another shape, and is not allowed to be.
    """
    with naming(weights.path):
        return fit(weights, model.with_scan(False), new_head, allow)


def fit(weights: Weights, model: classifier.Classifier, new_head: bool, allow: str) -> dict:
    """`adapt` in the loop layout."""
    held = held_model(weights, model)
    params, report = dict(weights.params), Report()
    try:
        wanted = flatten(abstract_params(model))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"no model has the sizes of these weights ({one_line(error)[:160]}): fetch the file "
            "again"
        ) from error
    if model.architecture == "vit":
        fit_tokens(params, held, model, report)
    if new_head or not model.num_classes:
        for name in [name for name in params if name.split("/")[0] in HEADS]:
            del params[name]
            if name not in wanted:
                report.note(
                    "dropped", name, "the model has no head" if not model.num_classes else ""
                )
        for name in [name for name in wanted if name.split("/")[0] in HEADS]:
            fill = model.head_bias if name.endswith("bias") else 0.0
            params[name] = np.full(wanted[name].shape, fill, np.float32)
            report.note("new", name, f"{fill:g}, {wanted[name].shape}")
    if allow:
        params = make_allowances(params, wanted, model, allow, report)
    compare(params, wanted, weights.file_names)
    done = {name for _, name, _ in report.changed}
    report.loaded = [name for name in params if name not in done]
    log.info("weights:\n%s", report)
    return unflatten(params)


def make_allowances(params: dict, wanted: dict, model, allow: str, report: Report) -> dict:
    """Drops what is left over and initialises what is missing or of another shape, where the user
    allows it.
    """
    try:
        allowed = re.compile(allow).search
    except re.error as error:
        raise UserError(f"allow={allow!r} is no regular expression ({error}): correct it") from None
    fits = {
        name: value
        for name, value in params.items()
        if name in wanted and value.shape == wanted[name].shape
    }
    for name in params.keys() - wanted.keys():
        if allowed(name):
            report.note("left over", name, f"{params[name].shape}")
    kept = {name: value for name, value in params.items() if name in fits or not allowed(name)}
    fresh = [name for name in wanted if name not in kept and allowed(name)]
    if fresh:
        image = np.zeros((1, *model.image_size, 3), np.float32)

        def init(key):
            flat = flatten(model.init(key, image)["params"])
            return {name: flat[name] for name in fresh}

        kept |= jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(0)))
        for name in fresh:
            report.note("new", name, f"initialised, {wanted[name].shape}")
    return kept


def compare(params: dict[str, np.ndarray], wanted: dict, file_names=None) -> None:
    """Raises UserError naming the first parameter that is missing, left over, or of another shape."""
    file_names = file_names or {}

    def say(name):
        return in_file(name, file_names)

    def theirs(names):
        return [file_names.get(name, name) for name in names]

    missing, extra = sorted(wanted.keys() - params.keys()), sorted(params.keys() - wanted.keys())
    hint = (
        'they are of another architecture: choose a model that fits, or allow it, as allow="NAME"'
    )
    counts = f"{len(missing)} missing, {len(extra)} left over"
    if missing:
        near = nearest(*theirs(missing[:1]), theirs(extra))
        raise UserError(f"the weights lack {say(missing[0])} ({counts}{near}); {hint}")
    if extra:
        near = nearest(extra[0], theirs(wanted))
        raise UserError(
            f"the weights have {say(extra[0])}, which the model has not ({counts}{near}); {hint}"
        )
    for name, leaf in wanted.items():
        if params[name].shape != leaf.shape:
            found = params[name].shape
            raise UserError(
                f"{say(name)} of the weights is {found}, but the model has {leaf.shape}; {hint}"
            )


def held_model(weights: Weights, model: classifier.Classifier) -> classifier.Classifier:
    """The model that the weights are for, in the loop layout.

    Raises:
      UserError: it is of another architecture than `model`, or no Mixer can be brought to its
        number of tokens.
    """
    held = create.create(**weights.fields).with_scan(False)
    if held.architecture != model.architecture:
        raise UserError(
            f"the weights are of {type(held).__name__}, but the model is {type(model).__name__}: "
            "choose one that fits"
        )
    if not model.any_num_tokens and math.prod(held.grid) != math.prod(model.grid):
        raise UserError(
            f"the token mixing was trained for {held.grid[0]} x {held.grid[1]} patches, not "
            f"{model.grid[0]} x {model.grid[1]}, and can't be resampled: use "
            f"image_size={held.image_size}"
        )
    return held


def check_same_function(weights: Weights, model: classifier.Classifier) -> None:
    """Raises UserError where a config says otherwise than the weights and no shape would show it."""
    theirs = create.fields(held_model(weights, model))
    ours = create.fields(model)
    fields = SAME_FUNCTION
    if theirs.get("pool") == ours.get("pool"):
        fields += SAME_TOKENS
    differ = [field for field in fields if theirs.get(field) != ours.get(field)]
    if differ:
        flags = " ".join(
            f"--config.model.{field}={theirs[field]}".replace(" ", "") for field in differ
        )
        raise UserError(f"the weights and config.model differ in {', '.join(differ)}: add {flags}")
