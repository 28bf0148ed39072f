"""10 updates on fake devices give the same losses and parameters on every mesh, and with every way
to save memory.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build_experiment

from vit_jax import config as configs
from vit_jax.data import to_device
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models import encoder
from vit_jax.models.dropout import bernoulli
from vit_jax.plan import compilation
from vit_jax.train import state as states
from vit_jax.weights import scan_layout

STEPS, BATCH, SIZE, CLASSES = 10, 32, 16, 10

CONFIG = """
import ml_collections

def get_config(arg=""):
    config = ml_collections.ConfigDict()
    config.total_steps = 100
    config.image_size = 16
    config.mixup = 0.2
    config.model = dict(variant="Ti/4", width=64, depth=2, mlp_dim=256, num_heads=8)
    config.model.update(pool="gap", num_classes=10)
    config.model.update(dropout=0.1, droppath=0.1)
    config.data = dict(name="digits", num_examples=1000, batch_size=32)
    config.optim = dict(lr=1e-3, warmup_steps=2, grad_clip_norm=1.0, wd=0.1, ema_decay=0.9)
    return config
"""


def batches() -> list[dict]:
    chance = np.random.default_rng(0)
    return [
        dict(
            image=chance.integers(0, 256, (BATCH, SIZE, SIZE, 3), np.uint8),
            label=chance.integers(0, CLASSES, BATCH).astype(np.int32),
            mask=np.ones(BATCH, np.float32),
            seed=chance.integers(0, 2**31 - 1, (BATCH, 2)).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """f(settings, devices) -> (losses [STEPS], {name: parameter} in the loop layout, text of the
    lowered step).
    """
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(CONFIG)

    @functools.cache
    def run(settings: str = "", devices: int = 8):
        config = configs.load(str(path), [f"--config.{setting}" for setting in settings.split()])
        mesh = meshes.make_mesh(config.mesh, jax.devices()[:devices])
        experiment = build_experiment(config, CLASSES, mesh)
        rows = sharding.local_rows(mesh, BATCH)
        abstract = experiment.abstract_state
        losses = []
        with jax.set_mesh(mesh):
            state = states.fresh_state(experiment)
            lowered = experiment.train_step.lower(state, experiment.abstract_batch)
            train_step = lowered.compile()
            for batch in batches():
                batch = to_device.global_batch(batch, mesh, rows, BATCH)
                state, metrics = train_step(state, batch)
                losses.append(float(metrics["train/loss"]))
        params = scan_layout.relayout(jax.device_get(state.params), False, jnp.stack)
        for leaf, before in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            kept = leaf.sharding.is_equivalent_to(before.sharding, leaf.ndim)
            assert kept, "the step keeps the shardings of the state"
        return np.array(losses), scan_layout.flatten(params), lowered.as_text()

    return run


def assert_same(one, two, loss: float, params: float):
    """`loss`: relative tolerance; `params`: absolute. Parameters change by about lr times STEPS."""
    np.testing.assert_allclose(one[0], two[0], rtol=loss)
    assert one[1].keys() == two[1].keys()
    for name, value in one[1].items():
        np.testing.assert_allclose(value, two[1][name], atol=params, err_msg=name)


MESHES = {
    "data": "mesh.data=8",
    "fsdp": "mesh.fsdp=8",
    "all three": "mesh.data=2 mesh.fsdp=2 mesh.tensor=2",
    "tensor": "mesh.tensor=8",
    "replica": "mesh.replica=2 mesh.data=2 mesh.fsdp=2",
    "zero": "mesh.data=8 mesh.zero=True",
    "zero and fsdp": "mesh.data=4 mesh.fsdp=2 mesh.zero=True",
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_losses_and_parameters_of_one_device(trained, mesh):
    assert_same(trained(mesh), trained("", 1), loss=1e-5, params=2e-4)


SAVINGS = {
    "remat dots": "model.remat=dots",
    "remat by name": "model.remat=names",
    "scan and remat by name": "model.scan=True model.remat=names",
    "scan and remat full": "model.scan=True model.remat=full",
    "blockwise attention": "model.attention=blockwise",
}


@pytest.mark.slow
@pytest.mark.parametrize("saving", SAVINGS.values(), ids=SAVINGS)
def test_every_way_to_save_memory_gives_the_same_numbers(trained, saving):
    found = trained(f"{saving} mesh.data=2 mesh.fsdp=2 mesh.tensor=2")
    assert_same(found, trained("", 1), loss=1e-5, params=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=8", "mesh.data=4 mesh.fsdp=2 mesh.zero=True"])
def test_microbatches_give_the_same_numbers(trained, mesh):
    """Without dropout, since each microbatch draws its own masks."""
    plain = "model.dropout=0 model.droppath=0"
    assert_same(trained(f"{plain} accum_steps=4 {mesh}"), trained(plain, 1), loss=1e-5, params=2e-4)


@pytest.mark.slow
def test_lower_precision_stays_close(trained):
    """bf16 has 8 bits of mantissa, 4e-3 relative: the losses of 10 steps stay within 2 %."""
    truth = trained("", 1)[0]
    for settings in ("model.dtype=bfloat16", "model.dtype=bfloat16 model.softmax_dtype=bfloat16"):
        np.testing.assert_allclose(trained(settings, 1)[0], truth, rtol=0.02)
    np.testing.assert_allclose(trained("optim.momentum_dtype=bfloat16", 1)[0], truth, rtol=2e-3)


@pytest.mark.slow
def test_another_generator_draws_other_noise_and_repeats_itself(trained):
    """The mixing of rbg depends on the mesh: same mesh, same numbers."""
    one = trained("prng=rbg mesh.data=8")
    other = trained("prng=rbg mesh.data=8 log_every=51")
    np.testing.assert_array_equal(one[0], other[0])
    truth = trained("", 1)[0]
    assert np.abs(one[0] - truth).max() > 1e-4
    np.testing.assert_allclose(one[0], truth, rtol=0.2)


def constraints(text: str) -> int:
    return len(compilation.CONSTRAINT.findall(text))


@pytest.mark.slow
def test_the_lowered_step_has_its_sharding_constraints(trained):
    """Without a current mesh they vanish silently, and fsdp gathers activations instead of
    parameters.

    Forward, each of 3 blocks pins query, key, value, the MLP's hidden layer and its output; image
    and tokens are pinned once. The backward pass pins the gradient of each again, but of the image.
    """
    found = constraints(trained("mesh.data=2 mesh.fsdp=2 mesh.tensor=2")[2])
    assert found >= 2 * (2 * 5 + 1) + 1


@pytest.mark.slow
def test_masks_are_the_same_on_every_mesh_and_each_device_computes_its_part():
    shape = (64, 8, 256)

    @jax.jit
    def draw(key):
        return sharding.constrain(bernoulli(key, 0.9, shape), "batch", "length", "mlp")

    mesh = meshes.make_mesh(dict(replica=1, data=4, fsdp=1, tensor=2))
    for generator in ("threefry2x32", "rbg"):
        key = jax.random.key(0, impl=generator)
        with jax.set_mesh(mesh):
            compiled = draw.lower(key).compile()
            found = compiled(key)
        assert found.addressable_shards[0].data.shape == (16, 8, 128)
        assert not re.search(r"all-gather|all-reduce|64,8,256", compiled.as_text())
        np.testing.assert_array_equal(found, bernoulli(key, 0.9, shape))
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, shape)
    np.testing.assert_array_equal(bernoulli(jax.random.key(0), 0.9, shape), kept)


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_dropout_keeps_the_mean(generator):
    """Dropout scales by the probability with which the generator keeps an element."""
    with jax.set_mesh(meshes.make_mesh(dict(replica=1, data=8, fsdp=1, tensor=1))):
        noise = dict(key=jax.random.key(1, impl=generator))
        dropout = jax.jit(lambda x: encoder.dropout(x, 0.1, noise, 0))
        found = dropout(np.ones((64, 64, 256), np.float32))
    kept = np.asarray(found)[np.asarray(found) > 0]
    assert abs(found.mean() - 1) < 4 * (0.1 / 0.9 / found.size) ** 0.5
    np.testing.assert_allclose(kept, 1 / (kept.size / found.size), atol=3e-3)
