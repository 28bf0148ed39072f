"""The parts of DINO against the published code: golden/dino.npz has what the classes of
facebookresearch/dino (main_dino.py), bytedance/ibot (main_ibot.py) and facebookresearch/dinov2
(loss/*.py, layers/dino_head.py) return for random logits, in float32 on a CPU with torch 2.14.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN

from vit_jax.models.dino import DinoHead, resample_positions
from vit_jax.train.objectives import block_masks, dino, dino_targets, koleo

assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDEN / "dino.npz") as archive:
        return {name: archive[name] for name in archive.files}


def by_view(x):
    """What the published code has as one batch, view after view: [2 * batch, n] -> [batch, 2,
    n].
    """
    return x.reshape(2, -1, x.shape[-1]).swapaxes(0, 1)


def student(logits):
    return logits / dino.STUDENT_TEMPERATURE


def test_loss_and_center_of_dino(arrays):
    center = jnp.zeros(24)
    for number, epoch in enumerate((0, 2)):
        teacher = arrays["teacher"][number]
        temperature = arrays["dino_temperatures"][epoch]
        targets = dino_targets.centered(teacher, center, temperature)
        loss = dino.views_loss(targets, student(arrays["student"][number])).mean()
        assert_close(loss, arrays["dino_losses"][number])
        center = dino_targets.next_center(center, teacher, np.ones(teacher.shape[:2]))
    assert_close(center, arrays["dino_center"])


def test_losses_of_ibot(arrays):
    temperature = arrays["dino_temperatures"][1]
    targets = dino_targets.centered(arrays["teacher"][0], 0.0, temperature)
    loss = dino.views_loss(targets, student(arrays["student"][0])).mean()
    assert_close(loss, arrays["ibot_cls"])

    def centered(logits, weight):
        return dino_targets.centered(logits, 0.0, temperature)

    assert_close(of_patches(arrays, centered), arrays["ibot_patch"])


def of_patches(arrays, targets):
    """The loss of the hidden patches of both views; `targets`: f(logits, weight)."""
    mask = arrays["mask"]
    batch, views, patches = mask.shape
    weight = mask / np.maximum(mask.sum(2, keepdims=True), 1)
    flat = (batch, views * patches)
    teacher = arrays["teacher_patches"].reshape(*flat, -1)
    taught = targets(teacher, mask.reshape(flat).astype(np.float32))
    logits = student(arrays["student_patches"].reshape(*flat, -1))
    return dino.patches_loss(taught, logits, weight.reshape(flat)).mean()


def test_targets_and_centers_of_dinov2(arrays):
    teacher = arrays["teacher"][0]
    ones = np.ones(teacher.shape[:2], np.float32)
    targets = dino_targets.centered(teacher, arrays["center"], 0.05)
    assert_close(targets, by_view(arrays["softmax"]))
    assert_close(dino_targets.next_center(arrays["center"], teacher, ones), arrays["next_center"])
    loss = dino.views_loss(targets, student(arrays["student"][0])).mean()
    assert_close(loss, arrays["v2_local"] + arrays["v2_global"])
    assert_close(dino_targets.sinkhorn_knopp(teacher, ones, 0.05), by_view(arrays["sinkhorn"]))


def test_patches_of_dinov2(arrays):
    def centered(logits, weight):
        center = dino_targets.next_center(arrays["center"], logits, weight)
        assert_close(center, arrays["v2_patch_center"])
        return dino_targets.centered(logits, arrays["center"], 0.05)

    assert_close(of_patches(arrays, centered), arrays["v2_patch"])
    sinkhorn = functools.partial(dino_targets.sinkhorn_knopp, temperature=0.05)
    assert_close(of_patches(arrays, sinkhorn), arrays["v2_patch_sinkhorn_loss"])


def test_padding_does_not_change_targets():
    rng = np.random.default_rng(0)
    logits = np.tanh(rng.normal(size=(6, 2, 8))).astype(np.float32)
    ones = np.ones((4, 2), np.float32)
    weight = np.concatenate([ones, 0 * ones[:2]])
    sinkhorn_knopp = jax.jit(dino_targets.sinkhorn_knopp)
    one = sinkhorn_knopp(logits[:4], ones, 0.05)
    padded = sinkhorn_knopp(logits, weight, 0.05)
    assert_close(padded[:4], one)
    assert not padded[4:].any()
    assert_close(one.sum(-1), ones)
    center = dino_targets.next_center(0.0, logits, weight)
    assert_close(center, 0.1 * logits[:4].mean((0, 1)))
    features = rng.normal(size=(6, 2, 5))
    numbers = dino_targets.collapse_metrics(padded, features, weight)
    for name, value in dino_targets.collapse_metrics(one, features[:4], ones).items():
        assert_close(numbers[name], value)


def test_numbers_of_a_collapse():
    rng = np.random.default_rng(0)
    ones = np.ones((64, 2), np.float32)
    spread = rng.normal(size=(64, 2, 16))
    numbers = dino_targets.collapse_metrics(
        np.eye(8)[np.arange(128) % 8].reshape(64, 2, 8), spread, ones
    )
    assert_close(numbers["teacher_entropy"], 0)
    assert_close(numbers["teacher_mean_entropy"], 1)
    assert 0.9 < numbers["teacher_std"] < 1.05
    same = np.ones((64, 2, 16))
    numbers = dino_targets.collapse_metrics(np.full((64, 2, 8), 1 / 8), same, ones)
    assert_close(numbers["teacher_mean_entropy"] - numbers["teacher_entropy"], 0)
    assert numbers["teacher_std"] < 1e-3


def test_koleo(arrays):
    def mean(x):
        return koleo.koleo(x, jnp.ones(len(x))).mean()

    value, grad = jax.value_and_grad(mean)(jnp.asarray(arrays["koleo_x"]))
    assert_close(value, arrays["koleo"])
    assert_close(grad, arrays["koleo_grad"])


def test_koleo_of_groups_and_padding():
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    mask = np.ones(64, np.float32)
    of = jax.jit(koleo.koleo)
    loss = of(x, mask)
    assert_close(loss[1::2], of(x[1::2], mask[1::2]))  # a microbatch
    assert_close(loss[1::4], of(x[1::4], mask[1::4]))
    x[17] = x[1] + 1e-3
    near = np.asarray(of(x, mask))
    mask[17] = 0
    padded = np.asarray(of(x, mask))
    assert padded[1] < 2 < near[1]
    np.testing.assert_array_equal(padded[2::4], near[2::4])
    alone = np.zeros(64, np.float32)
    alone[3] = 1
    assert of(x, alone)[3] == 0


def test_head_and_its_gradients(arrays):
    head = DinoHead(prototypes=32, width=20, bottleneck=7)
    params = {
        f"Dense_{i}": {part: arrays[f"head_Dense_{i}_{part}"] for part in ("kernel", "bias")}
        for i in range(3)
    }
    params["prototypes"] = dict(kernel=arrays["head_prototypes"])
    x = arrays["head_x"]
    shapes = jax.eval_shape(head.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    def product(params):
        y = head.apply({"params": params}, x)
        return (y * arrays["head_v"]).sum(), y

    grads, y = jax.jit(jax.grad(product, has_aux=True))(params)
    assert_close(y, arrays["head_y"], atol=1e-5)
    assert_close(
        grads["prototypes"]["kernel"], arrays["head_prototypes_grad"], rtol=1e-4, atol=1e-5
    )
    for i in range(3):
        expected = arrays[f"head_Dense_{i}_kernel_grad"]
        assert_close(grads[f"Dense_{i}"]["kernel"], expected, rtol=1e-4, atol=2e-5)


def test_positions_of_a_smaller_crop():
    """A plane stays a plane inside, prefix rows stay, and every row gets a gradient."""
    y, x = np.mgrid[:14, :14]
    plane = (2.0 * y + x).reshape(1, -1, 1).astype(np.float32)
    rows = np.concatenate([np.full((1, 2, 1), 7, np.float32), plane], axis=1)
    small = resample_positions(rows, 2, (14, 14), (6, 6))
    assert_close(small[0, :2, 0], (7, 7))
    inside = small[0, 2:, 0].reshape(6, 6)[2:4, 2:4]
    centers = (np.arange(6) + 0.5) * 14 / 6 - 0.5
    assert_close(inside, 2 * centers[2:4, None] + centers[2:4], atol=0.02)

    def total(rows):
        return jnp.square(resample_positions(rows, 2, (14, 14), (6, 6))).sum()

    assert (jax.grad(total)(rows) != 0).all()


@pytest.mark.parametrize("grid", [(14, 14), (4, 6)])
def test_hidden_blocks(grid):
    patches = grid[0] * grid[1]
    keys = jax.random.split(jax.random.key(0), 200)
    draw = jax.jit(jax.vmap(lambda key: block_masks.draw(key, grid)))
    hidden, index, weight = jax.device_get(draw(keys))
    counts = hidden.sum((1, 2))
    assert (hidden.any(2).sum(1) <= 1).all(), "one view of each example"
    assert 60 < hidden[:, 0].any(1).sum() < 140
    assert counts.max() <= patches // 2
    for mask, chosen, share in zip(hidden.reshape(200, -1), index, weight, strict=True):
        assert len(set(chosen.tolist())) == block_masks.most(patches)
        np.testing.assert_array_equal(np.sort(chosen[share > 0]), np.flatnonzero(mask))
    assert_close(weight.sum(1), (counts > 0).astype(np.float32))
    if patches > 100:
        assert 0.26 < counts.mean() / patches < 0.31, "the share is uniform from 0.1 to 0.5"
        neighbours = hidden[:, :, :-1] & hidden[:, :, 1:]
        assert neighbours.sum() > 0.6 * hidden.sum(), "patches are hidden in blocks"
