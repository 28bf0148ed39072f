"""Drawings of what the other files here compute: each returns a Figure of matplotlib."""

import io

import numpy as np
from matplotlib.figure import Figure

from vit_jax.figures.overlay import magnified, overlay

DPI = 100
CELL = 1.1  # inches, the longer side of a picture in a sheet
TITLE = 0.3  # inches
GAP = 0.04  # between pictures, as a share of them
PAIRS = 4  # an image and a map beside it, in a row
MOST_QUERIES = 14  # patches by side whose similarities are drawn


def png(figure: Figure) -> bytes:
    """The file of a figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


# --- charts ---


def distance(by_head: np.ndarray, uniform: float) -> Figure:
    """One dot per head by layer, as arXiv 2010.11929 figure 11.

    Args:
      by_head: [layers, heads] in pixels, as `mean_distance` returns it.
      uniform: what it would be if all patches had the same weight.
    """
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    panel = figure.subplots()
    layers = np.arange(1, len(by_head) + 1)
    for values in by_head.T:
        panel.plot(layers, values, "o", markersize=5, alpha=0.7)
    panel.axhline(uniform, color="grey", linestyle="--", linewidth=1, label="equal weights")
    panel.set(xlabel="layer", ylabel="mean attention distance (pixels)", xticks=layers[:: step(20, len(layers))])
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    return figure


def step(most: int, count: int) -> int:
    """Of every so many of `count`, so that at most `most` are left."""
    return -(-count // most)


def norms(tokens: np.ndarray, prefix: tuple[tuple[str, int], ...]) -> Figure:
    """Norms by layer, and their histogram after the last layer.

    Args:
      tokens: [images, layers + 1, length], as `token_norms` returns them.
      prefix: (name, how many) of the tokens before the patches, in order.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    by_layer, histogram = figure.subplots(1, 2)
    kinds = {}
    start = 0
    for name, count in prefix:
        kinds[name] = tokens[..., start : start + count]
        start += count
    patches = tokens[..., start:]
    low, high = np.percentile(patches, [0, 100], axis=(0, 2))
    layers = np.arange(tokens.shape[1])
    by_layer.fill_between(layers, low, high, alpha=0.25, label="patches, least to largest")
    by_layer.plot(layers, np.median(patches, axis=(0, 2)), label="patches, median")
    for name, values in kinds.items():
        by_layer.plot(layers, values.mean(axis=(0, 2)), "o--", markersize=3, label=name)
    by_layer.set(xlabel="layer (0: the input)", ylabel="norm")
    by_layer.grid(alpha=0.3)
    by_layer.legend()
    histogram.hist(patches[:, -1].ravel(), bins=50, log=True, label="patches")
    for i, (name, values) in enumerate(kinds.items(), 1):
        histogram.hist(values[:, -1].ravel(), bins=50, log=True, label=name, color=f"C{i}", alpha=0.7)
    histogram.set(xlabel="norm after the last layer", ylabel="tokens")
    histogram.legend()
    return figure


# --- pictures in rows ---


def sheet(rows: list[list[np.ndarray]], titles: list[str], **options) -> Figure:
    """Pictures of one size in rows.

    Args:
      rows: uint8 or 0 to 1 [height, width, 3], or [h, w] drawn in colour.
      titles: of the columns.
      options: of `imshow`.
    """
    height, width = rows[0][0].shape[:2]
    cell = CELL / max(height, width)
    size = (len(titles) * width * cell, len(rows) * height * cell + TITLE)
    figure = Figure(figsize=size)
    places = dict(left=0, right=1, bottom=0, top=1 - TITLE / size[1], wspace=GAP, hspace=GAP)
    panels = figure.subplots(len(rows), len(titles), squeeze=False, gridspec_kw=places)
    for panel_row, pictures in zip(panels, rows, strict=True):
        for panel, picture in zip(panel_row, pictures, strict=False):
            panel.imshow(picture, extent=(0, width, height, 0), **options)
    for panel in panels.ravel():
        panel.set_axis_off()
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=8, pad=3)
    return figure


def pairs(images: np.ndarray, pictures: list[np.ndarray], title: str, **options) -> Figure:
    """Every image with a picture beside it."""
    cells = [cell for pair in zip(images, pictures, strict=True) for cell in pair]
    columns = min(len(cells), 2 * PAIRS)
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    return sheet(rows, ["image", title] * (columns // 2), **options)


def rollouts(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Attention rollout laid over images: uint8 [images, H, W, 3], [images, h, w]."""
    laid = [overlay(image, patches) for image, patches in zip(images, maps, strict=True)]
    return pairs(images, laid, "rollout")


def heads(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Where each head looks, laid over images: uint8 [images, H, W, 3], [images, heads, h, w]."""
    rows = [
        [image, *(overlay(image, patches) for patches in by_head)]
        for image, by_head in zip(images, maps, strict=True)
    ]
    return sheet(rows, ["image", *(f"head {i + 1}" for i in range(maps.shape[1]))])


def colors(images: np.ndarray, by_patch: np.ndarray) -> Figure:
    """Principal components as colours, beside images: uint8 [images, H, W, 3], [images, h, w, 3]."""
    return pairs(images, list(by_patch), "components")


def norm_maps(images: np.ndarray, by_patch: np.ndarray) -> Figure:
    """Norms of patch tokens, beside images: uint8 [images, H, W, 3], [images, h, w]."""
    figure = pairs(images, list(by_patch), "norm", vmin=by_patch.min(), vmax=by_patch.max())
    return figure


def similarity(images: np.ndarray, maps: np.ndarray, queries: list[tuple[int, int]]) -> Figure:
    """How alike each chosen patch, marked by a cross, and all others are: a row for each image.

    Args:
      images: uint8 [images, H, W, 3].
      maps: [images, queries, h, w].
      queries: (row, column) of the chosen patches.
    """
    height, width = images.shape[1:3]
    h, w = maps.shape[2:]
    rows = [[image, *by_query] for image, by_query in zip(images, maps, strict=True)]
    titles = ["image", *(f"row {y + 1}, column {x + 1}" for y, x in queries)]
    figure = sheet(rows, titles, vmin=min(0, maps.min()), vmax=1)
    columns = len(titles)
    for i, panel in enumerate(figure.axes):
        if i % columns:
            y, x = queries[i % columns - 1]
            panel.plot((x + 0.5) * width / w, (y + 0.5) * height / h, "rx", markersize=5)
    return figure


# --- of weights ---


def filters(components: np.ndarray) -> Figure:
    """Filters as colours, [count, h, w, 3]: grey is 0, and each has its own scale."""
    largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    cells = list(0.5 + components / np.maximum(2 * largest, 1e-12))
    columns = min(len(cells), 7)
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    return sheet(rows, [""] * columns)


def positions(similar: np.ndarray) -> Figure:
    """For every patch how similar its position embedding is to those of all, as arXiv 2010.11929
    figure 7; of large grids, for every second, third, ... row and column.

    Args:
      similar: [h, w, h, w], as `position_similarity` returns it.
    """
    h, w = similar.shape[:2]
    every = step(MOST_QUERIES, max(h, w))
    rows = np.arange(every // 2, h, every) if h > every // 2 else np.arange(1)
    columns = np.arange(every // 2, w, every) if w > every // 2 else np.arange(1)
    shown = similar[np.ix_(rows, columns)]
    border = max(1, round(0.06 * max(h, w)))
    shown = np.pad(shown, ((0, 0), (0, 0), (0, border), (0, border)), constant_values=np.nan)
    canvas = shown.transpose(0, 2, 1, 3).reshape(len(rows) * (h + border), -1)
    canvas = canvas[:-border, :-border]
    side = 5.5 / max(canvas.shape)
    size = (canvas.shape[1] * side + 1.5, canvas.shape[0] * side + 0.7)
    figure = Figure(figsize=(max(size[0], 3), max(size[1], 2)), layout="constrained")
    panel = figure.subplots()
    picture = panel.imshow(canvas, vmin=-1, vmax=1, interpolation="nearest")
    y = np.arange(len(rows)) * (h + border) + (h - 1) / 2
    x = np.arange(len(columns)) * (w + border) + (w - 1) / 2
    panel.set_yticks(y, rows + 1)
    panel.set_xticks(x, columns + 1)
    panel.set(xlabel="input patch column", ylabel="input patch row")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    figure.colorbar(picture, ax=panel, label="cosine similarity", shrink=0.9)
    return figure
