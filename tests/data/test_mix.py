"""Flips, random erasing, label smoothing and CutMix: as in timm, by distribution and by arithmetic."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from conftest import golden

from vit_jax.data.augment import erase, mix
from vit_jax.data.augment.batch import flip
from vit_jax.models import losses

TIMM, TIMM_CONFIG = golden("mix_timm")
MASK = np.array([1, 1, 0, 1, 1, 1], np.float32)


def keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def batch(height: int = 12, width: int = 20):
    """Image i is constant i; labels are one-hot: image [6, H, W, 3], label [6, 6], mask [6]."""
    value = np.arange(6, dtype=np.float32)[:, None, None, None]
    image = value * np.ones((height, width, 3), np.float32)
    return image, np.eye(6, dtype=np.float32), MASK


def timm_box(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
    """The loop of RandomErasing in timm 0.3.2 to 1.0.31, in its own words."""
    for _ in range(10):
        area = rng.uniform(0.02, 1 / 3) * height * width
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w < width and h < height:
            top, left = rng.randint(0, height - h), rng.randint(0, width - w)
            return top, top + h, left, left + w
    return 0, 0, 0, 0


def test_each_image_is_flipped_with_probability_one_half():
    one = jnp.arange(2 * 3 * 3, dtype=jnp.uint8).reshape(1, 2, 3, 3)
    image = jnp.tile(one, (4096, 1, 1, 1))
    out = jax.jit(flip)(keys(4096), image)
    assert out.dtype == jnp.uint8
    mirrored, same = ((out == x).all((1, 2, 3)) for x in (image[:, :, ::-1], image))
    assert (mirrored ^ same).all()
    assert scipy.stats.binomtest(int(mirrored.sum()), 4096, 0.5).pvalue > 1e-3
    np.testing.assert_array_equal(flip(keys(4096)[5:9], image[5:9]), out[5:9])


@pytest.mark.parametrize(("height", "width"), [(32, 32), (10, 60)])
def test_erased_boxes_are_distributed_as_in_timm(height, width):
    count, rng = 4000, random.Random(0)
    draw = jax.jit(jax.vmap(lambda key: jnp.stack(erase.erased_box(key, 1.0, height, width))))
    ours = np.asarray(draw(keys(count)))
    theirs = np.array([timm_box(height, width, rng) for _ in range(count)])
    for boxes in (ours, theirs):
        assert boxes.min() >= 0 and boxes[:, 1].max() <= height and boxes[:, 3].max() <= width
    none = [(boxes[:, 1] == boxes[:, 0]).sum() for boxes in (ours, theirs)]
    assert abs(none[0] - none[1]) <= 4 * np.sqrt(sum(none) + 1)
    for column in range(4):
        assert scipy.stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    sides = [
        np.stack([b[:, 1] - b[:, 0], b[:, 3] - b[:, 2]], 1)[b[:, 1] > b[:, 0]]
        for b in (ours, theirs)
    ]
    for statistic in (lambda s: s.prod(1), lambda s: s[:, 0] / s[:, 1]):  # area and aspect ratio
        assert scipy.stats.ks_2samp(*map(statistic, sides)).pvalue > 1e-3


def test_erase_fills_one_rectangle_with_normal_noise():
    count, image = 1024, jnp.full((1024, 16, 16, 3), 9.0)
    out = np.asarray(jax.jit(lambda key, image: erase.erase(key, image, 0.25))(keys(count), image))
    erased = (out != 9.0).all(-1)
    np.testing.assert_array_equal(erased, (out != 9.0).any(-1))
    for pixels in erased[erased.any((1, 2))]:
        (rows,), (columns,) = (np.nonzero(pixels.any(axis)) for axis in (1, 0))
        assert pixels.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    assert scipy.stats.binomtest(int(erased.any((1, 2)).sum()), count, 0.25).pvalue > 1e-3
    noise = out[erased]
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 4 / np.sqrt(len(noise))
    assert len(np.unique(noise)) > 0.95 * noise.size


def test_erase_depends_on_its_own_key_only():
    image = np.random.default_rng(1).normal(size=(8, 9, 11, 3)).astype(np.float32)
    run = jax.jit(erase.erase)
    out = run(keys(8), image, 1.0)
    np.testing.assert_array_equal(run(keys(8)[4:1:-1], image[4:1:-1], 1.0), out[4:1:-1])
    np.testing.assert_array_equal(run(keys(8), image, 0.0), image)


def timm_cut(height: int, width: int, rng, count: int):
    """cutmix_bbox_and_lam of timm 0.3.2 to 1.0.28 for alpha 1, in its own words: (lower, upper)
    corners [count, 2].
    """
    ratio = np.sqrt(1 - rng.beta(1.0, 1.0, count))
    half = (np.array([height, width]) * ratio[:, None]).astype(int) // 2
    centre = np.column_stack([rng.integers(0, height, count), rng.integers(0, width, count)])
    return np.maximum(centre - half, 0), np.minimum(centre + half, [height, width])


def test_cutmix_replaces_a_box_and_mixes_labels_by_its_area():
    image, label, mask = batch()
    run = jax.jit(jax.vmap(lambda key: mix.cutmix(key, 1.0, image, label, mask)))
    shares = []
    for mixed, mixed_label, mixed_mask in zip(
        *(np.asarray(x) for x in run(keys(500))), strict=True
    ):
        replaced = mixed[1, :, :, 0] == 0  # where image 1 shows image 0
        np.testing.assert_array_equal(
            mixed, np.where(replaced[:, :, None], np.roll(image, 1, 0), image)
        )
        rows, columns = replaced.any(1), replaced.any(0)
        np.testing.assert_array_equal(replaced, rows[:, None] & columns)
        for inside in (rows, columns):
            assert np.abs(np.diff(inside.astype(int))).sum() <= 2
        share = replaced.mean()
        np.testing.assert_allclose(
            mixed_label, (1 - share) * label + share * np.roll(label, 1, 0), atol=1e-6
        )
        # A pair counts only if both images do.
        np.testing.assert_array_equal(mixed_mask, [1, 1, 0, 0, 1, 1])
        shares.append(share)
    low, high = timm_cut(*image.shape[1:3], np.random.default_rng(0), 4000)
    assert scipy.stats.ks_2samp(shares, (high - low).prod(1) / (12 * 20)).pvalue > 1e-3


def test_cut_boxes_are_distributed_as_in_timm():
    count, height, width = 4000, 30, 44
    lam = np.random.default_rng(1).beta(1.0, 1.0, count).astype(np.float32)
    draw = jax.jit(jax.vmap(lambda key, lam: jnp.stack(mix.cut_box(key, lam, height, width))))
    top, bottom, left, right = np.asarray(draw(keys(count), lam)).T
    low, high = timm_cut(height, width, np.random.default_rng(0), count)
    for ours, theirs in zip([top, left, bottom, right], [*low.T, *high.T], strict=True):
        assert scipy.stats.ks_2samp(ours, theirs).pvalue > 1e-3


def test_cut_box_by_hand():
    draw = jax.jit(jax.vmap(lambda key, lam: jnp.stack(mix.cut_box(key, lam, 12, 20)), (0, None)))
    # A quarter is 6 x 10, clipped at the border.
    for top, bottom, left, right in draw(keys(20), 0.75).tolist():
        assert bottom - top == 6 or top == 0 or bottom == 12
        assert right - left == 10 or left == 0 or right == 20
        assert 3 <= bottom - top <= 6 and 5 <= right - left <= 10
    for top, bottom, left, right in draw(keys(20), 1.0).tolist():
        assert top == bottom and left == right


def test_cut_boxes_have_the_sides_of_timm_up_to_1_0_28():
    """The largest of 2,000 boxes of rand_bbox by lambda, which is not clipped; from 1.0.29 on they
    have odd sides, too.
    """
    lam, height, width = TIMM["lam"], *TIMM_CONFIG["image"]
    box = jax.vmap(lambda key, lam: jnp.stack(mix.cut_box(key, lam, height, width)), (0, None))
    drawn = np.asarray(jax.jit(jax.vmap(box, (None, 0)))(keys(500), lam))
    sides = np.stack([drawn[:, :, 1] - drawn[:, :, 0], drawn[:, :, 3] - drawn[:, :, 2]], -1).max(1)
    for version in ("0.3.2", "1.0.28"):
        np.testing.assert_array_equal(sides, TIMM[f"sides/{version}"])
    for version in ("1.0.29", "1.0.31"):
        np.testing.assert_array_equal(sides, TIMM[f"sides/{version}"] // 2 * 2)
        assert (TIMM[f"sides/{version}"] % 2).any()


def test_labels_are_smoothed_as_in_timm_but_sets_keep_their_share():
    """By mixup_target of timm with smoothing 0.1, and with sets of labels, new in 1.0.31."""
    share, classes = TIMM_CONFIG["smoothing"], TIMM_CONFIG["num_classes"]
    smoothed = optax.smooth_labels(losses.targets(TIMM["labels"], classes), share)
    for version in ("1.0.28", "1.0.31"):
        np.testing.assert_allclose(smoothed, TIMM[f"smoothed/{version}"], atol=1e-7)
    sets = optax.smooth_labels(jnp.float32(TIMM["sets"]), share)
    theirs = TIMM["smoothed_sets/1.0.31"]
    np.testing.assert_allclose(sets, theirs - share / 2 + share / classes, atol=1e-7)


def test_mix_batch_picks_one_way_by_a_coin():
    image, label, mask = batch()
    run = jax.jit(jax.vmap(lambda key: mix.mix_batch(key, image, label, mask, 0.8, 1.0)))
    outs = list(zip(*(np.asarray(x) for x in run(keys(400))), strict=True))
    blended = [bool((x[1] == x[1, 0, 0]).all() and 0 < x[1, 0, 0, 0] < 1) for x, _, _ in outs]
    assert scipy.stats.binomtest(sum(blended), len(outs), 0.5).pvalue > 1e-3
    for (mixed, mixed_label, mixed_mask), mixup in zip(outs[:50], blended[:50], strict=True):
        assert mixup or set(np.unique(mixed[1])) <= {0.0, 1.0}
        # Image 1 is 1, its partner is 0.
        np.testing.assert_allclose(mixed_label[1, 1], mixed[1].mean(), atol=1e-5)
        np.testing.assert_array_equal(mixed_mask, [1, 1, 0, 0, 1, 1])


def test_mix_batch_without_one_or_both(monkeypatch):
    monkeypatch.setattr(mix, "mixup", lambda *args: ("mixup", *args))
    monkeypatch.setattr(mix, "cutmix", lambda *args: ("cutmix", *args))
    batch = ("image", "label", "mask")
    assert mix.mix_batch("key", *batch, 0.8, 0.0) == ("mixup", "key", 0.8, *batch)
    assert mix.mix_batch("key", *batch, 0.0, 1.0) == ("cutmix", "key", 1.0, *batch)
    assert mix.mix_batch("key", *batch, 0.0, 0.0) == batch
