"""Data without labels: the same batches as with labels, from files that need not have any; and what
training with labels says of such files.
"""

import csv
import pathlib

import nasty
import numpy as np
import pytest
import tensorflow_datasets as tfds
from conftest import last_error
from test_listings import make_tar
from test_sources import write_tfds

from vit_jax import config as configs
from vit_jax.data import __main__ as command
from vit_jax.data import pipeline
from vit_jax.data.sources import catalog
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError
from vit_jax.train import __main__ as train

PHOTOS = [nasty.encoded(photo, "PNG") for photo in nasty.photos(12, width=24, height=16)]
CONFIG = """
def get_config():
    data = dict(name="digits", batch_size=8, on_corrupt="skip")
    model = dict(variant="Ti/4", width=32, depth=1, mlp_dim=32, num_heads=2)
    return dict(objective="mae", total_steps=2, image_size=8, model=model, data=data)
"""


def config_of(name: str, objective="mae", **data):
    data |= dict(name=name, batch_size=8)
    values = dict(objective=objective, total_steps=4, image_size=8, data=data)
    return configs.load_in_python(values, {})


def opened(config):
    return sources.open_training(config.data, config.user, configs.uses_labels(config))


def batches(config) -> list[dict]:
    rows = np.arange(config.data.batch_size)
    return list(pipeline.train_pipeline(config, opened(config), rows, 4).batches())


def names_of(config, root: pathlib.Path) -> list[str]:
    source = opened(config)
    return [source.describe(i).removeprefix(f"{root}/") for i in range(len(source))]


def write(root: pathlib.Path, *paths: str) -> None:
    for path, photo in zip(paths, PHOTOS, strict=False):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(photo)


def write_csv(path: pathlib.Path, rows: list[dict]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return f"csv:{path}"


@pytest.fixture
def labelled(tmp_path) -> dict[str, str]:
    """The same images with labels in every form, by kind."""
    paths = [f"{('owl', 'jay')[i % 2]}/{i}.png" for i in range(12)]
    write(tmp_path / "folder", *paths)
    write_csv(tmp_path / "folder/list.csv", [dict(path=p, label=p[:3]) for p in paths])
    (tmp_path / "tars").mkdir()
    members = {f"{i}.png": PHOTOS[i] for i in range(12)} | {f"{i}.cls": b"1" for i in range(12)}
    make_tar(tmp_path / "tars/all-0.tar", members)
    image = tfds.features.Image(encoding_format="png")
    features = dict(image=image, label=tfds.features.ClassLabel(num_classes=3))
    examples = [dict(image=np.full((4, 4, 3), 9 * i, np.uint8), label=i % 3) for i in range(12)]
    write_tfds(tmp_path / "tfds", "herbarium", features, examples, ("image", "label"))
    return {
        "folder": f"folder:{tmp_path}/folder",
        "csv": f"csv:{tmp_path}/folder/list.csv",
        "tars": f"tars:{tmp_path}/tars",
        "herbarium": "herbarium",
        "digits": "digits",
    }


@pytest.mark.parametrize("kind", ["folder", "csv", "tars", "herbarium", "digits"])
def test_labels_that_are_ignored_change_nothing_else(labelled, tmp_path, kind):
    """Order, ids, seeds and pixels are those of training with labels, bit by bit."""
    data = dict(data_dir=str(tmp_path / "tfds"))
    with_labels = batches(config_of(labelled[kind], "classify", **data))
    without = batches(config_of(labelled[kind], **data))
    assert len(with_labels) == len(without) == 4
    assert any(batch["label"].any() for batch in with_labels)
    for one, other in zip(with_labels, without, strict=True):
        assert other["label"].dtype == np.int32 and not other["label"].any()
        for name in ("image", "id", "seed", "mask"):
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    mine = opened(config_of(labelled[kind], **data))
    assert (mine.num_classes, tuple(mine.class_names), mine.labels().any()) == (0, (), False)


def test_images_are_used_wherever_they_are_in_a_folder(tmp_path):
    wanted = ["a.png", "2019/b.png", "2019/sea/c.png", "2020/d.png"]
    write(tmp_path, *wanted)
    found = names_of(config_of(f"folder:{tmp_path}"), tmp_path)
    assert sorted(found) == sorted(wanted)
    assert found == names_of(config_of(f"folder:{tmp_path}"), tmp_path)


def test_folders_of_splits_keep_their_meaning(tmp_path):
    write(tmp_path, "train/a.png", "train/x/y/b.png", "Val/c.png", "other/d.png", "e.png")
    found = names_of(config_of(f"folder:{tmp_path}"), tmp_path)
    assert sorted(found) == ["train/a.png", "train/x/y/b.png"]
    assert names_of(config_of(f"folder:{tmp_path}", split="val"), tmp_path) == ["Val/c.png"]
    assert (
        opened(config_of(f"folder:{tmp_path}", split="train+validation")).labels().tolist()
        == [0] * 3
    )
    ignored = catalog.listing(f"folder:{tmp_path}", labelled=False).ignored
    assert ignored == {"outside of the split folders": 2}


def test_a_folder_without_use_is_one_line(tmp_path):
    (tmp_path / "empty/train").mkdir(parents=True)
    with pytest.raises(UserError, match=r"/empty/train has no images \(.jpg.*: add some$"):
        opened(config_of(f"folder:{tmp_path}/empty"))
    write(tmp_path / "odd", "test/a.png", "2019/b.png")
    with pytest.raises(UserError, match=r"has test but no train folder: add it, or rename test$"):
        opened(config_of(f"folder:{tmp_path}/odd"))


def test_photos_as_they_come(tmp_path):
    """The folder of tests/data/nasty.py: what can't be read is skipped, labels play no part."""
    root = nasty.make(tmp_path / "nasty")
    source = opened(config_of(f"folder:{root}"))
    good = sum(nasty.NUM_GOOD.values()) + 1  # the cover, which is in no class folder
    config = config_of(f"folder:{root}", on_corrupt="skip")
    host = pipeline.train_pipeline(config, source, np.arange(8), 5)
    read = {int(i) for batch in host.batches() for i in batch["id"][batch["mask"] > 0]}
    assert len(source) == 35 and len(read) == good


def test_tars_without_labels(tmp_path):
    photos = {f"sub/{i}.png": PHOTOS[i] for i in range(3)}
    make_tar(tmp_path / "part-0.tar", {f"{i}.png": PHOTOS[i] for i in range(3)})
    make_tar(tmp_path / "part-1.tar", photos | {"lonely.cls": b"3", "0.json": b"not JSON"})
    make_tar(tmp_path / "val.tar", {"x.png": PHOTOS[4]})
    config = config_of(f"tars:{tmp_path}")
    assert len(opened(config)) == 6
    assert len(opened(config_of(f"tars:{tmp_path}", split="val"))) == 1
    assert catalog.declared(config) == catalog.Facts(6, 0)
    assert not np.concatenate([batch["label"] for batch in batches(config)]).any()


def test_csv_files_without_labels(tmp_path):
    write(tmp_path, "0.png", "1.png", "2.png")
    rows = [dict(path=f"{i}.png") for i in range(3)]
    assert len(opened(config_of(write_csv(tmp_path / "a.csv", rows)))) == 3
    labels = ["owl", "", "9" * 999]
    rows = [dict(row, label=label) for row, label in zip(rows, labels, strict=True)]
    wrong = write_csv(tmp_path / "b.csv", rows)
    assert catalog.found(config_of(wrong), opened(config_of(wrong))) == catalog.Facts(3, 0)
    with pytest.raises(UserError, match=r"line 3 of CSV file .* has no label"):
        opened(config_of(wrong, "classify"))
    other = write_csv(tmp_path / "c.csv", [dict(file="0.png")])
    with pytest.raises(UserError, match=r"must name the columns path and, if there are splits, sp"):
        opened(config_of(other))


def test_tfds_without_labels(tmp_path):
    image = tfds.features.Image(shape=(2, 2, 3))
    picture = np.zeros((2, 2, 3), np.uint8)
    write_tfds(tmp_path, "pictures", dict(image=image), [dict(image=picture)])
    pair = dict(left=image, right=image)
    white = dict(left=picture, right=picture + 255)
    write_tfds(tmp_path, "pairs", pair, [white], ("right", "left"))
    number = tfds.features.Scalar(np.int64)
    write_tfds(tmp_path, "numbers", dict(number=number), [dict(number=1)])
    for name, level in dict(pictures=0, pairs=255).items():
        batch = batches(config_of(name, data_dir=str(tmp_path)))[0]
        assert (batch["image"] == level).all() and not batch["label"].any()
    with pytest.raises(UserError, match="'numbers' has no feature of type Image: choose another"):
        opened(config_of("numbers", data_dir=str(tmp_path)))


class Own:
    """A data set of the user's own, without classes."""

    def __init__(self, split, with_label=False):
        self.with_label = with_label

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return (PHOTOS[i], "no class") if self.with_label else PHOTOS[i]


@pytest.mark.parametrize("with_label", [False, True])
def test_data_of_the_users_own_without_labels(monkeypatch, with_label):
    monkeypatch.setattr(Own.__init__, "__defaults__", (with_label,))
    config = config_of("test_unlabelled:Own")
    source = opened(config)
    assert (len(source), source.num_classes, source.labels().sum()) == (12, 0, 0)
    assert catalog.declared(config) == catalog.Facts(12, 0)
    assert all(batch["mask"].all() for batch in batches(config))


def test_mixtures_of_data_with_and_without_labels(tmp_path):
    write(tmp_path, "a.png", "2019/b.png")
    parts = (("digits", 1.0), (f"folder:{tmp_path}", 3.0))
    config = config_of("mixture", mixture=parts)
    assert len(opened(config)) == 1077 + 2
    ids = np.concatenate([batch["id"] for batch in batches(config)])
    assert (ids >= 1077).mean() > 0.5
    assert catalog.declared(config) == catalog.Facts(1079, 0)


def test_a_part_of_data_without_labels_is_a_random_one():
    config = config_of("digits", subset="10%")
    assert len(opened(config)) == catalog.declared(config).num_examples == 108


def test_training_with_labels_says_that_there_are_none(tmp_path):
    """One line, which names the way without labels."""
    write(tmp_path / "flat", "a.png")
    make_tar(tmp_path / "part-0.tar", {"0.png": PHOTOS[0]})
    listed = write_csv(tmp_path / "flat/a.csv", [dict(path="a.png")])
    image = tfds.features.Image(shape=(2, 2, 3))
    picture = dict(image=np.zeros((2, 2, 3), np.uint8))
    write_tfds(tmp_path, "pictures", dict(image=image), [picture])
    way_out = r"or train without labels, .*data\.unlabelled=True$"
    for name in (f"folder:{tmp_path}/flat", f"tars:{tmp_path}/part-0.tar", listed, "pictures"):
        with pytest.raises(UserError, match=way_out) as error:
            opened(config_of(name, "classify", data_dir=str(tmp_path)))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "key", ["model.num_classes=3", "model.head_bias=-1.0", "data.class_balance=0.5", "mixup=0.1"]
)
def test_keys_of_labels_have_no_effect(key):
    name, _, value = key.partition("=")
    with pytest.raises(UserError, match=f"{name}=.* has no effect with objective=mae, which uses"):
        configs.load_in_python(dict(objective="mae"), {name: float(value) if "." in value else 3})


def test_the_number_of_examples_is_all_that_must_be_known():
    config = config_of("unknown", num_examples=7)
    assert catalog.declared(config) == catalog.Facts(7, 0)
    with pytest.raises(
        UserError, match=r"number of examples of unknown train is not .* set data.n"
    ):
        catalog.declared(config_of("unknown"))


@pytest.mark.slow
def test_a_copy_without_labels_is_one_of_tfds(tmp_path):
    (tmp_path / "mae.py").write_text(CONFIG)
    write(tmp_path / "flat", "a.png", "2019/b.png", "2019/c.png")
    flags = [f"--config={tmp_path}/mae.py", f"--config.data.name=folder:{tmp_path}/flat"]
    copy = [*flags, f"--out={tmp_path}/copies", "--name=small_photos", "--short_side=8"]
    assert command.main(["prepare", *copy]) == 0
    config = config_of("small_photos", data_dir=f"{tmp_path}/copies")
    assert len(opened(config)) == 3 and not batches(config)[0]["label"].any()
    with pytest.raises(UserError, match=r"'small_photos' has no label of type ClassLabel"):
        opened(config_of("small_photos", "classify", data_dir=f"{tmp_path}/copies"))


@pytest.mark.slow
def test_commands_take_data_without_labels(tmp_path, capsys):
    (tmp_path / "mae.py").write_text(CONFIG)
    write(tmp_path / "flat", "a.png", "2019/b.png", "2019/c.png")
    flags = [f"--config={tmp_path}/mae.py", f"--config.data.name=folder:{tmp_path}/flat"]
    sheets = f"--out={tmp_path}/sheets"
    assert train.main([*flags, "--dry_run"]) == 0
    assert "no classes" in capsys.readouterr().out
    assert command.main(["show", *flags]) == 0
    assert "2019/b.png" in capsys.readouterr().out
    assert command.main(["check", *flags, sheets]) == 0
    folder = str(tmp_path / "flat")
    assert command.main(["check", folder, "--unlabelled", sheets]) == 0
    assert "train 3" in capsys.readouterr().out
    assert command.main(["check", *flags, "--unlabelled", sheets]) == 2
    assert "--unlabelled has no effect with --config" in last_error(capsys)
