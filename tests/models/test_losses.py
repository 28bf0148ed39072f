"""Losses and mixup against the published implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden

from vit_jax import config as configs
from vit_jax.data.augment import mix
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.models import losses
from vit_jax.models.classifier import normalize

GOLDEN_LOSSES = sorted(set(losses.LOSSES) - {"multilabel_xent"})


@pytest.mark.parametrize("name", GOLDEN_LOSSES)
@pytest.mark.parametrize("case", ["small", "wide"])
@pytest.mark.parametrize("kind", ["onehot", "multihot", "soft"])
def test_losses_equal_big_vision(name, case, kind):
    arrays, _ = golden("losses")
    logits, labels = arrays[f"{case}/logits"], arrays[f"{case}/labels_{kind}"]
    truth = arrays[f"{case}/{name}/{kind}/per_example"]
    np.testing.assert_allclose(losses.LOSSES[name](logits, labels), truth, rtol=1e-5)
    mean = arrays[f"{case}/{name}/{kind}/mean"]
    np.testing.assert_allclose(losses.LOSSES[name](logits, labels).mean(), mean, rtol=1e-5)
    grad = jax.grad(lambda x: losses.LOSSES[name](x, labels).mean())(jnp.asarray(logits))
    np.testing.assert_allclose(
        grad, arrays[f"{case}/{name}/{kind}/grad_mean"], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("case", ["small", "wide"])
@pytest.mark.parametrize("kind", ["onehot", "multihot", "soft"])
def test_cross_entropy_less_the_entropy_of_the_labels_is_big_visions_divergence(case, kind):
    arrays, _ = golden("losses")
    logits, labels = arrays[f"{case}/logits"], arrays[f"{case}/labels_{kind}"]
    entropy = -(labels * np.log(np.maximum(labels, 1e-8))).sum(-1)
    truth = arrays[f"{case}/softmax_xent_kl/{kind}/per_example"]
    np.testing.assert_allclose(losses.softmax_xent(logits, labels) - entropy, truth, rtol=1e-5)


def test_every_golden_loss_is_used():
    arrays, _ = golden("losses")
    inputs = {name for name in arrays if name.split("/")[1].startswith(("logits", "labels"))}
    outputs = {name.split("/")[1] for name in set(arrays) - inputs}
    assert outputs == {*GOLDEN_LOSSES, "softmax_xent_kl"} and len(inputs) == 8


def test_multilabel_xent_asks_of_every_class_whether_any_of_it_is_there():
    logits, labels = np.array([[2.0, -1.0, 0.5]]), np.array([[0.2, 0.8, 0.0]])
    p = 1 / (1 + np.exp(-logits))
    truth = -(np.log(p[:, 0]) + np.log(p[:, 1]) + np.log(1 - p[:, 2])) / 3
    np.testing.assert_allclose(
        losses.multilabel_xent(jnp.asarray(logits), jnp.asarray(labels)), truth, rtol=1e-6
    )
    grad = jax.grad(lambda x: losses.multilabel_xent(x, jnp.asarray(labels)).sum())(
        jnp.asarray(logits)
    )
    np.testing.assert_allclose(grad, (p - [[1, 1, 0]]) / 3, rtol=1e-5)


def test_label_smoothing_shares_a_part_among_all_classes_before_labels_are_mixed():
    config = configs.defaults()
    config.label_smoothing, config.cutmix, config.data.flip = 0.2, 1.0, False
    batch = dict(
        image=np.zeros((2, 8, 8, 3), np.uint8),
        label=np.array([0, 1]),
        mask=np.ones(2),
        seed=np.zeros((2, 2)),
    )
    batch["seed"] = batch["seed"].astype(np.int32)
    label = make_preprocess(config, normalize, 4)(batch, jax.random.key(0))["label"]
    share = (label[0, 0] - 0.05) / 0.8  # of the first image in itself
    assert 0 < share < 1
    np.testing.assert_allclose(
        label[0], [0.05 + 0.8 * share, 0.05 + 0.8 * (1 - share), 0.05, 0.05], rtol=1e-5
    )


@pytest.mark.parametrize("case", golden("mixup")[1]["cases"], ids=lambda case: f"p{case['p']}")
def test_mixing_equals_big_vision(case):
    arrays, config = golden("mixup")
    name = f"mixup_{config['cases'].index(case)}"
    for what in ("images", "labels"):
        mixed = mix.mix(arrays[f"{name}/{what}"], case["lam"])
        np.testing.assert_allclose(mixed, arrays[f"{name}/mixed_{what}"], atol=1e-6)
    rows = mix.mix(jnp.eye(case["batch"]), case["lam"])
    np.testing.assert_allclose(rows, arrays[f"{name}/mix_matrix"], atol=1e-6)


def test_mixup_draws_one_lambda_of_at_least_a_half_and_drops_pairs_with_padding():
    image, label = jnp.eye(4)[:, None, None, :] * jnp.ones((4, 2, 2, 4)), jnp.eye(4)
    mask = jnp.array([1.0, 1.0, 0.0, 1.0])
    lams = []
    for seed in range(200):
        mixed, mixed_label, mixed_mask = mix.mixup(jax.random.key(seed), 0.2, image, label, mask)
        lam = mixed_label[0, 0]
        np.testing.assert_allclose(
            mixed_label, lam * label + (1 - lam) * jnp.roll(label, 1, axis=0), atol=1e-6
        )
        np.testing.assert_allclose(mixed[:, 0, 0], mixed_label, atol=1e-6)
        np.testing.assert_array_equal(mixed_mask, [1, 1, 0, 0])
        lams.append(float(lam))
    assert min(lams) >= 0.5
    # Beta(0.2, 0.2) puts 0.74 of its mass within 0.1 of the ends; max(lam, 1 - lam) keeps that.
    assert 0.64 <= np.mean(np.array(lams) > 0.9) <= 0.84


def test_normalisation_maps_bytes_to_minus_one_to_one():
    values = normalize(jnp.array([0, 127, 255], jnp.uint8))
    np.testing.assert_allclose(values, [-1.0, 127 / 127.5 - 1, 1.0], atol=1e-7)
