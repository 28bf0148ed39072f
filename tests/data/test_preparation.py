"""Prepared images against those of timm 1.0.31 and transformers 5.24 (torchvision 0.29.1, Pillow
13.0.0), which prepared two photographs of scikit-learn as golden/pp_libraries.json says.
"""

import dataclasses
import io
import json
import logging
import math

import jax
import ml_collections
import numpy as np
import pytest
from conftest import GOLDEN, below
from PIL import Image
from sklearn import datasets

from vit_jax import config as configs
from vit_jax import convert, predict
from vit_jax.data import images, pillow, pipeline
from vit_jax.data.sources import file_list
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import NegativeResult, UserError
from vit_jax.evaluate import suite
from vit_jax.models import create, preparation
from vit_jax.models.preparation import Preparation
from vit_jax.weights.formats import hf_processor, timm
from vit_jax.weights.formats.weights import Weights
from vit_jax.weights.scan_layout import flatten

TINY = dict(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=8, num_classes=3)
SETTINGS = json.loads((GOLDEN / "pp_libraries.json").read_text())
with np.load(GOLDEN / "pp_libraries.npz") as archive:
    PREPARED = dict(archive)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with a wide photograph, a high one, and one that is smaller than the models'."""
    folder = tmp_path_factory.mktemp("photos")
    china, flower = datasets.load_sample_images().images
    pieces = dict(landscape=china, portrait=flower[:, 150:451], small=china[100:131, 200:245])
    for name, pixels in pieces.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def model_of(name: str):
    """The model whose weights come with this configuration."""
    config = SETTINGS[name]["config"]
    size = PREPARED[f"{name}/small"].shape[:2]
    if "timm" in name:
        fields = timm.preparation_fields(config)
    else:
        fields = hf_processor.read(config, config, name)
    return create.create(**TINY, image_size=size, **fields)


def prepared(model, folder, **data) -> list[np.ndarray]:
    """The images of a folder as an evaluation decodes them, by name."""
    data = ml_collections.ConfigDict(configs.eval_defaults()["data"] | data)
    files, listing = file_list.load([str(folder)])
    rows = np.arange(len(files))
    host = pipeline.eval_pipeline(
        data, listing, rows, len(files), model.image_size, "error", 2, model
    )
    return list(next(host.batches())["image"])


def assert_same(found, published) -> None:
    """At most 1 level at 99.9 % of the pixels, and 8 anywhere."""
    levels = np.abs(np.stack(found).astype(int) - np.stack(published))
    assert levels.max() <= 8 and np.mean(levels > 1) <= 1e-3


@pytest.mark.parametrize("name", SETTINGS)
def test_pixels_are_those_of_timm_and_transformers(name, photos):
    model = model_of(name)
    np.testing.assert_allclose(model.mean, SETTINGS[name]["mean"], atol=1e-6)
    np.testing.assert_allclose(model.std, SETTINGS[name]["std"], atol=1e-6)
    found = prepared(model, photos)
    published = list(below(PREPARED, name).values())
    assert_same(found, published)
    if "timm" in name:
        np.testing.assert_array_equal(np.stack(found), np.stack(published))


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("export")])
def test_exported_settings_are_those_that_the_library_prepared_images_by(name):
    """So `test_pixels_are_those_of_timm_and_transformers` is about what we export, too."""
    model = create.create(**TINY, **SETTINGS[name]["fields"])
    if "timm" in name:
        params = {
            key: np.zeros(leaf.shape)
            for key, leaf in flatten(create.abstract_params(model)).items()
        }
        _, configs_ = timm.write(Weights(params, create.fields(model)), model)
        written = configs_["config"]["pretrained_cfg"] | dict(num_classes=7)
    else:
        written = hf_processor.write(model, "ViT") | dict(model_type="vit")
    assert json.loads(json.dumps(written)) == SETTINGS[name]["config"]
    how, again = preparation.expected(model), preparation.expected(model_of(name))
    assert dataclasses.replace(how, pixels_of=again.pixels_of) == again


OBSTACLES = {
    "box": (dict(pixels_of="timm", interpolation="box"), "box interpolation", None),
    "border": (dict(pixels_of="timm", crop=0.9, resize="longer"), "images with a border", None),
    "wide": (
        dict(pixels_of="timm", crop=0.9, image_size=(16, 24)),
        "a crop of images that are not square",
        None,
    ),
    "odd": (
        dict(pixels_of="timm", crop=0.95, image_size=224),
        "a crop of (224, 224) from (235, 235)",
        None,
    ),
    "odd-hf": (
        dict(pixels_of="transformers", crop=224 / 235, image_size=224, resize="squash"),
        None,
        "a crop of (224, 224) from (235, 235)",
    ),
    "wide-hf": (
        dict(pixels_of="transformers", crop=0.9, image_size=(16, 24)),
        None,
        "a crop of images that are not square",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_a_library_cannot_do_to_images_is_an_obstacle(case):
    fields, of_huggingface, of_timm = OBSTACLES[case]
    model = create.create(**TINY, **fields)
    assert hf_processor.obstacles(model) == ([of_huggingface] if of_huggingface else [])
    found = timm.obstacles(Weights({}, create.fields(model)), model)
    assert found == ([of_timm] if of_timm else [])


def test_every_crop_is_exported_to_timm_as_the_same_number_of_pixels():
    for size in (224, 256, 384, 518):
        for side in range(size, size + 80):
            model = create.create(
                **TINY, image_size=size, pixels_of="transformers", crop=size / side
            )
            assert math.floor(size / timm.crop_pct(model)) == side


def test_a_conversion_that_would_change_the_images_writes_nothing(tmp_path, monkeypatch):
    model = create.create(**TINY, image_size=16, pixels_of="timm", crop=0.8)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 16, 16, 3)))["params"]
    fields = create.fields(model)
    convert.write(Weights(flatten(params), fields), model, tmp_path / "ours", "ours")
    written = hf_processor.write
    monkeypatch.setattr(
        hf_processor, "write", lambda *args: written(*args) | dict(size=dict(shortest_edge=21))
    )
    message = r"differ by up to .* resized to 20, .* becomes the shorter side resized to 21, "
    with pytest.raises(NegativeResult, match=message):
        convert.convert(str(tmp_path / "ours"), str(tmp_path / "there"), "hf")
    assert not (tmp_path / "there").exists()


UNEXPECTED = {
    "crop_size and size in preprocessor_config.json proportional": dict(
        do_center_crop=True, size=[40, 60], crop_size=32
    ),
    "interpolation '9' is unknown": dict(resample=9),
    r"crop_size=\{'shortest_edge': 8\} has no": dict(
        do_center_crop=True, crop_size=dict(shortest_edge=8)
    ),
}


@pytest.mark.parametrize("message", UNEXPECTED)
def test_processors_that_no_model_can_follow_are_errors(message):
    with pytest.raises(UserError, match=message):
        create.create(**TINY, **hf_processor.read(UNEXPECTED[message], {}, "folder"))


ODD = {  # the same as dict(size=40, image_mean=[0.5] * 3)
    "null": dict(size=40, crop_size=None, do_center_crop=None, default_to_square=None),
    "sides": dict(size=dict(height=40, width=40, longest_edge=None), rescale_factor=1 / 255),
    "list": dict(size=[40, 40], image_processor_type="ViTImageProcessorFast"),
}


@pytest.mark.parametrize("case", ODD)
def test_other_ways_to_write_a_processor(case, caplog):
    found = hf_processor.read(ODD[case], dict(model_type="vit"), "folder")
    assert found == hf_processor.read(dict(size=40, image_mean=[0.5] * 3), {}, "folder")
    assert found["interpolation"] == "bilinear" and not caplog.text


def test_a_processor_of_another_class_is_reported(caplog):
    other = dict(image_processor_type="ConvNextImageProcessor", size=40)
    assert hf_processor.read(other, dict(model_type="deit"), "folder")["interpolation"] == "bicubic"
    assert "ConvNext, is not known here: images are prepared as by DeiT's" in caplog.text


def test_a_processor_without_one_size_is_reported(caplog):
    for settings in (dict(do_resize=False), dict(size=dict(shortest_edge=1, longest_edge=2))):
        caplog.clear()
        assert hf_processor.read(settings, {}, "folder")["crop"] is None
        assert "does not resize images to one size" in caplog.text


# --- one preparation, wherever weights are evaluated ---

NAME = "timm-center-bicubic"


def splits(photos, tmp_path, model, **data):
    """`suite.Splits.open` of a folder with the photos."""
    (tmp_path / "data/train/cat").mkdir(parents=True)
    for path in photos.iterdir():
        (tmp_path / "data/train/cat" / path.name).write_bytes(path.read_bytes())
    config = configs.defaults()
    config.data.name = f"folder:{tmp_path}/data"
    config.data.batch_size = 8
    entry = ml_collections.ConfigDict(configs.eval_defaults()["data"] | data)
    mesh = meshes.make_mesh(config.mesh)
    opened = suite.Splits(config, mesh, (), 3, None)
    split = opened.open("evals.val", entry, "train", is_classified=False)
    batch = next(iter(split.batches(model)))
    return np.asarray(batch["image"])[:3]


def test_evaluations_prepare_images_as_the_weights_expect(photos, tmp_path):
    found = splits(photos, tmp_path, model_of(NAME))
    np.testing.assert_array_equal(found, np.stack(list(below(PREPARED, NAME).values())))


def test_the_log_says_how_images_are_prepared_and_what_cannot_be_is_an_error(caplog):
    config = configs.defaults()
    config.evals.val = ml_collections.ConfigDict(configs.eval_defaults())
    with caplog.at_level(logging.INFO):
        suite.make_steps(config, model_of(NAME))
    wanted = "images of evals.val: the shorter side resized to 53, bicubic as in timm, then the "
    assert wanted + "central 48 x 48" in caplog.text
    config.evals.val.data.method = "bicubic"
    for model in (model_of("timm-border"), model_of(NAME).clone(crop=1.2)):
        with pytest.raises(
            UserError, match=r"data\.method=bicubic of an evaluation adds no border"
        ):
            suite.make_steps(config, model)
    with pytest.raises(UserError, match="resize 'longer' is unknown: use one of shorter, squash"):
        create.create(**TINY, resize="longer")


def test_the_config_overrides_what_the_weights_expect(photos, tmp_path):
    model = model_of(NAME)
    plain = model.clone(pixels_of="tensorflow", interpolation="bilinear", crop=None)
    found = splits(photos, tmp_path, model, crop="resize", method="bilinear")
    np.testing.assert_array_equal(found, np.stack(prepared(plain, photos)))
    whole = preparation.configured(
        ml_collections.ConfigDict(dict(crop="resize", method="")), (48, 48), model
    )
    assert whole == Preparation(
        (48, 48), (48, 48), method="bicubic", pixels_of="timm", fill=whole.fill
    )


def test_predictions_prepare_images_as_evaluations_do(photos):
    model = model_of(NAME)
    files, listing = file_list.load([str(photos)])
    batch = next(iter(predict.batches_of(model, listing, len(files))))
    np.testing.assert_array_equal(batch["image"], np.stack(list(below(PREPARED, NAME).values())))


def test_images_of_the_published_weights_are_resized_whole_by_tensorflow():
    expected = preparation.expected(create.create("B/16"))
    assert expected == Preparation((224, 224), (224, 224), fill=(128, 128, 128))
    assert str(expected) == "the whole image resized to 224, bilinear as in tensorflow"


def test_what_is_not_an_image_or_too_large_is_an_error():
    with pytest.raises(ValueError, match="not an image: use one of JPEG, PNG"):
        pillow.decode(b"no image")
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "PNG")
    with pytest.raises(ValueError, match="too many pixels, more than the 599"):
        pillow.decode(file.getvalue(), 599)
    thin = Image.new("RGB", (1, 40_000))
    with pytest.raises(ValueError, match="too long and thin"):
        pillow.prepare(thin, Preparation((224, 224), (224, 224), "shorter", pixels_of="timm"))
    assert images.MAX_PIXELS == pillow.MAX_PIXELS


def test_every_kind_of_pixels_is_decoded_as_by_tensorflow():
    ramp = np.arange(0, 2**16, 2**10, dtype=np.uint16).reshape(8, 8)
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    kinds = [Image.fromarray(ramp), *(Image.fromarray(colours[..., :n]) for n in (3, 4))]
    kinds += [Image.fromarray(colours[..., 0]), Image.fromarray(colours[..., :3]).quantize(9)]
    for image in kinds:
        file = io.BytesIO()
        image.save(file, "PNG")
        found = np.asarray(pillow.decode(file.getvalue()))
        np.testing.assert_array_equal(found, images.decode(file.getvalue()), image.mode)
