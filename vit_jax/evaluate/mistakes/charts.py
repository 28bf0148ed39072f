"""Charts of a classification as PNG: confusion matrix, worst pairs, reliability diagram."""

import collections
import warnings
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from vit_jax.data import fonts
from vit_jax.errors import printable
from vit_jax.evaluate.mistakes import confusion
from vit_jax.figures import drawings

MOST_CLASSES = 30  # of a matrix that can be read
WORST_CLASSES = 16  # of a matrix beside a list
WORST_PAIRS = 20  # of the list
LONGEST_NAME = 24  # characters
PER_CLASS = 0.34  # inches of a row or column
COLOR = "#4c72b0"


def png(figure: Figure) -> bytes:
    """The file of a figure."""
    with warnings.catch_warnings():
        # A character may be in none of the fonts.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        return drawings.png(figure)


def shortened(name: str) -> str:
    """A class name for a chart, shortened in the middle: its end may be what tells it apart."""
    name = printable(name, kept="")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}...{name[-6:]}"


def short_names(class_names: Sequence[str], classes: np.ndarray) -> dict[int, str]:
    """Class -> name for a chart; those that would be equal begin with the number of the class."""
    found = {i: shortened(class_names[i]) for i in classes.tolist()}
    counts = collections.Counter(found.values())
    return {i: shortened(f"{i} {class_names[i]}") if counts[x] > 1 else x for i, x in found.items()}


def write_names(texts, names: Sequence[str]) -> None:
    """Puts class names into the labels of an axis, each in a font that has its characters."""
    for text, name in zip(texts, names, strict=True):
        path = fonts.font_for(name).path
        text.set_fontproperties(FontProperties(fname=path, size=8))
        text.set_parse_math(False)


def label_axes(axes, names: Sequence[str]) -> None:
    """Class names on both axes of a matrix."""
    numbers = np.arange(len(names))
    axes.set_xticks(numbers, names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(numbers, names)
    write_names(axes.get_xticklabels(), names)
    write_names(axes.get_yticklabels(), names)


def draw_matrix(axes, label, predicted, classes: np.ndarray, class_names: Sequence[str]) -> None:
    """The confusion matrix of some classes, coloured by the share of its row."""
    counts = confusion.matrix(label, predicted, classes)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counts):
        color = "white" if share[row, column] > 0.6 else "black"
        text = f"{counts[row, column]:,}"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    label_axes(axes, list(short_names(class_names, classes).values()))
    axes.set(xlabel="predicted class", ylabel="true class")


def draw_pairs(axes, pairs: np.ndarray, class_names: Sequence[str]) -> None:
    """The most frequent mistakes as bars, the worst at the top."""
    numbers = np.arange(len(pairs))
    short = short_names(class_names, np.unique(pairs[:, :2]))
    names = [f"{short[true]} \u2192 {short[taken]}" for true, taken, _ in pairs.tolist()]
    bars = axes.barh(numbers, pairs[:, 2], color=COLOR)
    axes.bar_label(bars, padding=2, fontsize=7)
    axes.set_yticks(numbers, names)
    write_names(axes.get_yticklabels(), names)
    axes.set(xlabel="images", ylim=(len(pairs) - 0.4, -0.6))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.12)
    axes.set_title("most frequent mistakes: true \u2192 predicted", fontsize=9)


def classes_of(pairs: np.ndarray, most: int) -> np.ndarray:
    """Classes of the first pairs, at most `most`, in ascending order."""
    unique, first = np.unique(pairs[:, :2], return_index=True)
    return np.sort(unique[np.argsort(first)][:most])


def confusion_chart(
    label: np.ndarray, predicted: np.ndarray, class_names: Sequence[str]
) -> bytes | None:
    """The confusion matrix, or of more than `MOST_CLASSES` classes those of the most frequent
    mistakes, beside a list of these; None if there is nothing to draw.

    Args:
      label, predicted: int [N].
    """
    occurring = np.union1d(label, predicted)
    pairs = confusion.pairs(label, predicted)
    if not len(occurring):
        return None
    if len(occurring) <= MOST_CLASSES:
        return whole_matrix(label, predicted, occurring, class_names)
    return worst_pairs(label, predicted, pairs, class_names) if len(pairs) else None


def whole_matrix(label, predicted, classes: np.ndarray, class_names: Sequence[str]) -> bytes:
    side = max(2.0, PER_CLASS * len(classes))
    figure = Figure(figsize=(side + 2.2, side + 2.0), layout="constrained")
    axes = figure.subplots()
    draw_matrix(axes, label, predicted, classes, class_names)
    axes.set_title("images by true and predicted class", fontsize=9)
    return png(figure)


def worst_pairs(label, predicted, pairs: np.ndarray, class_names: Sequence[str]) -> bytes:
    classes = classes_of(pairs, WORST_CLASSES)
    pairs = pairs[:WORST_PAIRS]
    side = max(3.0, PER_CLASS * len(classes))
    figure = Figure(figsize=(side + 8.4, side + 2.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(side + 2.2, 6.2))
    draw_matrix(left, label, predicted, classes, class_names)
    left.set_title(f"the {len(classes)} classes of the most frequent mistakes", fontsize=9)
    draw_pairs(right, pairs, class_names)
    return png(figure)


def calibration_chart(found: dict, error: float) -> bytes:
    """The reliability diagram, above the number of images by probability.

    Args:
      found: what `calibration.bins` returns.
      error: the expected calibration error.
    """
    figure = Figure(figsize=(4.6, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    filled = found["count"] > 0
    low = found["low"][filled]
    width = found["high"][filled] - low
    accuracy = found["accuracy"][filled]
    top.bar(low, accuracy, width, align="edge", color=COLOR, edgecolor="white", label="accuracy")
    dots = dict(color="black", markersize=3, clip_on=False, label="mean of a bin")
    top.plot(found["confidence"][filled], accuracy, "o", **dots)
    top.plot((0, 1), (0, 1), "--", color="grey", linewidth=1, label="perfect calibration")
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    top.legend(loc="best", fontsize=8)
    top.set_title(f"expected calibration error {error:.1%}", fontsize=9, pad=8)
    bottom.bar(low, found["count"][filled], width, align="edge", color=COLOR, edgecolor="white")
    bottom.set(xlabel="probability of the predicted class", ylabel="images")
    bottom.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return png(figure)
