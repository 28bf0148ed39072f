"""The tasks of VTAB against a second statement of their specification: parts, labels, images, the
1,000 examples.
"""

import hashlib
import json
import os
import pathlib

import mocked_tfds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
import vtab_spec
from conftest import GOLDEN, ROOT

from comparisons import sprites
from vit_jax import config as configs
from vit_jax.data import images
from vit_jax.data.sources import catalog, tfds_labels, vtab_tasks
from vit_jax.data.sources import vtab as vtab_source
from vit_jax.data.sources import vtab_fingerprint as fingerprint
from vit_jax.data.sources.vtab_tasks import VTAB
from vit_jax.errors import UserError
from vit_jax.models import preparation
from vit_jax.train.experiment import Experiment
from vit_jax.vtab import trainer

NAMES = tuple(VTAB)
SCENIC = json.loads((GOLDEN / "vtab_scenic.json").read_text())["tasks"]


def split_dict(counts):
    """TFDS's arithmetic of splits, without files."""
    template = tfds.core.ShardedFileTemplate(
        data_dir=pathlib.Path("/nowhere"), dataset_name="x", filetype_suffix="tfrecord"
    )
    return tfds.core.SplitDict(
        [
            tfds.core.SplitInfo(
                name=name,
                shard_lengths=[count],
                num_bytes=1,
                filename_template=template.replace(split=name),
            )
            for name, count in counts.items()
        ]
    )


def found_positions(counts, expression: str) -> list[tuple[str, int, int]]:
    """(split, from, to) of what TFDS makes of an expression; neighbours are one."""
    parts = []
    for part in split_dict(counts)[expression].file_instructions:
        name = os.path.basename(str(part.filename)).split("-")[1].split(".")[0]
        parts.append((name, part.skip, part.skip + part.take))
    return parts


def test_the_tasks_are_those_of_vtab():
    assert tuple(vtab_spec.FULL) == NAMES and len(NAMES) == 19
    groups = [task.group for task in VTAB.values()]
    assert [groups.count(group) for group in vtab_tasks.GROUPS] == [7, 4, 8]
    assert sum(task.splits["test"][1] for task in VTAB.values()) == 387_904


@pytest.mark.parametrize("name", NAMES)
def test_every_part_has_the_examples_of_the_specification(name):
    builder, classes, counts = vtab_spec.FULL[name]
    task = VTAB[name]
    assert (task.builder, task.num_classes) == (builder, classes)
    expected = vtab_spec.positions(name)
    assert task.splits.keys() == expected.keys()
    for part, (expression, count) in task.splits.items():
        assert found_positions(counts, expression) == expected[part], part
        assert count == sum(end - start for _, start, end in expected[part]), part


def operations(data, size: int) -> str:
    """What `config.data` does to the side and the orientation of an image, in scenic's words."""
    crop = data.crop
    if crop == "resize":
        crop = f"resize({size})"
    if crop == "random":
        crop = f"resize({images.larger(size, data.fraction)})|random_crop({size})"
    return crop + "|flip_lr" * data.flip


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_crops_and_flips_as_scenic_does(name):
    recipe = f"{ROOT}/configs/finetune.py:B/16,vtab:{name}"
    config = configs.load(recipe)
    classes, training, evaluation = SCENIC[name]
    assert operations(config.data, config.image_size) == training
    test = config.evals.test.data
    how = preparation.configured(test, (config.image_size,) * 2)
    assert f"resize({how.target[0]})" == evaluation and not how.is_cropped
    assert (how.method, test.split) == ("bilinear", "test")
    assert catalog.declared(config).num_classes == classes
    suite_side = trainer.resized_side(384) if VTAB[name].crop else 384
    assert training.startswith(f"resize({suite_side})") and ("flip" in training) == VTAB[name].flip
    own = configs.load(recipe, ["--config.data.crop=inception", "--config.data.flip=True"])
    assert (own.data.crop, own.data.flip) == ("inception", True)


def test_other_crops_and_flips_of_a_task_are_logged(caplog):
    def logged(name, *arguments):
        caplog.clear()
        config = configs.load(f"{ROOT}/configs/demo.py", [f"--config.data.name={name}", *arguments])
        Experiment.declared(config)
        return [record.getMessage() for record in caplog.records]

    flip = "--config.data.flip=True"
    (crop,) = logged("vtab:dmlab", "--config.data.crop=inception", flip)
    assert crop.startswith("vtab:dmlab: data.crop=inception, but `vit_jax.vtab run` has resize")
    (flipped,) = logged("vtab:dsprites_label_x_position", "--config.data.crop=resize", flip)
    assert "data.flip=True, but `vit_jax.vtab run` has False" in flipped
    (share,) = logged("vtab:dtd", "--config.data.crop=random", flip)
    assert "data.fraction=0.875" in share
    parts = (
        "--config.data.mixture=(('vtab:dmlab', 1.0), ('vtab:kitti_closest_vehicle_distance', 1.0))"
    )
    both = logged(
        "mixture", parts, "--config.data.crop=random", flip, "--config.evals.val.data.name=digits"
    )
    assert [line.split(": ")[0] for line in both] == [
        "vtab:dmlab",
        "vtab:kitti_closest_vehicle_distance",
    ]
    assert not logged("vtab:dmlab", "--config.data.crop=resize", flip)
    assert not logged("digits", "--config.data.crop=inception")


def features_of(task):
    return tfds.builder(f"{task.builder}:{task.versions[-1]}", data_dir="/nowhere").info.features


def rule_of(task, features):
    return tfds_labels.RULES.get(task.label) or tfds_labels.of_feature(features, task.label)


@pytest.mark.parametrize("name", NAMES)
def test_labels_and_images_are_those_of_the_specification(name):
    task, rng = VTAB[name], np.random.default_rng(0)
    features = features_of(task)
    parse = tf.function(
        tfds_labels.make_parse(features, "image", rule_of(task, features), task.scale)
    )
    assert len(rule_of(task, features).names) == task.num_classes
    seen = set()
    for _ in range(60):
        example = mocked_tfds.value("", features, rng)
        if task.builder == "dsprites":
            example["image"] //= 128
        record = features.serialize_example(features.encode_example(example))
        encoded, label = parse(tf.constant(record))
        assert int(label) == vtab_spec.label_of(name, example)
        seen.add(int(label))
        image = images.decode(encoded).numpy()
        stored = np.broadcast_to(example["image"], (*example["image"].shape[:2], 3))
        factor = 255 if task.builder == "dsprites" else 1
        difference = np.abs(image.astype(int) - stored.astype(int) * factor)
        if encoded.numpy()[:2] == b"\xff\xd8":  # JPEG
            assert difference.mean() < 20
        else:
            assert difference.max() == 0
    assert min(seen) >= 0 and max(seen) < task.num_classes and len(seen) > 1


def test_values_at_thresholds_belong_to_the_lower_bin():
    def clevr(depth):
        objects = dict(pixel_coords=tf.constant([[0.0, 0.0, depth], [0.0, 0.0, 150.0]]))
        return int(tfds_labels.clevr_distance(dict(objects=objects)))

    above = np.nextafter(np.float32(8.0), np.float32(9.0))
    depths = (7.9, 8.0, above, 8.5, 8.6, 9.0, 9.5, 10.0, 10.1, 100.0)
    assert list(map(clevr, depths)) == [0, 0, 1, 1, 2, 2, 3, 4, 5, 5]

    def kitti(objects):
        kinds = tf.constant([kind for kind, _ in objects], tf.int64)
        depths = tf.constant([[0.0, 0.0, depth] for _, depth in objects], tf.float32)
        features = dict(type=kinds, location=tf.reshape(depths, [-1, 3]))
        return int(tfds_labels.kitti_distance(dict(objects=features)))

    # The first five are the examples in the tests of task_adaptation.
    given = [[(0, 1.0)], [(0, 10.0)], [(0, 30.0)], [(4, 30.0)], [(1, 30.0), (2, 1.0)]]
    given += [[(0, 8.0)], [(0, 20.0)], [(0, 20.001)], [(3, 1.0), (0, 9.0)], []]
    assert list(map(kitti, given)) == [0, 1, 2, 3, 0, 0, 1, 2, 1, 3]


def test_classes_of_dsprites_are_merged_as_published():
    def merged(name, classes):
        rule = tfds_labels.RULES[name]
        return [int(rule.label({rule.keys[0]: tf.constant(i, tf.int64)})) for i in range(classes)]

    assert merged("dsprites_label_x_position", 32) == [i // 2 for i in range(32)]
    orientation = merged("dsprites_label_orientation", 40)
    assert [orientation.count(i) for i in range(16)] == [3, 2] * 8 and orientation == sorted(
        orientation
    )


# First keys of train800 and val200, as printed by others or measured on data sets that TFDS wrote.
FIRST = {
    "cifar100": ("train", "16399 1680 47917", "13431 9237 17462"),
    "svhn": ("train", "16399 1680 47917", "21145 64736 23870"),
    "dsprites_label_x_position": ("train", "16399 634903 206287", "220697 85843 84902"),
    "patch_camelyon": (
        "validation",
        "train_251464 train_132287 train_133786",
        "valid_3270 valid_10310 valid_20603",
    ),
    "clevr_count_all": (
        "train",
        "CLEVR_train_043876.png CLEVR_train_033421.png CLEVR_train_062025.png",
        "CLEVR_train_035084.png CLEVR_train_029360.png CLEVR_train_004525.png",
    ),
}


def keys_in_order(name: str, split: str) -> list[str]:
    """All keys of a TFDS split, in the order of its files."""
    count = vtab_spec.FULL[name][2][split]
    form = {
        "patch_camelyon": f"{split[:5]}_{{}}",
        "clevr_count_all": f"CLEVR_{split[:5]}_{{:06}}.png",
    }.get(name, "{}")
    keys = [form.format(i) for i in range(count)]
    return [keys[i] for i in sprites.tfds_order(split, keys)]


@pytest.mark.parametrize("name", FIRST)
def test_the_manifest_follows_from_the_order_of_tfds(name):
    split, first, second = FIRST[name]
    ((where, start, _),) = vtab_spec.positions(name)["val200"]
    assert where == split
    train800 = keys_in_order(name, "train")[:800]
    val200 = keys_in_order(name, where)[start : start + 200]
    assert (train800[:3], val200[:3]) == (first.split(), second.split())
    digests = tuple(
        hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16] for keys in (train800, val200)
    )
    assert fingerprint.MANIFEST[VTAB[name].builder] == digests


def test_the_manifest_of_sun397_follows_from_the_lists_of_tfds():
    folder = pathlib.Path(tfds.__file__).parent / "image_classification"
    found = {}
    for part, split in (("train", "tr"), ("validation", "va")):
        text = (folder / f"sun397_tfds_{split}.txt").read_text().split()
        found[part] = [text[i] for i in sprites.tfds_order(part, text)]
    keys = found["train"][:800], found["validation"][:200]
    digests = tuple(hashlib.sha256("\n".join(part).encode()).hexdigest()[:16] for part in keys)
    assert fingerprint.MANIFEST["sun397/tfds"] == digests


def test_keys_are_read_from_the_features_that_tell_them():
    def key(builder, **example):
        return fingerprint.key_of(builder, example)

    assert key("cifar100", id=b"train_00042") == "42"
    assert key("patch_camelyon", id=b"train_251464") == "train_251464"
    assert key("eurosat/rgb", filename=b"Forest_687.jpg") == "Forest_Forest_687.jpg"
    long = "dense_residential_068.jpg"
    assert key("resisc45", filename=long.encode()) == f"dense_residential_{long}"
    latents = dict(zip(fingerprint.LATENTS, map(np.int64, (2, 5, 39, 31, 30)), strict=True))
    assert key("dsprites", **latents) == str(737_279 - 1)
    assert fingerprint.key_of("smallnorb", {}) is None


def records(name: str, split: str, count: int) -> list[bytes]:
    features, rng = tfds.builder(name, data_dir="/nowhere").info.features, np.random.default_rng(1)
    return [
        features.serialize_example(features.encode_example(mocked_tfds.value("", features, rng)))
        for _ in range(count)
    ]


def test_the_states_of_data_on_disk(tmp_path):
    pets, where = VTAB["oxford_iiit_pet"], str(tmp_path)
    assert vtab_source.find(pets, where).state == "missing"
    assert vtab_source.find(VTAB["resisc45"], where).state == "manual"
    mocked_tfds.write("oxford_iiit_pet:4.0.0", where, dict(train=3_680, test=3_668))
    found = vtab_source.find(pets, where)
    assert found.state == "wrong count" and "3,668 examples, not 3,669" in found.detail
    mocked_tfds.write("oxford_iiit_pet:4.0.0", where, dict(train=3_680, test=3_669))
    found = vtab_source.find(pets, where)
    assert found.state == "ready"
    next(found.builder.data_path.glob("*-test.*")).unlink()
    found = vtab_source.find(pets, where)
    assert found.state == "missing files" and "1 of 2, the first is" in found.detail
    mocked_tfds.write("kitti:3.3.0", where, dict(train=6_347, validation=423, test=711))
    found = vtab_source.find(VTAB["kitti_closest_vehicle_distance"], where)
    assert found.state == "wrong version" and "3.3.0" in found.detail


def test_an_example_that_tfds_leaves_out_today_is_known_and_no_other(tmp_path):
    sun = VTAB["sun397"]
    for count, state in ((76_127, "ready"), (76_126, "wrong count")):
        where = str(tmp_path / str(count))
        mocked_tfds.write(
            "sun397/tfds:4.0.0", where, dict(train=count, test=21_750, validation=10_875)
        )
        assert vtab_source.find(sun, where).state == state


def test_a_part_is_opened_by_its_name_and_reads_the_right_records(tmp_path):
    own = records("oxford_iiit_pet:4.0.0", "train", 40)
    mocked_tfds.write(
        "oxford_iiit_pet:4.0.0",
        str(tmp_path),
        dict(train=3_680, test=3_669),
        dict(train=own, test=own),
    )
    found = vtab_source.find(VTAB["oxford_iiit_pet"], str(tmp_path))
    source = vtab_source.open_part(
        "oxford_iiit_pet", VTAB["oxford_iiit_pet"], found, "train800val200"
    )
    assert len(source) == 1_000
    wanted = [*range(800), *range(2_944, 3_144)]
    assert source.read([0, 799, 800, 999]) == [own[wanted[i] % 40] for i in (0, 799, 800, 999)]
    with pytest.raises(UserError, match=r"has no part 'valid'.*train800"):
        vtab_source.open_part("oxford_iiit_pet", VTAB["oxford_iiit_pet"], found, "valid")


@pytest.fixture(scope="module")
def few_sprites(tmp_path_factory):
    where = tmp_path_factory.mktemp("sprites")
    sprites.write(str(where), 1_500)
    return where


def test_sprites_have_the_features_and_the_order_of_dsprites(few_sprites):
    builder = tfds.builder("dsprites:2.*.*", data_dir=few_sprites)
    examples = list(builder.as_data_source("train"))
    assert len(examples) == 1_500
    for example, number in zip(examples[:3], (16_399, 634_903, 206_287), strict=True):
        latents = [int(example[f"label_{name}"]) for name in sprites.NAMES]
        assert latents == list(np.unravel_index(number, (3, 6, 40, 32, 32)))
        assert example["value_scale"] == pytest.approx(0.5 + 0.1 * latents[1])
        assert example["value_orientation"] == pytest.approx(2 * np.pi * latents[2] / 39)
        assert example["value_x_position"] == pytest.approx(latents[3] / 31)
        assert set(np.unique(example["image"])) == {0, 1} and example["image"].shape == (64, 64, 1)


def test_sprites_move_and_turn_as_their_latents_say():
    at = np.ravel_multi_index((2, 5, 3, 0, 0), sprites.SIZES)
    moved = np.ravel_multi_index((2, 5, 3, 31, 20), sprites.SIZES)
    y, x = np.nonzero(sprites.image(at))
    y_moved, x_moved = np.nonzero(sprites.image(moved))
    np.testing.assert_array_equal(np.stack([y + 20, x + 31]), np.stack([y_moved, x_moved]))
    turned = [np.ravel_multi_index((2, 5, angle, 15, 15), sprites.SIZES) for angle in (0, 39, 10)]
    first, around, other = map(sprites.image, turned)
    np.testing.assert_array_equal(first, around)
    assert (first != other).any()
    sizes = [
        sprites.image(np.ravel_multi_index((0, scale, 0, 15, 15), sprites.SIZES)).sum()
        for scale in range(6)
    ]
    assert sizes == sorted(sizes) and sizes[-1] > 3.5 * sizes[0]
