"""Drawings have the numbers that they are given, for every shape that there may be."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from vit_jax.figures import drawings, overlay

RNG = np.random.default_rng(0)


def size_of(figure) -> tuple[int, int]:
    """(width, height) of the PNG, which must not be empty."""
    with Image.open(io.BytesIO(drawings.png(figure))) as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 24)) > 3
        return image.size


def images(count: int, height: int = 24, width: int = 24) -> np.ndarray:
    return RNG.integers(0, 256, (count, height, width, 3), np.uint8)


def test_distance_has_a_dot_for_each_head():
    by_head = np.float64([[1, 2, np.nan], [3, 20, 5]])
    figure = drawings.distance(by_head, 12.0)
    (panel,) = figure.axes
    dots = [line.get_ydata() for line in panel.lines[:3]]
    np.testing.assert_array_equal(dots, by_head.T)
    assert panel.get_ylim()[1] > 20 and size_of(figure) == (500, 360)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_distance_of_one_patch(value):
    assert size_of(drawings.distance(np.full((1, 2), value), 0.0))


def test_norms_are_of_prefix_tokens_and_patches_apart():
    by_token = np.tile(np.float64([9, 5, 6, 1, 2, 3]), (2, 3, 1))
    figure = drawings.norms(by_token, (("cls", 1), ("reg", 2)))
    median, cls, registers = (line.get_ydata() for line in figure.axes[0].lines)
    assert (median.tolist(), cls.tolist(), registers.tolist()) == ([2] * 3, [9] * 3, [5.5] * 3)
    counts = sum(patch.get_height() for patch in figure.axes[1].patches)
    assert counts == 12 and size_of(figure)
    assert size_of(drawings.norms(np.zeros((1, 1, 1)), ()))  # one patch, no layers


@pytest.mark.parametrize(("count", "columns"), [(1, 2), (5, 8)])
def test_maps_stand_beside_their_images(count, columns):
    maps = RNG.uniform(size=(count, 2, 3))
    figure = drawings.rollouts(images(count, 16, 24), maps)
    shown = [panel for panel in figure.axes if panel.images]
    assert len(shown) == 2 * count
    width, height = size_of(figure)
    rows = -(-count // 4)
    assert abs(width - 110 * columns) < 2 and abs(height - 22 - 110 / 1.5 * rows) < 2


def test_titles_of_narrow_images_do_not_overlap():
    figure = drawings.rollouts(images(3, 224, 32), RNG.uniform(size=(3, 14, 2)))
    figure.draw_without_rendering()
    boxes = [panel.title.get_window_extent() for panel in figure.axes[:6]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_maps_and_colors_of_one_patch():
    assert size_of(drawings.norm_maps(images(1), np.ones((1, 1, 1))))
    assert size_of(drawings.colors(images(1), np.full((1, 1, 1, 3), 0.5)))


def test_heads_have_a_column_each():
    figure = drawings.heads(images(1), RNG.uniform(size=(1, 24, 3, 3)))
    assert size_of(figure)[0] == 25 * 110
    assert [panel.get_title() for panel in figure.axes[:3]] == ["image", "head 1", "head 2"]


def test_crosses_mark_the_patches_that_are_compared():
    maps = np.zeros((2, 2, 4, 5))
    maps[:, 0, 3, 1] = maps[:, 1, 0, 4] = 1
    figure = drawings.similarity(images(2, 16, 30), maps, [(3, 1), (0, 4)])
    for i, (x, y) in {1: (9, 14), 2: (27, 2), 4: (9, 14), 5: (27, 2)}.items():
        panel = figure.axes[i]
        np.testing.assert_array_equal(panel.lines[0].get_xydata(), [[x, y]])
        drawn = panel.images[0]
        left, right, bottom, top = drawn.get_extent()
        row = int(4 * (y - top) / (bottom - top))
        column = int(5 * (x - left) / (right - left))
        assert drawn.get_array()[row, column] == 1
    assert size_of(figure)


@pytest.mark.parametrize("count", [1, 7, 28])
def test_filters_are_scaled_one_by_one(count):
    components = RNG.normal(size=(count, 4, 4, 3)) * 10.0 ** np.arange(count)[:, None, None, None]
    figure = drawings.filters(components)
    for i in range(count):
        drawn = np.asarray(figure.axes[i].images[0].get_array())
        assert np.isclose(np.abs(drawn - 0.5).max(), 0.5)
    assert size_of(figure)[0] == 110 * min(count, 7)
    assert drawings.filters(np.zeros((1, 2, 2, 3))).axes[0].images[0].get_array().max() == 0.5


GRIDS = {(1, 1): (1, 1), (2, 5): (2, 5), (14, 14): (14, 14), (37, 37): (12, 12), (1, 30): (1, 10)}


@pytest.mark.parametrize("grid", GRIDS)
def test_positions_of_large_grids_are_thinned(grid):
    similar = np.zeros((*grid, *grid))
    for y, x in np.ndindex(*grid):
        similar[y, x, y, x] = 1
    figure = drawings.positions(similar)
    panel = figure.axes[0]
    rows = [int(label.get_text()) - 1 for label in panel.get_yticklabels()]
    columns = [int(label.get_text()) - 1 for label in panel.get_xticklabels()]
    assert (len(rows), len(columns)) == GRIDS[grid]
    canvas = panel.images[0].get_array()
    middle = (np.array(grid) - 1) / 2
    for row, y in zip(rows, panel.get_yticks(), strict=True):
        for column, x in zip(columns, panel.get_xticks(), strict=True):
            assert canvas[round(y - middle[0] + row), round(x - middle[1] + column)] == 1
    assert canvas.filled(0).sum() == len(rows) * len(columns)
    assert max(size_of(figure)) < 900


def test_a_map_is_brightest_where_it_is_largest():
    image = np.full((40, 60, 3), 100, np.uint8)
    patches = np.zeros((2, 3))
    patches[1, 2] = 5
    found = overlay.overlay(image, patches).astype(int).sum(-1)
    assert found.max() == found[-1, -1]
    assert found[:10, :10].max() < found[-1, -1] / 2
    same = overlay.overlay(image, [[0, -3, np.nan], [-np.inf, np.inf, 7]])
    np.testing.assert_array_equal(same, overlay.overlay(image, patches))
    dark = overlay.overlay(image, np.full((1, 1), np.nan))
    assert dark.shape == image.shape and dark.max() < 60
