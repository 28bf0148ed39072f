"""What all objectives have in common: microbatches, devices and crashes change no number, and what
they train loads as a model.
"""

import jax
import numpy as np
import pytest
from conftest import build_experiment, metric_lines
from test_train import final_params, run, same_bits

import vit_jax
from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes
from vit_jax.train import metrics
from vit_jax.train import state as states
from vit_jax.weights import scan_layout

SETTINGS = {
    "masked_patches": "objective=masked_patches masked_patches.target=colors_4x4",
    "mae": "objective=mae mae.decoder_width=16 mae.decoder_depth=1 mae.decoder_heads=2",
    "dino": "objective=dino model.pool=tok data.views.local_count=1 data.views.local_size=4 "
    "dino.prototypes=16 dino.head_width=8 dino.bottleneck=4",
}
MODEL = "model.variant=Ti/4 model.width=32 model.depth=2 model.mlp_dim=64 model.num_heads=4"
LARGER = "image_size=16 optim.ema_decay=0.9 optim.name=sgd optim.lr=0.1"
BATCH = 16


def flags(settings: str) -> list[str]:
    return [f"--config.{setting}" for setting in settings.split()]


def batches(count: int) -> list[dict]:
    chance = np.random.default_rng(0)
    return [
        dict(
            image=chance.integers(0, 256, (BATCH, 16, 16, 3), np.uint8),
            label=chance.integers(0, 10, BATCH).astype(np.int32),
            mask=np.array([1, 1, 0] + [1] * (BATCH - 3), np.float32),
            seed=chance.integers(0, 2**31 - 1, (BATCH, 2)).astype(np.int32),
        )
        for _ in range(count)
    ]


def trained(unlabelled: str, settings: str, devices: int):
    """(metrics by step, parameters in the loop layout) of a few steps."""
    settings = f"data.batch_size={BATCH} {LARGER} {MODEL} {settings}"
    config = configs.load(unlabelled, flags(settings))
    mesh = meshes.make_mesh(config.mesh, jax.devices()[:devices])
    experiment = build_experiment(config, mesh=mesh)
    found = []
    with jax.set_mesh(experiment.mesh):
        state = states.fresh_state(experiment)
        for batch in batches(3):
            batch = jax.device_put(batch, experiment.abstract_batch["image"].sharding)
            state, scalars = experiment.train_step(state, batch)
            found.append(scalars)
    params = scan_layout.relayout(jax.device_get(state.ema_params), False, np.stack)
    return jax.device_get(found), scan_layout.flatten(params)


# test_dino_step.py has those of dino.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked_patches", "mae"])
def test_microbatches_and_devices_change_no_number(name, unlabelled):
    """Scan only stacks the layers. SGD, for Adam divides the rounding errors of gradients that are
    zero, such as those of key biases.
    """
    one, params = trained(unlabelled, SETTINGS[name], devices=1)
    split = "mesh.data=2 mesh.fsdp=2 mesh.tensor=2 accum_steps=2 model.scan=True"
    many, params_of_many = trained(unlabelled, f"{SETTINGS[name]} {split}", devices=8)
    for first, second in zip(one, many, strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            np.testing.assert_allclose(second[key], value, rtol=2e-5, err_msg=key)
    assert params.keys() == params_of_many.keys()
    for key, value in params.items():
        np.testing.assert_allclose(params_of_many[key], value, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_crashed_run_continues_with_the_same_bits(name, unlabelled, tmp_path, monkeypatch):
    arguments = flags(SETTINGS[name] + " optim.ema_decay=0.9")
    assert run(unlabelled, tmp_path / "whole", *arguments) == 0
    write = metrics.MetricWriter.write

    def broken(self, step, scalars):
        if step == 7:
            raise RuntimeError("killed")
        write(self, step, scalars)

    monkeypatch.setattr(metrics.MetricWriter, "write", broken)
    with pytest.raises(RuntimeError, match="killed"):
        run(unlabelled, tmp_path / "run", *arguments)
    monkeypatch.undo()
    assert run(unlabelled, tmp_path / "run", *arguments) == 0
    lines = [metric_lines(tmp_path / folder) for folder in ("whole", "run")]
    for key in ("step", "train/loss", "train/grad_norm", "eval/val/knn"):
        assert [line.get(key) for line in lines[0]] == [line.get(key) for line in lines[1]], key
    assert same_bits(final_params(tmp_path / "whole"), final_params(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked_patches", "mae"])
def test_what_it_trains_loads_as_a_model_and_is_fine_tuned(name, unlabelled, tiny, tmp_path):
    """Evaluations without labels fall, the loss does, and a new head learns from its features."""
    settings = f"{SETTINGS[name]} total_steps=60 optim.lr=3e-3"
    assert run(unlabelled, tmp_path / "run", *flags(settings)) == 0
    losses = [line["train/loss"] for line in metric_lines(tmp_path / "run")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    loaded = vit_jax.from_pretrained(tmp_path / "run")
    assert loaded.model.num_classes == 0 and not loaded.class_names
    shapes = jax.eval_shape(loaded.model.init, jax.random.key(0), np.zeros((1, 8, 8, 3)))["params"]
    assert jax.tree.structure(shapes) == jax.tree.structure(loaded.params)
    if name == "mae":
        autoencoder, whole = vit_jax.from_pretrained(tmp_path / "run", objective="mae")
        assert autoencoder.decoder.width == 16
        assert whole.keys() - loaded.params.keys() == {"decoder"}
    assert run(tiny, tmp_path / "tuned", f"--config.init_from={tmp_path / 'run'}") == 0
    start = metric_lines(tmp_path / "tuned")[0]["train/loss"]
    assert abs(start - np.log(10)) < 1e-6, "the head is new"
