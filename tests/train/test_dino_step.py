"""Training steps of DINO: what must not change them, its schedules, and the errors of a config."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build_experiment
from jax.sharding import PartitionSpec as P
from test_optim import settings
from test_step import difference

import vit_jax
from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models.dino import DinoHead
from vit_jax.train import optim, step
from vit_jax.train.objectives.dino import HEAD, MASK, PATCH_HEAD, Dino
from vit_jax.weights import scan_layout

SIZES = dict(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=4, image_size=16)
OPTIONS = dict(
    total_steps=10,
    centering="centering",
    temperature=0.07,
    temperature_warmup_steps=4,
    freeze_last_layer=1,
    ibot=True,
    shared_head=False,
    koleo=0.1,
    local_count=2,
    local_size=8,
)


def objective(**options) -> Dino:
    model = vit_jax.create_model(**SIZES, num_classes=0)
    return Dino(model, DinoHead(prototypes=16, width=8, bottleneck=4), **OPTIONS | options)


def make_batch(size=32, seed=0):
    rng = np.random.default_rng(seed)
    return dict(
        image=rng.normal(size=(size, 2, 16, 16, 3)).astype(np.float32),
        local=rng.normal(size=(size, 2, 8, 8, 3)).astype(np.float32),
        label=np.zeros((size, 0), np.float32),
        mask=np.ones(size, np.float32),
        seed=rng.integers(0, 2**30, (size, 2)).astype(np.int32),
    )


@functools.cache
def setup(accum_steps=1, **options):
    """(state, jitted step) of a small run; the mask embedding and the head are not small, so that
    every parameter has a gradient.
    """
    small = objective(**options)
    params = jax.jit(small.init, static_argnums=0)(0)
    params[HEAD] = jax.tree.map(lambda x: 8 * x, params[HEAD])
    config = settings(name="sgd", lr=0.1, momentum=0.0, warmup_steps=0, grad_clip_norm=0.5)
    tx, schedule = optim.make_optimizer(config, params, 10)
    state = step.create_state(params, tx, 0.9, small.running())
    train_step = step.make_train_step(
        small,
        tx,
        schedule,
        preprocess=lambda batch, key: batch,
        seed=0,
        accum_steps=accum_steps,
        ema_decay=0.9,
    )
    return state, jax.jit(train_step)


def train(state, train_step, steps=2, change=lambda batch: batch):
    for number in range(steps):
        state, metrics = train_step(state, change(make_batch(seed=number)))
    return state, {name: float(value) for name, value in metrics.items()}


def padded(batch):
    """Two examples do not count, and are not finite or far away."""
    mask = batch["mask"].copy()
    mask[3:5] = 0
    return batch | dict(mask=mask)


def check_equal(found, expected):
    """Of (state, metrics) each, within what the order of sums changes."""
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    for name in ("params", "ema_params", "running"):
        trees = [jax.device_get(getattr(pair[0], name)) for pair in (found, expected)]
        assert not trees[0] or difference(*trees) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("centering", ["centering", "sinkhorn_knopp"])
def test_devices_and_microbatches_change_nothing(centering):
    options = dict(centering=centering, shared_head=centering == "sinkhorn_knopp")
    state, one = setup(**options)
    expected = train(state, one, change=padded)
    assert expected[1]["train/grad_norm"] > 0.5, "clipping must be at work"
    assert bool(expected[0].running) == (centering == "centering")
    _, train_step = setup(accum_steps=2, **options)
    mesh = meshes.make_mesh(dict(replica=1, data=2, fsdp=2, tensor=2))

    def place(batch):
        return jax.device_put(padded(batch), sharding.batch_sharding(mesh))

    with jax.set_mesh(mesh):
        placed = jax.device_put(state, sharding.param_specs(state, mesh))
        check_equal(train(placed, train_step, change=place), expected)


def moved(new, old) -> dict:
    """Whether each parameter has changed, by name."""
    before = scan_layout.flatten(old)
    return {name: bool((x != before[name]).any()) for name, x in scan_layout.flatten(new).items()}


def test_what_learns_and_how_the_teacher_follows():
    """In the first step, the prototypes are frozen."""
    state, train_step = setup()
    first, metrics = train(state, train_step, steps=1)
    second, _ = train(state, train_step, steps=2)
    frozen = {name for name, value in moved(first.params, state.params).items() if not value}
    assert frozen == {f"{head}/prototypes/kernel" for head in (HEAD, PATCH_HEAD)}
    assert all(moved(second.params, first.params).values())
    # At step 0 the momentum is that of the config.
    expected = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.params, first.params)
    assert difference(first.ema_params, expected) < 1e-5
    total = metrics["train/dino"] + metrics["train/ibot"] + 0.1 * metrics["train/koleo"]
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-5)
    assert set(objective().of_model(state.params)) == {"embedding", "cls", "Transformer"}


def softmax(x, temperature):
    e = np.exp((x - x.max(-1, keepdims=True)) / temperature)
    return e / e.sum(-1, keepdims=True)


def test_losses_are_their_definitions():
    """Loops in numpy over views and patches; only the model and the heads are the same code."""
    state, train_step = setup()
    small = objective()
    batch = make_batch()
    hidden, _, _ = jax.device_get(small.hide(batch["seed"]))
    params = state.params
    apply_head = jax.jit(small.head.apply)

    def head(name, tokens):
        return np.asarray(apply_head({"params": params[name]}, tokens), np.float64)

    @jax.jit
    def encode(image, mask):
        def change(x):
            return jnp.where(mask[..., None], params[MASK], x)

        return small.encoder.apply({"params": small.of_model(params)}, image, change=change)

    masks = [hidden[:, view] for view in range(2)]
    teacher = [encode(batch["image"][:, view], 0 * masks[view]) for view in range(2)]
    student = [encode(batch["image"][:, view], masks[view]) for view in range(2)]
    local = jax.jit(small.local_tokens)(params, batch["local"])
    said = [softmax(head(HEAD, tokens[:, 0]), 0.04) for tokens in teacher]
    heard = [tokens[:, 0] for tokens in student] + [local[:, 0], local[:, 1]]
    heard = [np.log(softmax(head(HEAD, tokens), 0.1)) for tokens in heard]
    pairs = [(t, v) for t in range(2) for v in range(4) if t != v]
    dino = np.mean([-(said[t] * heard[v]).sum(-1) for t, v in pairs])

    ibot = 0.0
    for view in range(2):
        target = softmax(head(PATCH_HEAD, teacher[view][:, 1:]), 0.04)
        found = np.log(softmax(head(PATCH_HEAD, student[view][:, 1:]), 0.1))
        terms = -(target * found).sum(-1)
        ibot += (terms * masks[view]).sum(1) / np.maximum(masks[view].sum(1), 1) / 2
    _, metrics = train_step(state, batch)
    assert float(metrics["train/dino"]) == pytest.approx(dino, rel=1e-5)
    assert float(metrics["train/ibot"]) == pytest.approx(ibot.mean(), rel=1e-5)


def test_extra_parameters():
    assert objective(ibot=False).extra == (HEAD,)
    assert objective(shared_head=True).extra == (HEAD, MASK)
    assert objective().extra == (HEAD, PATCH_HEAD, MASK)


def test_padding_changes_nothing():
    state, train_step = setup()
    batch = padded(make_batch())
    changed = {key: value.copy() for key, value in batch.items()}
    changed["image"][3:5] = 7
    changed["local"][3:5] = -7
    one, _ = train_step(state, batch)
    two, _ = train_step(state, changed)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
    jax.tree.map(np.testing.assert_array_equal, one.running, two.running)


def test_schedules():
    small = objective(total_steps=100, temperature_warmup_steps=31)
    # What cosine_scheduler of facebookresearch/dino (utils.py) gives, and numpy's linspace.
    momentum = 1 + 0.5 * (0.996 - 1) * (1 + np.cos(np.pi * np.arange(100) / 100))
    found = [float(small.ema_decay(0.996, number)) for number in range(100)]
    np.testing.assert_allclose(found, momentum, rtol=1e-6)
    found = [float(small.teacher_temperature(number)) for number in range(40)]
    expected = np.r_[np.linspace(0.04, 0.07, 31), np.full(9, 0.07)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert float(objective(temperature_warmup_steps=0).teacher_temperature(0)) == 0.07


def test_flops_are_those_of_all_views():
    one = objective(ibot=False, koleo=0.0, local_count=0)
    assert one.train_flops == 2 * 4 * (one.model.flops + one.head.flops(16))
    local = one.model.clone(image_size=(8, 8)).flops + one.head.flops(16)
    more = objective(ibot=False, koleo=0.0, local_count=3)
    assert more.train_flops == one.train_flops + 3 * 3 * local
    params = dict(one.head.init(jax.random.key(0), jnp.zeros((1, 16)))["params"])
    sizes = [x.size for x in jax.tree.leaves(params) if x.ndim == 2]
    assert one.head.flops(16) == 2 * sum(sizes)
    hidden = objective(koleo=0.0, local_count=0)
    assert [stack.length for stack in more.stacks] == [17, 17, 5, 5, 5]
    assert hidden.train_flops == one.train_flops + 4 * 8 * one.head.flops(16)


def experiment(**changes):
    values = {
        "objective": "dino",
        "total_steps": 10,
        "image_size": 16,
        "data.batch_size": 32,
        "data.views.local_size": 8,
        "model.variant": "Ti/4",
        "model.depth": 1,
        "optim.ema_decay": 0.99,
        "dino.prototypes": 16,
    }
    return build_experiment(configs.assemble(values | changes), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.ema_decay": 0.0}, "optim.ema_decay is 0"),
        ({"model.pool": "gap"}, "class token"),
        ({"model.pool": "map", "model.class_token": True}, "neither attention pooling"),
        ({"model.variant": "Mixer-B/4", "model.depth": 0}, "class token"),
        ({"model.posemb": "learn2d"}, "data.views.local_count=0"),
        ({"data.views.local_size": 3}, "local_size=3 is smaller than a patch"),
        ({"image_size": 4, "data.views.local_size": 4}, "only one"),
        ({"accum_steps": 4}, "multiple of 64"),
        ({"data.batch_size": 40}, "multiple of 16"),
        ({"mesh.tensor": 2, "model.num_heads": 2, "dino.prototypes": 15}, "dino.prototypes=15"),
    ],
)
def test_errors_of_a_config(changes, message):
    with pytest.raises(UserError, match=message):
        experiment(**changes)


def test_an_experiment_is_sharded_and_delivers_the_teacher():
    mesh = {"mesh.fsdp": 2, "mesh.tensor": 2, "model.num_heads": 2}
    built = experiment(**mesh, **{"dino.prototypes": 4096})
    state = built.abstract_state
    kernel = state.params[HEAD]["prototypes"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tensor")
    assert set(state.running) == {"views", "patches"}
    assert built.abstract_batch["local"].shape == (32, 8, 8, 8, 3)
    assert set(built.eval_params(state)) == {"embedding", "cls", "Transformer"}
    scanned = dataclasses.replace(built.objective, model=built.model.with_scan(True))
    assert "encoderblock" in scanned.abstract_params()["Transformer"]
