"""Fits loaded weights to a model: one function for training, evaluation and conversion, with a
report of the changes.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping

import jax
import numpy as np

from vit_jax import config as configs
from vit_jax.distributed import runtime
from vit_jax.errors import UserError, one_line
from vit_jax.models import classifier, create, variants
from vit_jax.models.create import abstract_params
from vit_jax.weights.formats.weights import Weights, in_file, naming, nearest
from vit_jax.weights.scan_layout import flatten, unflatten

log = logging.getLogger(__name__)

HEADS = ("head", "head_dist")
HINT = 'this is another architecture: choose a model that fits, or add allow="NAME"'
SIZES = ("width", "depth", "mlp_dim", "num_heads", "mlp")  # 0 or "": that of the variant
TOKENS = ("class_token", "distilled", "registers")  # another pooling may bring other ones


@dataclasses.dataclass
class Report:
    """What happened to every parameter."""

    loaded: list[str] = dataclasses.field(default_factory=list)  # unchanged
    changes: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)

    def add(self, action: str, name: str, detail: str = "") -> None:
        self.changes.append((action, name, detail))

    def rows(self) -> list[tuple[str, str, str]]:
        """(action, name, detail), the unchanged parameters in one row."""
        return [("loaded", f"{len(self.loaded)} parameters", "unchanged"), *self.changes]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(action) for action, _, _ in rows)
        name_width = max(len(name) for _, name, _ in rows)
        return "\n".join(f"{a:<{width}}  {n:<{name_width}}  {d}".rstrip() for a, n, d in rows)


def resample_posemb(posemb, new_grid, old_grid=None, num_prefix: int = 1):
    """Resamples a position embedding as in arXiv 2010.11929: linearly along each axis, with aligned
    corners; prefix rows stay as they are.

    Args:
      posemb: [1, length, embed] or [length, embed].
      new_grid: (h, w) of the patch tokens to return.
      old_grid: (h, w) of the patch tokens of `posemb`; None: a square.
      num_prefix: rows before the patch tokens.
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
    """`size` equally spaced samples, from the first entry to the last, along one axis."""
    old = grid.shape[axis]
    if size == old:
        return grid
    import scipy.ndimage  # takes 0.3 s

    zoom = [1.0] * grid.ndim
    zoom[axis] = size / old
    return scipy.ndimage.zoom(grid, zoom, order=1)


def resize_matrix(old: int, new: int) -> np.ndarray:
    """Linear resizing of a row of pixels, as a matrix [new, old]: pixel centres aligned, without
    antialiasing.
    """
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.minimum(position.astype(int), max(old - 2, 0))
    matrix = np.zeros((new, old))
    matrix[np.arange(new), low] = 1.0 - (position - low)
    matrix[np.arange(new), np.minimum(low + 1, old - 1)] += position - low
    return matrix


def resample_patches(kernel, new_size: tuple[int, int]):
    """Resamples the patch embedding to another patch size: PI-resize of FlexiViT (arXiv 2212.08013,
    section 3.4).

    With the pseudo-inverse of resizing, an enlarged patch has the embedding of the original patch.

    Args:
      kernel: [h, w, channels, embed].
      new_size: (h, w).
    """
    y, x = (
        np.linalg.pinv(resize_matrix(old, new).T)
        for old, new in zip(kernel.shape[:2], new_size, strict=True)
    )
    return np.einsum("hi,wj,ijce->hwce", y, x, kernel, optimize=True).astype(kernel.dtype)


def change_prefix(params: dict, source, model, report: Report) -> None:
    """Changes the tokens before the patches, and their positions, from those of `source` to those
    of `model`.
    """
    if source.prefix == model.prefix:
        return
    old = dict(source.prefix)
    new = dict(model.prefix)
    for name in old.keys() - new.keys():
        params.pop(name, None)
        report.add("dropped", name, "the model has no such token")
    for name, count in new.items():
        if old.get(name) != count:
            params[name] = np.zeros((1, count, model.width), np.float32)
            report.add("new", name, f"zero, {params[name].shape}")
    change_prefix_rows(params, source, model, report)


def change_prefix_rows(params: dict, source, model, report: Report) -> None:
    """Position rows of the new prefix: those of tokens that both models have, zeros for others."""
    old = dict(source.prefix)
    new = dict(model.prefix)
    ends = np.cumsum([0, *old.values()])
    spans = {name: slice(*span) for name, *span in zip(old, ends[:-1], ends[1:], strict=True)}
    if not source.num_prefix:  # learn2d has a parameter for prefix rows only if there are any
        for name in list(params):
            if name.endswith("/pos_embedding_y"):
                empty = np.zeros((1, 0, model.width), np.float32)
                params[name.removesuffix("y") + "prefix"] = empty
    for name in list(params):
        if not name.endswith(("/pos_embedding", "/pos_embedding_prefix")):
            continue
        rows = params[name]
        if not new and name.endswith("_prefix"):
            del params[name]
            report.add("dropped", name, "the model has no such tokens")
            continue
        prefix = []
        for token, count in new.items():
            if old.get(token) == count:
                prefix.append(rows[:, spans[token]])
            else:
                prefix.append(np.zeros((1, count, rows.shape[-1]), np.float32))
        params[name] = np.concatenate([*prefix, rows[:, source.num_prefix :]], axis=1)
        report.add("new prefix", name, f"{rows.shape} -> {params[name].shape}")


def resize_positions(params: dict, source, model, report: Report) -> None:
    """Resamples every learned position embedding from the grid of `source` to that of `model`."""
    if source.grid == model.grid:
        return
    for name in [name for name in params if "posembed_input/" in name]:
        axis = {"pos_embedding_y": 1, "pos_embedding_x": 2}.get(name.split("/")[-1])
        old = params[name]
        if name.endswith("pos_embedding"):
            params[name] = resample_posemb(old, model.grid, source.grid, model.num_prefix)
        elif axis:
            rows = resample_axis(old, model.grid[axis - 1], axis)
            params[name] = np.ascontiguousarray(rows, np.float32)
        if params[name] is not old:
            report.add("resampled", name, f"{old.shape} -> {params[name].shape}")
    if source.posemb == "relative":
        raise UserError(
            f"relative position embeddings of {source.grid[0]} x {source.grid[1]} tokens do not "
            f"fit {model.grid[0]} x {model.grid[1]}: use the image size of the weights, "
            f"{source.image_size}"
        )


def fit_tokens(params: dict, source, model, report: Report) -> None:
    """Patches, prefix tokens, positions and pre_logits of a ViT."""
    name = "embedding/kernel"
    if name in params and source.patch_size != model.patch_size and model.stem_units is None:
        old = params[name]
        params[name] = resample_patches(old, model.patch_size)
        report.add("resampled", name, f"{old.shape} -> {params[name].shape}")
    change_prefix(params, source, model, report)
    resize_positions(params, source, model, report)
    if not model.pre_logits:
        for name in [name for name in params if name.startswith("pre_logits/")]:
            del params[name]
            report.add("dropped", name, "the model has no pre_logits")


def replace_head(params: dict, target: dict, model, report: Report) -> None:
    """A head of zeros with the initial bias, or none."""
    reason = ""
    if not model.num_classes:
        reason = "the model has no head"
    for name in [name for name in params if name.split("/")[0] in HEADS]:
        del params[name]
        if name not in target:
            report.add("dropped", name, reason)
    for name in [name for name in target if name.split("/")[0] in HEADS]:
        fill = model.head_bias if name.endswith("bias") else 0.0
        params[name] = np.full(target[name].shape, fill, np.float32)
        report.add("new", name, f"{fill:g}, {target[name].shape}")


def adapt(weights: Weights, model: classifier.Classifier, new_head: bool, allow: str = "") -> dict:
    """Fits parameters to `model`: resampled positions and patches, other prefix tokens, a new zero
    head, no pre_logits.

    Args:
      weights: loaded weights.
      model: the model to fit; its sizes must be those of the weights.
      new_head: replace the head by zeros even if its shape would fit.
      allow: regular expression for names of parameters that may be missing (they are initialised
        as in a new model) or unused (they are dropped).

    Returns:
      The parameter tree (numpy, loop layout). A report of all changes is logged.

    Raises:
      UserError: a parameter is missing, unused or of another shape, and `allow` does not match it.
    """
    return adapt_and_report(weights, model, new_head, allow)[0]


def adapt_and_report(
    weights: Weights, model: classifier.Classifier, new_head: bool, allow: str = ""
) -> tuple[dict, Report]:
    """(what `adapt` returns, the report of all changes)."""
    with naming(weights.path):
        params, report = fit(weights, model.with_scan(False), new_head, allow)
    log.info("weights:\n%s", report)
    return params, report


def fit(
    weights: Weights, model: classifier.Classifier, new_head: bool, allow: str
) -> tuple[dict, Report]:
    """`adapt_and_report` in the loop layout."""
    source = source_model(weights, model)
    params = dict(weights.params)
    report = Report()
    try:
        target = flatten(abstract_params(model))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"no model has the sizes of these weights ({one_line(error)[:160]}): fetch the file "
            "again"
        ) from error
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in target.values())
    runtime.check_fits(size, "the model", runtime.SMALLER)
    if model.architecture == "vit":
        fit_tokens(params, source, model, report)
    if new_head or not model.num_classes:
        replace_head(params, target, model, report)
    if allow:
        params = apply_allow(params, target, model, allow, report)
    compare(params, target, weights.file_names)
    changed = {name for _, name, _ in report.changes}
    report.loaded = [name for name in params if name not in changed]
    return unflatten(params), report


def apply_allow(params: dict, target: dict, model, allow: str, report: Report) -> dict:
    """Drops parameters that are unused, and initialises those that are missing or of another shape,
    if `allow` matches their names.
    """
    try:
        allowed = re.compile(allow).search
    except re.error as error:
        raise UserError(
            f"allow={allow!r} is not a valid regular expression ({error}): correct it"
        ) from None

    def fits(name):
        return name in target and params[name].shape == target[name].shape

    for name in params.keys() - target.keys():
        if allowed(name):
            report.add("unused", name, f"{params[name].shape}")
    params = {name: value for name, value in params.items() if fits(name) or not allowed(name)}
    fresh = [name for name in target if name not in params and allowed(name)]
    if fresh:
        image = np.zeros((1, *model.image_size, 3), np.float32)

        def init(key):
            flat = flatten(model.init(key, image)["params"])
            return {name: flat[name] for name in fresh}

        params |= jax.tree.map(np.asarray, jax.jit(init)(jax.random.key(0)))
        for name in fresh:
            report.add("new", name, f"initialised, {target[name].shape}")
    return params


def compare(params: dict[str, np.ndarray], target: dict, file_names=None, hint: str = HINT) -> None:
    """Raises UserError with the first parameter that is missing, unused or of another shape, and
    with `hint`, what to do.
    """
    file_names = file_names or {}

    def in_the_file(names):
        return [file_names.get(name, name) for name in names]

    missing = sorted(target.keys() - params.keys())
    unused = sorted(params.keys() - target.keys())
    counts = f"{len(missing)} missing, {len(unused)} unused"
    if missing:
        near = nearest(*in_the_file(missing[:1]), in_the_file(unused))
        name = in_file(missing[0], file_names)
        raise UserError(f"the weights lack {name} ({counts}{near}); {hint}")
    if unused:
        near = nearest(unused[0], in_the_file(target))
        name = in_file(unused[0], file_names)
        raise UserError(
            f"the weights have {name}, which the model does not have ({counts}{near}); {hint}"
        )
    for name, leaf in target.items():
        if params[name].shape != leaf.shape:
            raise UserError(
                f"{in_file(name, file_names)} of the weights is {params[name].shape}, but the "
                f"model has {leaf.shape}; {hint}"
            )


def source_model(weights: Weights, model: classifier.Classifier) -> classifier.Classifier:
    """The model that the weights were saved from, in the loop layout.

    Raises:
      UserError: its architecture is not that of `model`, or it is a Mixer with another number of
        tokens.
    """
    source = create.create(**weights.fields).with_scan(False)
    # A model of the user's own may have the parameters of another one.
    if source.architecture != model.architecture and not configs.is_own(model.architecture):
        raise UserError(
            f"the weights are of {class_name(source)}, but the model is {class_name(model)}: "
            "choose one that fits"
        )
    if not model.any_num_tokens and math.prod(source.grid) != math.prod(model.grid):
        raise UserError(
            f"the token mixing was trained for {source.grid[0]} x {source.grid[1]} patches, not "
            f"{model.grid[0]} x {model.grid[1]}, and can't be resampled: use "
            f"image_size={source.image_size}"
        )
    return source


def class_name(model: classifier.Classifier) -> str:
    """What messages call the architecture of a model."""
    is_own = configs.is_own(model.architecture)
    return model.architecture if is_own else type(model).__name__


def check_given(given: Mapping, fields: dict) -> None:
    """Raises UserError if a key of `config.model`, which is None unless it is set, contradicts the
    model of the weights, which has these fields.
    """
    theirs = create.fields(create.create(**fields))
    theirs["variant"] = variants.name_of(theirs)
    for name, key in configs.MODEL.items():
        value = given.get(name)
        if not key.of_weights or value is None or (name in SIZES and not value):
            continue
        if value != theirs.get(name, key.default):
            raise UserError(
                f"config key model.{name}={value} contradicts the weights, which have "
                f"{theirs.get(name, key.default)}: leave it out"
            )


def check_same_function(weights: Weights, model: classifier.Classifier) -> None:
    """Raises UserError if a config contradicts the weights in a field that no shape shows."""
    theirs = create.fields(source_model(weights, model))
    ours = create.fields(model)
    both = theirs.keys() & ours.keys()
    fields = [name for name, key in configs.MODEL.items() if key.like_weights and name in both]
    if theirs.get("pool") != ours.get("pool"):
        fields = [name for name in fields if name not in TOKENS]
    differ = [field for field in fields if theirs.get(field) != ours.get(field)]
    if differ:
        flags = " ".join(
            f"--config.model.{field}={theirs[field]}".replace(" ", "") for field in differ
        )
        raise UserError(
            f"the weights and config.model differ in {', '.join(differ)}: add {flags} "
            "(or leave these keys out)"
        )
