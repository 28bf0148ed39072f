"""Pictures of reconstructions: what they show, where they are written, and that they change
nothing.
"""

import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
from conftest import build_experiment, metric_lines
from PIL import Image
from test_objectives import MODEL, SETTINGS, flags
from test_train import final_params, run, same_bits

from vit_jax import config as configs
from vit_jax.distributed import mesh as meshes
from vit_jax.models import mae as autoencoder
from vit_jax.train import pictures
from vit_jax.train.objectives import masked_patches

SIDE = 16
BATCH = 8


def experiment_of(unlabelled, settings: str, devices: int = 1):
    settings = f"image_size={SIDE} data.batch_size={BATCH} {MODEL} {settings}"
    config = configs.load(unlabelled, flags(settings))
    return build_experiment(config, mesh=meshes.make_mesh(config.mesh, jax.devices()[:devices]))


def batch(objective) -> tuple[dict, np.ndarray]:
    """(normalised images with their seeds, the images from 0 to 1)."""
    chance = np.random.default_rng(0)
    image = chance.integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
    seed = chance.integers(0, 2**31 - 1, (BATCH, 2)).astype(np.int32)
    return dict(image=objective.model.normalize(image), seed=seed), image / 255


@pytest.mark.parametrize("norm_pixels", [True, False])
def test_pixels_are_the_inverse_of_targets(unlabelled, norm_pixels):
    settings = f"{SETTINGS['mae']} mae.norm_pixels={norm_pixels}"
    model = experiment_of(unlabelled, settings).objective.autoencoder
    image = np.random.default_rng(0).standard_normal((2, SIDE, SIDE, 3)).astype(np.float32)
    found = model.pixels(model.targets(image), image)
    found = autoencoder.unpatchify(found, model.vit.grid, model.vit.patch_size)
    np.testing.assert_allclose(found, image, atol=1e-5)


def test_reconstructions_have_the_visible_patches_and_the_predicted_ones(
    unlabelled,
    monkeypatch,
):
    """A decoder that predicts 0 of every patch, whose mean is 0 if pixels are normalised."""
    experiment = experiment_of(unlabelled, SETTINGS["mae"])
    given, original = batch(experiment.objective)
    zero = jnp.zeros((BATCH, 16, 48))
    monkeypatch.setattr(autoencoder.MaskedAutoencoder, "apply", lambda *a, **k: zero)
    found = experiment.objective.pictures({}, given)
    seen, reconstruction, shown = (np.asarray(x) for x in found)
    np.testing.assert_allclose(shown, original, atol=1e-6)
    patches = original.reshape(BATCH, 4, 4, 4, 4, 3)
    means = np.broadcast_to(patches.mean((2, 4, 5), keepdims=True), patches.shape)
    means = means.reshape(original.shape)
    hidden = np.isclose(seen, 0.5).all(-1)
    assert hidden.reshape(BATCH, -1).mean(1).tolist() == [0.75] * BATCH
    np.testing.assert_allclose(seen[~hidden], original[~hidden], atol=1e-6)
    np.testing.assert_allclose(reconstruction[~hidden], original[~hidden], atol=1e-6)
    np.testing.assert_allclose(reconstruction[hidden], means[hidden], atol=1e-6)


@pytest.mark.parametrize("target", ["mean_color", "colors_4x4", "pixels"])
def test_corrupted_patches_are_shown_as_they_are_predicted(unlabelled, target, monkeypatch):
    """By a head that knows the answer."""
    settings = f"objective=masked_patches masked_patches.target={target}"
    objective = experiment_of(unlabelled, settings).objective
    given, original = batch(objective)

    def perfect(self, params, image, order, other):
        pixels = image if target == "pixels" else self.model.denormalize(image)
        patches = jax.vmap(lambda x, i: x[i])(autoencoder.patchify(pixels, (4, 4)), order)
        if target == "pixels":
            return patches
        label = masked_patches.color_class(masked_patches.mean_colors(patches, (4, 4), self.cells))
        return jax.nn.one_hot(label, 512).reshape(*order.shape, -1)

    monkeypatch.setattr(masked_patches.MaskedPatches, "predict", perfect)
    corrupted, prediction, shown = map(np.asarray, objective.pictures({}, given))
    np.testing.assert_allclose(shown, original, atol=1e-6)
    assert np.isclose(corrupted, 0.5).all(-1).mean() == 6 / 16  # 80 % of 8 patches, rounded
    is_changed = ~np.isclose(prediction, original, atol=1e-6).all(-1)
    assert is_changed.mean() <= 8 / 16
    if target == "mean_color":
        means = original.reshape(BATCH, 4, 4, 4, 4, 3).mean((2, 4), keepdims=True)
        wanted = np.broadcast_to(means, (BATCH, 4, 4, 4, 4, 3)).reshape(original.shape)
    else:
        wanted = original
    error = 1e-6 if target == "pixels" else 1 / 16  # half of one of 8 levels
    assert np.abs(prediction - wanted)[is_changed].max(initial=0) <= error + 1e-6


def test_colors_of_classes_are_in_their_middle():
    label = jnp.arange(512)
    np.testing.assert_array_equal(masked_patches.color_class(masked_patches.color_of(label)), label)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae", "masked_patches"])
def test_devices_draw_the_same(unlabelled, name):
    """Also if they split the parameters."""
    drawn = []
    for devices, mesh in ((1, ""), (8, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2")):
        experiment = experiment_of(unlabelled, f"{SETTINGS[name]} {mesh}", devices)
        given, _ = batch(experiment.objective)
        image = np.random.default_rng(0).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
        ready = dict(image=image, seed=given["seed"], mask=np.ones(BATCH, np.float32))
        ready |= dict(label=np.zeros(BATCH, np.int32))
        with jax.set_mesh(experiment.mesh):
            params = jax.jit(experiment.objective.init, static_argnums=0)(0)
            ready = jax.device_put(ready, experiment.abstract_batch["mask"].sharding)
            drawn.append(jax.device_get(pictures.make_draw(experiment)(params, ready)))
    (kinds, attention), (others, other_attention) = drawn
    assert [x.dtype for x in kinds] == [np.uint8] * 3
    for one, other in zip(kinds, others, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1
    np.testing.assert_allclose(attention, other_attention, rtol=1e-4)


def test_pictures_are_side_by_side_and_large_enough():
    kinds = [np.full((3, 50, 40, 3), level, np.uint8) for level in (10, 20)]
    rows = pictures.side_by_side(kinds)
    assert rows.shape == (3, 150, 2 * 120 + pictures.GAP, 3)
    assert (rows[:, :, :120] == 10).all() and (rows[:, :, -120:] == 20).all()
    sheet = np.asarray(Image.open(io.BytesIO(pictures.png(rows))))
    assert sheet.shape == (150 + pictures.GAP, 3 * (242 + pictures.GAP), 3)
    assert (sheet[:150, 244:486] == rows[1]).all()
    wide = np.concatenate([rows] * 2, axis=2)
    assert Image.open(io.BytesIO(pictures.png(wide))).size == (486, 3 * 152)


def test_small_views_stand_at_the_top():
    small, large = (np.full((1, side, side, 3), side, np.uint8) for side in (96, 120))
    (row,) = pictures.side_by_side([large, small])
    assert (row[:96, 122:] == 96).all() and (row[96:, 122:] == 255).all()


def test_attention_is_that_of_the_model_evaluated_on_the_augmented_images(tiny):
    import vit_jax
    from vit_jax.figures import rollout

    settings = f"image_size={SIDE} data.batch_size={BATCH} {MODEL} model.pool=gap"
    config = configs.load(tiny, flags(settings))
    experiment = build_experiment(config, mesh=meshes.make_mesh(config.mesh, jax.devices()[:1]))
    given, original = batch(experiment.objective)
    ready = dict(image=np.uint8(255 * original), seed=given["seed"], mask=np.ones(BATCH))
    ready |= dict(label=np.zeros(BATCH, np.int32))
    params = jax.jit(experiment.objective.init, static_argnums=0)(0)
    kinds, attention = pictures.make_draw(experiment)(params, ready)
    (inputs,) = pictures.make_draw_inputs(experiment)(ready)
    model = experiment.model
    weights = vit_jax.intermediates(model, params, model.normalize(inputs))["attention"]
    expected = np.asarray(rollout(weights)).mean(1).reshape(BATCH, 4, 4)
    np.testing.assert_allclose(attention, expected, rtol=1e-4)
    assert not kinds and np.any(np.asarray(inputs) != ready["image"])  # flipped


def test_every_view_is_drawn_and_attention_to_the_first(unlabelled):
    settings = f"{SETTINGS['dino']} data.views.local_count=2 optim.ema_decay=0.9"
    experiment = experiment_of(unlabelled, settings)
    chance = np.random.default_rng(0)
    ready = dict(image=chance.integers(0, 256, (BATCH, 2, SIDE, SIDE, 3), np.uint8))
    ready |= dict(local=chance.integers(0, 256, (BATCH, 2, 4, 4, 3), np.uint8))
    ready |= dict(seed=np.zeros((BATCH, 2), np.int32), mask=np.ones(BATCH))
    ready |= dict(label=np.zeros(BATCH, np.int32))
    views = pictures.make_draw_inputs(experiment)(ready)
    sides = [view.shape[1] for view in views]
    assert sides == [SIDE, SIDE, 4, 4] and {len(view) for view in views} == {BATCH}
    params = jax.jit(experiment.objective.init, static_argnums=0)(0)
    _, attention = pictures.make_draw(experiment)(params, ready)
    assert attention.shape == (BATCH, 4, 4)


def images_in(workdir) -> dict[int, list[str]]:
    """Step -> names of the images in TensorBoard's events."""
    found = {}
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "images":
                    found.setdefault(event.step, []).append(value.tag.removeprefix("pictures/"))
    return found


@pytest.mark.slow
def test_pictures_change_no_number_and_are_the_same_after_a_stop(unlabelled, tmp_path):
    arguments = flags(SETTINGS["mae"] + " optim.ema_decay=0.9")
    assert run(unlabelled, tmp_path / "without", *arguments) == 0
    assert run(unlabelled, tmp_path / "with", *arguments, "--config.pictures_every=5") == 0
    folder = tmp_path / "with/pictures"
    names = {f"{step}{kind}.png" for step in (5, 10, 12) for kind in ("", "_attention")}
    assert {path.name for path in folder.iterdir()} == names | {"0_inputs.png"}
    kinds = ["seen, reconstruction, original", "attention"]
    assert images_in(tmp_path / "with") == {0: ["inputs"]} | dict.fromkeys((5, 10, 12), kinds)
    assert not (tmp_path / "without/pictures").exists()
    assert same_bits(final_params(tmp_path / "without"), final_params(tmp_path / "with"))
    lines = [metric_lines(tmp_path / name) for name in ("without", "with")]
    for key in ("train/loss", "train/grad_norm", "eval/val/knn"):
        assert [line.get(key) for line in lines[0]] == [line.get(key) for line in lines[1]], key
    before = [(folder / name).read_bytes() for name in ("12.png", "12_attention.png")]
    assert run(unlabelled, tmp_path / "with", *arguments, "--config.pictures_every=4") == 0
    assert before == [(folder / name).read_bytes() for name in ("12.png", "12_attention.png")]


def test_a_picture_that_can_not_be_written_is_a_warning(unlabelled, tmp_path, caplog):
    experiment = experiment_of(unlabelled, SETTINGS["mae"])

    class Full:
        def path(self, name):
            raise OSError(28, "No space left on device")

    class Writer:
        def write_pictures(self, *given):
            self.given = given

    mine = pictures.Pictures.__new__(pictures.Pictures)
    mine.experiment = experiment
    mine.files = Full()
    mine.batch = None
    mine.draw = lambda params, batch: ([np.zeros((9, 8, 8, 3), np.uint8)] * 3, None)
    writer = Writer()
    with caplog.at_level(logging.WARNING):
        mine.write(7, {}, writer)
    assert "pictures/7.png can't be written" in caplog.text and "No space left" in caplog.text
    assert writer.given[2].shape[0] == pictures.SHOWN
