"""Drawings of what the other files here compute: each returns a Figure of matplotlib."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vit_jax.figures.overlay import magnified, overlay

DPI = 100
CELL = 1.1  # inches, the longer side of a picture in a sheet
TITLE = 0.22  # inches
NARROWEST = 0.7  # inches, a column with a title
SCALE = 1.1  # inches, beside a sheet
GAP = 0.04  # between pictures, as a share of them
PAIRS = 4  # in a row, each an image and a map beside it
FILTERS = 7  # in a row
BINS = 50
MOST_QUERIES = 14  # patches by side for which the similarity of positions is drawn


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
    panel.set(xlabel="layer", ylabel="mean attention distance (pixels)")
    panel.set_ylim(0, 1.1 * max([uniform, *by_head[np.isfinite(by_head)]]) or 1)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    return figure


def norms(by_token: np.ndarray, prefix: Sequence[tuple[str, int]]) -> Figure:
    """Norms by layer, and their histogram after the last layer.

    Args:
      by_token: [images, layers + 1, length], as `token_norms` returns them.
      prefix: (name, how many) of the tokens before the patches, in order.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = np.cumsum([count for _, count in prefix])
    *others, patches = np.split(by_token, ends, axis=-1)
    layers = np.arange(by_token.shape[1])
    bins = np.histogram_bin_edges(by_token[:, -1], BINS)
    low = patches.min(axis=(0, 2))
    high = patches.max(axis=(0, 2))
    left.fill_between(layers, low, high, alpha=0.25, label="patches, smallest to largest")
    left.plot(layers, np.median(patches, axis=(0, 2)), label="patches, median")
    right.hist(patches[:, -1].ravel(), bins, label="patches")
    for i, ((name, _), values) in enumerate(zip(prefix, others, strict=True), 1):
        left.plot(layers, values.mean(axis=(0, 2)), "o--", markersize=3, label=f"{name}, mean")
        right.hist(values[:, -1].ravel(), bins, label=name, color=f"C{i}", alpha=0.7)
    left.set(xlabel="layer (0: its input)", ylabel="norm")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="norm after the last layer", ylabel="tokens", yscale="log")
    left.grid(alpha=0.3)
    left.legend()
    right.legend()
    return figure


# --- pictures in rows ---


def sheet(rows: list[list[np.ndarray]], titles: Sequence[str] = (), scale: str = "", **options):
    """Pictures of one shape in rows: a Figure.

    Args:
      rows: the first has all columns; pictures are uint8 or 0 to 1 [height, width, 3], or [h, w]
        drawn in colour.
      titles: of the columns.
      scale: what the colours of [h, w] mean, for a scale beside them.
      options: of `imshow`.
    """
    height, width = rows[0][0].shape[:2]
    inch = CELL / max(height, width)
    inner = len(rows[0]) * max(width * inch, NARROWEST if titles else 0)
    top = TITLE if titles else 0
    size = (inner + (SCALE if scale else 0), len(rows) * height * inch + top)
    figure = Figure(figsize=size)
    places = dict(left=0, right=inner / size[0], bottom=0, top=1 - top / size[1])
    places |= dict(wspace=GAP, hspace=GAP)
    panels = figure.subplots(len(rows), len(rows[0]), squeeze=False, gridspec_kw=places)
    for panel in panels.ravel():
        panel.set_axis_off()
    for panel_row, pictures in zip(panels, rows, strict=True):
        for panel, picture in zip(panel_row, pictures, strict=False):
            shown = panel.imshow(picture, extent=(0, width, height, 0), **options)
    for panel, title in zip(panels[0], titles, strict=False):
        panel.set_title(title, fontsize=8, pad=3)
    if scale:
        beside = figure.add_axes((1 - 0.8 * SCALE / size[0], 0.1, 0.1 * SCALE / size[0], 0.8))
        figure.colorbar(shown, cax=beside, label=scale)
    return figure


def in_rows(pictures: list[np.ndarray], columns: int) -> list[list[np.ndarray]]:
    return [pictures[i : i + columns] for i in range(0, len(pictures), columns)]


def pairs(images: np.ndarray, pictures, title: str, **options) -> Figure:
    """Every image with a picture beside it; see `sheet`."""
    cells = [cell for pair in zip(images, pictures, strict=True) for cell in pair]
    return sheet(in_rows(cells, 2 * PAIRS), ["image", title] * PAIRS, **options)


def rollouts(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Attention rollout laid over images: uint8 [images, H, W, 3], [images, h, w]."""
    images = magnified(images)
    return pairs(images, map(overlay, images, maps), "rollout")


def heads(images: np.ndarray, maps: np.ndarray) -> Figure:
    """Where each head looks, laid over images: uint8 [images, H, W, 3], [images, heads, h, w]."""
    rows = [
        [image, *(overlay(image, patches) for patches in by_head)]
        for image, by_head in zip(magnified(images), maps, strict=True)
    ]
    return sheet(rows, ["image", *(f"head {i + 1}" for i in range(maps.shape[1]))])


def colors(images: np.ndarray, by_patch: np.ndarray) -> Figure:
    """Colours of patches beside images: uint8 [images, H, W, 3], [images, h, w, 3] from 0 to 1."""
    return pairs(images, by_patch, "components")


def norm_maps(images: np.ndarray, by_patch: np.ndarray) -> Figure:
    """Norms of patch tokens beside images: uint8 [images, H, W, 3], [images, h, w]."""
    limits = dict(vmin=by_patch.min(), vmax=by_patch.max())
    return pairs(images, by_patch, "norm", scale="norm", **limits)


def similarity(images: np.ndarray, maps: np.ndarray, queries: list[tuple[int, int]]) -> Figure:
    """How alike each chosen patch, marked by a cross and called by its row and column, and all
    others are: a row for each image.

    Args:
      images: uint8 [images, H, W, 3].
      maps: [images, queries, h, w].
      queries: (row, column) of the chosen patches.
    """
    rows = [[image, *by_query] for image, by_query in zip(images, maps, strict=True)]
    titles = ["image", *(f"patch {y + 1}, {x + 1}" for y, x in queries)]
    limits = dict(vmin=min(0, maps.min()), vmax=1)
    figure = sheet(rows, titles, scale="cosine similarity", **limits)
    height = images.shape[1] / maps.shape[2]
    width = images.shape[2] / maps.shape[3]
    for row in range(len(images)):
        for column, (y, x) in enumerate(queries, 1):
            panel = figure.axes[row * len(titles) + column]
            panel.plot((x + 0.5) * width, (y + 0.5) * height, "rx", markersize=5)
    return figure


# --- of weights ---


def filters(components: np.ndarray) -> Figure:
    """Filters as colours, [count, h, w, 3]: grey is 0, and each has a scale of its own."""
    largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    cells = list(0.5 + components / np.maximum(2 * largest, 1e-12))
    return sheet(in_rows(cells, FILTERS))


def positions(similar: np.ndarray) -> Figure:
    """For every patch how similar its position embedding is to those of all, as arXiv 2010.11929
    figure 7; in large grids, for every second, third, ... row and column.

    Args:
      similar: [h, w, h, w], as `position_similarity` returns it.
    """
    h, w = similar.shape[:2]
    every = -(-max(h, w) // MOST_QUERIES)
    rows = np.arange(min(every // 2, h - 1), h, every)
    columns = np.arange(min(every // 2, w - 1), w, every)
    border = max(1, round(0.06 * max(h, w)))
    around = ((0, 0), (0, 0), (0, border), (0, border))
    shown = np.pad(similar[np.ix_(rows, columns)], around, constant_values=np.nan)
    canvas = shown.transpose(0, 2, 1, 3).reshape(len(rows) * (h + border), -1)
    canvas = canvas[:-border, :-border]

    inch = 5.5 / max(canvas.shape)
    size = (canvas.shape[1] * inch + 1.5, canvas.shape[0] * inch + 0.7)
    figure = Figure(figsize=np.maximum(size, (3, 2.4)), layout="constrained")
    panel = figure.subplots()
    low = min(similar.min(), 0.9)
    picture = panel.imshow(canvas, vmin=low, vmax=1, interpolation="nearest")
    panel.set_yticks(np.arange(len(rows)) * (h + border) + (h - 1) / 2, rows + 1)
    panel.set_xticks(np.arange(len(columns)) * (w + border) + (w - 1) / 2, columns + 1)
    panel.set(xlabel="input patch column", ylabel="input patch row")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    figure.colorbar(picture, label="cosine similarity")
    return figure
