"""The training step against the published one, and what must not change it: microbatches, padding,
devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from conftest import below, golden
from test_optim import settings

import vit_jax
from vit_jax import config as configs
from vit_jax.data.augment.batch import make_preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models import losses
from vit_jax.models.classifier import normalize
from vit_jax.train import optim, step
from vit_jax.train.objectives import classify
from vit_jax.train.objectives.objective import Objective
from vit_jax.weights import scan_layout

SIZES = dict(
    width=64,
    depth=1,
    mlp_dim=256,
    num_heads=4,
    patch_size=8,
    image_size=16,
    num_classes=10,
    pool="gap",
)


def preprocessing(num_classes=10, mixup=0.0):
    """Normalisation and mixing as in a run, without augmentation."""
    config = configs.defaults()
    config.mixup, config.data.flip = mixup, False
    return make_preprocess(config, normalize, num_classes)


def build(model, tx, schedule, mixup=0.0, **options):
    objective = classify.Classify(model, losses.softmax_xent)
    settings = dict(preprocess=preprocessing(model.num_classes, mixup), seed=0) | options
    return step.make_train_step(objective, tx, schedule, **settings)


def with_loss(loss):
    """An objective without a model."""
    objective = Objective(None)
    object.__setattr__(objective, "loss", loss)
    return objective


def example_batch(size=16, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (size, 16, 16, 3)).astype(np.uint8)
    label = rng.integers(0, 10, size).astype(np.int32)
    return dict(
        image=image, label=label, mask=np.ones(size, np.float32), seed=np.zeros((size, 2), np.int32)
    )


def setup(model_options=None, optim_options=None, **options):
    """(state, jitted step) of a small model whose head is random, so that every parameter has a
    gradient.
    """
    model = vit_jax.create_model(**SIZES, **(model_options or {}))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    params["head"]["kernel"] = 0.1 * jax.random.normal(jax.random.key(1), (64, 10))
    config = settings(
        **dict(name="sgd", lr=0.1, warmup_steps=0, grad_clip_norm=0.5) | (optim_options or {})
    )
    tx, schedule = optim.make_optimizer(config, params, 100)
    state = step.create_state(params, tx, options.get("ema_decay", 0.0))
    return state, jax.jit(build(model, tx, schedule, **options))


def difference(one, two) -> float:
    """Largest difference of two trees, relative to the largest value of each leaf (or 1e-3, if that
    is smaller).
    """
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in pairs)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_trajectory_equals_vision_transformer(accum_steps):
    arrays, config = golden(f"trainstep_vitjax_accum{accum_steps}")
    sizes = config["model"]["transformer"]
    model = vit_jax.create_model(
        num_classes=5, image_size=16, patch_size=8, width=config["model"]["hidden_size"], depth=sizes["num_layers"],
        mlp_dim=sizes["mlp_dim"], num_heads=sizes["num_heads"],
    )  # fmt: skip
    schedule = config["schedule"]
    assert schedule["decay_type"] == "cosine"
    optimizer = ml_collections.ConfigDict(
        settings(
            name="sgd",
            lr=schedule["base"],
            warmup_steps=schedule["warmup_steps"],
            momentum_dtype="bfloat16",
        )
    )
    params = scan_layout.unflatten(below(arrays, "params_step0"))
    tx, rate = optim.make_optimizer(optimizer, params, schedule["total_steps"])
    state = step.create_state(params, tx, 0.0)
    train_step = jax.jit(build(model, tx, rate, accum_steps=accum_steps))
    for number in range(config["n_steps"]):
        image = (arrays["images"][number] + 1.0) * 127.5
        label = arrays["labels_onehot"][number].argmax(-1)
        np.testing.assert_array_equal(arrays["labels_onehot"][number], np.eye(5)[label])
        seed = np.zeros((len(image), 2), np.int32)
        batch = dict(image=image, label=label, mask=np.ones(len(image), np.float32), seed=seed)
        state, metrics = train_step(state, batch)
        np.testing.assert_allclose(metrics["train/loss"], arrays["losses"][number], atol=1e-5)
    flat = scan_layout.flatten(state.params)
    for key, value in below(arrays, "params_final").items():
        np.testing.assert_allclose(flat[key], value, atol=3e-5, err_msg=key)


def test_microbatches_give_the_update_of_one_batch():
    """In one of them no example counts."""
    batch = example_batch() | dict(mask=np.array([1, 0] + [1] * 14, np.float32))
    state, one = setup(mixup=0.5)
    _, many = setup(mixup=0.5, accum_steps=16)
    (state_one, metrics_one), (state_many, metrics_many) = one(state, batch), many(state, batch)
    assert metrics_one["train/grad_norm"] > 0.5, "clipping must be at work"
    np.testing.assert_allclose(metrics_one["train/loss"], metrics_many["train/loss"], rtol=1e-6)
    assert difference(state_many.params, state_one.params) < 1e-5


def test_every_microbatch_and_step_draws_its_own_masks():
    keys = []

    def loss(params, batch, key, step):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        logits = batch["image"].mean((1, 2, 3))[:, None] * params["w"]
        return losses.softmax_xent(logits, batch["label"]), {}

    tx = optax.sgd(0.1)
    train_step = step.make_train_step(
        with_loss(loss),
        tx,
        lambda n: 0.1,
        preprocess=preprocessing(),
        seed=3,
        accum_steps=4,
    )
    state = step.create_state({"w": jnp.ones(10)}, tx, 0.0)
    jitted = jax.jit(train_step)
    for _ in range(3):
        state, _ = jitted(state, example_batch())
    jax.effects_barrier()
    assert len(set(keys)) == 12
    # A function of (seed, step) alone: the same step again draws the same masks.
    again = dataclasses.replace(state, step=jnp.zeros((), jnp.int32))
    jitted(again, example_batch(seed=5))
    jax.effects_barrier()
    assert set(keys[12:]) == set(keys[:4])


def test_masked_examples_do_not_count():
    state, train_step = setup()
    batch = example_batch()
    changed = {key: value.copy() for key, value in batch.items()}
    changed["image"][3:5] = 255
    mask = np.ones(16, np.float32)
    mask[3:5] = 0
    one, metrics_one = train_step(state, batch | dict(mask=mask))
    two, metrics_two = train_step(state, changed | dict(mask=mask))
    assert metrics_one["train/loss"] == metrics_two["train/loss"]
    assert difference(one.params, two.params) == 0.0
    whole, _ = train_step(state, batch)
    assert difference(one.params, whole.params) > 1e-4


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_without_any_example_that_counts_nothing_changes(accum_steps):
    state, train_step = setup(accum_steps=accum_steps, ema_decay=0.9)
    state, _ = train_step(state, example_batch())
    after, metrics = train_step(state, example_batch() | dict(mask=np.zeros(16, np.float32)))
    assert np.isnan(metrics["train/loss"]) and metrics["train/skipped_in_row"] == 1
    for name in ("params", "opt_state", "ema_params"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    assert after.step == state.step + 1


@pytest.mark.slow
def test_microbatches_on_eight_devices_give_the_loss_of_one():
    """With dropout, in blocks that are scanned; test_parallel.py has all meshes."""
    options = dict(
        model_options=dict(dropout=0.1, scan=True), mixup=0.2, accum_steps=2, ema_decay=0.9
    )
    state, train_step = setup(**options)
    assert "encoderblock" in state.params["Transformer"]
    single = state
    found = []
    for number in range(3):
        single, metrics = train_step(single, example_batch(seed=number))
        found.append(float(metrics["train/loss"]))

    mesh = meshes.make_mesh(dict(replica=2, data=1, fsdp=2, tensor=2))
    state, train_step = setup(**options)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, sharding.param_specs(state, mesh))
        for number in range(3):
            batch = jax.device_put(example_batch(seed=number), sharding.batch_sharding(mesh))
            state, metrics = train_step(state, batch)
            np.testing.assert_allclose(float(metrics["train/loss"]), found[number], rtol=1e-5)
    assert difference(jax.device_get(state.params), jax.device_get(single.params)) < 1e-3


def test_a_non_finite_update_is_left_out_and_counted():
    state, train_step = setup(optim_options=dict(name="adam"), ema_decay=0.99)
    state, _ = train_step(state, example_batch())
    params = jax.tree.map(lambda x: x, state.params)
    broken = dataclasses.replace(
        state, params=params | {"head": {**params["head"], "bias": jnp.full(10, jnp.inf)}}
    )
    after, metrics = train_step(broken, example_batch(seed=1))
    assert not np.isfinite(metrics["train/loss"])
    assert after.skipped_steps == 1 and after.skipped_in_row == 1 and after.step == 2
    for field in ("params", "opt_state", "ema_params"):
        for new, old in zip(
            jax.tree.leaves(getattr(after, field)),
            jax.tree.leaves(getattr(broken, field)),
            strict=True,
        ):
            np.testing.assert_array_equal(new, old)


def test_ema_is_a_weighted_mean_of_the_parameters():
    state, train_step = setup(ema_decay=0.999)
    ema = np.array(state.params["head"]["kernel"])
    for number in range(4):
        state, _ = train_step(state, example_batch(seed=number))
        decay = min(0.999, (1 + number) / (10 + number))
        ema = decay * ema + (1 - decay) * np.array(state.params["head"]["kernel"])
    np.testing.assert_allclose(state.ema_params["head"]["kernel"], ema, rtol=1e-5, atol=1e-7)
    assert step.eval_params(state) is state.ema_params
