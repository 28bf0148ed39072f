"""Sources read what the libraries that own the formats read, and name what is wrong in one line."""

import collections
import io
import os
import shutil
import socket
import time

import ml_collections
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow_datasets.datasets.imagenet_v2 import imagenet_v2_dataset_builder

from vit_jax import config as configs
from vit_jax.data import gif, images, pipeline
from vit_jax.data.sources import folder as image_folder
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import splits
from vit_jax.data.sources.source import with_classes
from vit_jax.errors import UserError

FORMATS = ("tfrecord", "array_record")
TRAIN, TEST = 47, 13  # examples of the TFDS data sets below
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def prepare_cifar10(data_dir, file_format: str):
    """Prepares cifar10 with invented pictures through TFDS itself: 3 shards a split, in TFDS's hash
    order.
    """
    rng = np.random.default_rng(0)

    def examples(count, first):
        for i in range(first, first + count):
            picture = rng.integers(0, 256, (32, 32, 3), np.uint8)
            yield str(i), dict(id=str(i), image=picture, label=int(rng.integers(10)))

    tfds.disable_progress_bar()
    builder = tfds.builder("cifar10", data_dir=data_dir, file_format=file_format)
    builder.info.features["label"].names = NAMES  # TFDS takes them from the download
    builder._split_generators = lambda dl_manager: dict(
        train=examples(TRAIN, 0), test=examples(TEST, 1000)
    )
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    return builder


def write_tfds(data_dir, name: str, features: dict, examples: list, supervised_keys=None):
    """Writes a data set that no code of TFDS knows, four examples a shard, in the order given."""
    folder = data_dir / name / "1.0.0"
    folder.mkdir(parents=True)
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(folder), module_name=""
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=supervised_keys,
    )
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=4)
    writer.initialize_splits(["train"])
    writer.add_examples({"train": examples})
    writer.close_splits(["train"])


@pytest.fixture(scope="module", params=FORMATS)
def cifar10(request, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp(request.param)
    return prepare_cifar10(data_dir, request.param), data_dir


@pytest.fixture
def damaged(request, tmp_path, cifar10):
    """A copy of the data set, to be damaged: (data_dir, path of the last train shard)."""
    shutil.copytree(cifar10[1], tmp_path / "data")
    return tmp_path / "data", max((tmp_path / "data").rglob("cifar10-train*"))


@pytest.fixture
def no_network(monkeypatch):
    calls = []

    def refuse(*args, **kwargs):
        calls.append(args)
        raise OSError("the network was asked for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    yield
    assert not calls


def everything(source) -> tuple[np.ndarray, list[int]]:
    """All images and labels of a source, index by index."""
    found = [source.parse(tf.constant(source.read([i])[0]), i) for i in range(len(source))]
    return np.stack([images.decode(encoded) for encoded, _ in found]), [
        int(label) for _, label in found
    ]


def by_tfds(builder, split: str) -> tuple[np.ndarray, list[int]]:
    """The same by TFDS's own readers, in the order on disk."""
    if builder.info.file_format.value == "array_record":
        found = list(builder.as_data_source(split=split))
    else:
        in_order = tfds.ReadConfig(interleave_cycle_length=1)
        found = list(tfds.as_numpy(builder.as_dataset(split=split, read_config=in_order)))
    return np.stack([example["image"] for example in found]), [
        int(example["label"]) for example in found
    ]


def message(name: str, split: str, data_dir="") -> str:
    """The UserError of opening a source: one line, soon."""
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        sources.open_source(name, split, str(data_dir))
    assert time.monotonic() - started < 30
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


COUNTS = {
    "train": 47,
    "train[:30%]": 14,
    "train[10:20]": 10,
    "train+test": 60,
    "test[-3:]": 3,
    "train[45:]+test[:1]": 3,
}


@pytest.mark.parametrize("split", COUNTS)
def test_tfds_records_are_those_of_tfds(cifar10, split):
    builder, data_dir = cifar10
    source = sources.open_source("cifar10", split, str(data_dir))
    pictures, labels = everything(source)
    wanted_pictures, wanted_labels = by_tfds(builder, split)
    assert len(source) == len(labels) == COUNTS[split]
    assert (source.num_classes, list(source.class_names)) == (10, NAMES)
    np.testing.assert_array_equal(pictures, wanted_pictures)
    assert labels == wanted_labels
    assert (
        len(np.unique(pictures, axis=0)) == COUNTS[split]
    )  # the invented pictures are all different


def test_tfds_is_read_in_any_order_and_by_numpy_integers(cifar10):
    source = sources.open_source("cifar10", "train", str(cifar10[1]))
    forward = [source.read([i])[0] for i in range(TRAIN)]
    order = np.random.default_rng(1).permutation(TRAIN)
    assert [source.read([i])[0] for i in order] == [forward[i] for i in order]


def test_tfds_records_are_the_same_inside_of_the_pipeline(cifar10):
    """There the records are read by several threads and parsed in a graph."""
    builder, data_dir = cifar10
    source = sources.open_source("cifar10", "train+test", str(data_dir))
    data = ml_collections.ConfigDict(dict(crop="resize", method=""))
    batches = list(pipeline.eval_pipeline(data, source, np.arange(20), 20, 32, "error").batches())
    pictures, labels = by_tfds(builder, "train+test")
    np.testing.assert_array_equal(np.concatenate([batch["image"] for batch in batches]), pictures)
    assert np.concatenate([batch["label"] for batch in batches]).tolist() == labels


def test_a_part_of_a_tfds_data_set_keeps_its_classes_in_proportion(cifar10):
    """The labels are read once, by a scan of the records."""
    _, data_dir = cifar10
    whole = sources.open_source("cifar10", "train", str(data_dir))
    _, labels = everything(whole)
    assert whole.labels().tolist() == labels
    config = configs.defaults()
    config.data.update(name="cifar10", data_dir=str(data_dir), subset="20")
    part = sources.open_training(config.data)
    _, chosen = everything(part)
    assert len(part) == 20 and part.labels().tolist() == chosen
    assert (
        np.abs(
            np.bincount(chosen, minlength=10) - np.bincount(labels, minlength=10) * 20 / 47
        ).max()
        <= 1.5
    )


def test_fingerprints_see_the_content_and_not_the_place(tmp_path, no_network):
    features = dict(
        image=tfds.features.Image(shape=(4, 4, 3)), label=tfds.features.ClassLabel(num_classes=2)
    )

    def fingerprint(folder: str, seed: int, split="train") -> str:
        rng = np.random.default_rng(seed)
        images = [
            np.full((4, 4, 3), 7, np.uint8) if seed else rng.integers(0, 256, (4, 4, 3), np.uint8)
            for _ in range(9)
        ]
        write_tfds(
            tmp_path / folder,
            "herbarium",
            features,
            [dict(image=image, label=0) for image in images],
        )
        return sources.open_source("herbarium", split, str(tmp_path / folder)).fingerprint

    first = fingerprint("one", 0)
    assert fingerprint("moved", 0) == first
    assert fingerprint("other", 1) != first  # as many records, of other sizes
    assert fingerprint("part", 0, "train[:5]") != first


def test_tfds_data_without_code_is_opened_by_its_files(tmp_path, no_network):
    features = dict(
        picture=tfds.features.Image(shape=(None, None, 1)),
        kind=tfds.features.ClassLabel(names=["oak", "elm", "ash"]),
    )
    pictures = [np.full((5, 4 + i % 3, 1), 10 * i, np.uint8) for i in range(10)]
    examples = [dict(picture=picture, kind=i % 3) for i, picture in enumerate(pictures)]
    write_tfds(tmp_path, "herbarium", features, examples, ("picture", "kind"))
    source = sources.open_source("herbarium", "train[2:9]", str(tmp_path))
    assert (len(source), source.num_classes, list(source.class_names)) == (
        7,
        3,
        ["oak", "elm", "ash"],
    )
    for i in range(7):
        encoded, label = source.parse(tf.constant(source.read([i])[0]), i)
        np.testing.assert_array_equal(images.decode(encoded), np.repeat(pictures[i + 2], 3, axis=2))
        assert int(label) == (i + 2) % 3


def test_tfds_without_images_or_classes_is_refused(tmp_path, no_network):
    image, number = tfds.features.Image(shape=(2, 2, 3)), tfds.features.Scalar(np.int64)
    kind = tfds.features.ClassLabel(num_classes=2)
    picture = np.zeros((2, 2, 3), np.uint8)
    write_tfds(
        tmp_path,
        "numbers",
        dict(number=number, kind=kind),
        [dict(number=1, kind=0)],
        ("number", "kind"),
    )
    write_tfds(
        tmp_path,
        "depths",
        dict(image=image, label=number),
        [dict(image=picture, label=1)],
        ("image", "label"),
    )
    write_tfds(tmp_path, "pictures", dict(image=image), [dict(image=picture)])
    many = dict(image=image, label=tfds.features.Sequence(number))
    write_tfds(tmp_path, "many", many, [dict(image=picture, label=[0, 1])], ("image", "label"))
    for name, key in dict(numbers="number", depths="label", pictures="label", many="label").items():
        text = message(name, "train", tmp_path)
        assert f"'{name}'" in text and f"no {key} of type" in text and "choose another" in text


@pytest.mark.parametrize("cifar10", ["tfrecord"], indirect=True)
@pytest.mark.parametrize("kept", [0.5, -1, -5000, 0])
def test_truncated_tfrecord_is_named(damaged, kept, no_network):
    data_dir, shard = damaged
    data = shard.read_bytes()
    shard.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    text = message("cifar10", "train", data_dir)
    assert str(shard) in text and "of 16 records" in text and "prepare it again" in text
    assert (
        len(sources.open_source("cifar10", "train[:10]+test", str(data_dir))) == 23
    )  # other shards are whole


def test_missing_shard_is_named(damaged, no_network):
    data_dir, shard = damaged
    shard.unlink()
    text = message("cifar10", "train", data_dir)
    assert str(shard) in text and "missing" in text and "prepare" in text


def test_unprepared_data_set_says_how_to_prepare_it(tmp_path, no_network):
    for name in ("mnist", "imagenet2012", "cifar10:3.*.*"):
        text = message(name, "train", tmp_path)
        assert (
            f"'{name}'" in text
            and f"is not prepared in {tmp_path}" in text
            and "vit_jax.data prepare" in text
        )


@pytest.mark.parametrize(
    "name",
    [
        "no_such_data_set",
        "objectnet",
        "cifar10:9.9.9",
        "cifar10/no_such",
        "two words",
        "",
        "huggingface:mnist",
    ],
)
def test_unknown_data_set_is_named(tmp_path, no_network, name):
    text = message(name, "train", tmp_path)
    assert (
        repr(name) in text
        and str(tmp_path) in text
        and ("correct data.name" in text or "check the name" in text)
    )
    assert len(text) < 500


@pytest.mark.parametrize(
    "split", ["validation", "train+validation", "train[", "train[40:60]", "", "train[:x]"]
)
def test_unknown_split_is_named(cifar10, no_network, split):
    text = message("cifar10", split, cifar10[1])
    assert repr(split) in text and "cifar10" in text and "train, test" in text


@pytest.mark.parametrize("split", ["train[:0]", "train[:1%]", "train[5:5]"])
def test_empty_split_is_named(cifar10, no_network, split):
    text = message("cifar10", split, cifar10[1])
    assert repr(split) in text and "no examples" in text


def test_digits_are_those_of_sklearn_split_by_it():
    data = load_digits()
    scaled = np.round(data.images / 16 * 255).astype(np.uint8)

    def divided(places):
        by_class = data.target[places]
        return train_test_split(places, test_size=360, random_state=0, stratify=by_class)

    rest, test = divided(np.arange(1797))
    train, val = divided(rest)
    for split, places in dict(train=train, val=val, test=test).items():
        source = sources.open_source("digits", split)
        assert source.num_classes == 10 and source.class_names[7] == "7"
        pictures, labels = everything(source)
        np.testing.assert_array_equal(pictures[..., 0], scaled[places])
        np.testing.assert_array_equal(labels, data.target[places])
    assert [len(places) for places in (train, val, test)] == [1077, 360, 360]
    assert "digits" in message("digits", "holdout") and "train, val, test" in message(
        "digits", "holdout"
    )


NUMBERS = {"train": np.arange(47) * 3, "val": 1000 + np.arange(5)}


@pytest.mark.parametrize(
    "expression, wanted",
    [
        ("train", NUMBERS["train"]),
        ("train[:30%]", NUMBERS["train"][:14]),
        ("train[30%:]", NUMBERS["train"][14:]),
        ("train[10:20]", NUMBERS["train"][10:20]),
        ("train[-5:]", NUMBERS["train"][-5:]),
        ("train[-20%:]", NUMBERS["train"][-9:]),
        ("train[45:]+val[:1]", [135, 138, 1000]),
        (" train[ :2 ] + val[4 : ]", [0, 3, 1004]),
    ],
)
def test_split_expressions(expression, wanted):
    np.testing.assert_array_equal(splits.select(expression, NUMBERS, "here"), wanted)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "train[",
        "train[1]",
        "train[a:b]",
        "train[:0]",
        "train[20:10]",
        "train[:48]",
        "train[-48:]",
        "x+val",
    ],
)
def test_bad_split_expressions_are_named(expression):
    with pytest.raises(UserError) as caught:
        splits.select(expression, NUMBERS, "/data/here")
    part = expression.split("+")[0]
    assert repr(part) in str(caught.value) and "/data/here" in str(caught.value)


def save(path, number: int = 0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((2, 3, 3), number, np.uint8)).save(path, **options)


def make_folder(root, counts: dict[str, int]):
    """Pictures whose grey value is their running number in the class: root/CLASS/000.png."""
    for name, count in counts.items():
        for number in range(count):
            save(root / name / f"{number:03}.png", number)


def files(source) -> list[str]:
    return [source.describe(i) for i in range(len(source))]


def labelled(source, root) -> dict[str, int]:
    """Path below root -> label, for every example."""
    _, labels = everything(source)
    return {
        str(name).removeprefix(f"{root}/"): label
        for name, label in zip(files(source), labels, strict=True)
    }


def test_folder_with_splits(tmp_path):
    make_folder(
        tmp_path, {"train/b": 3, "train/a": 2, "train/c": 1, "val/c": 2, "val/a": 1, "test/b": 1}
    )
    train, val, test = (
        sources.open_source(f"folder:{tmp_path}", split) for split in ("train", "val", "test")
    )
    for source in (train, val, test):
        assert (source.num_classes, list(source.class_names)) == (3, ["a", "b", "c"])
    assert labelled(train, tmp_path) == {
        "train/a/000.png": 0, "train/a/001.png": 0, "train/b/000.png": 1, "train/b/001.png": 1, "train/b/002.png": 1,
        "train/c/000.png": 2,
    }  # fmt: skip
    assert labelled(val, tmp_path) == {
        "val/a/000.png": 0,
        "val/c/000.png": 2,
        "val/c/001.png": 2,
    }  # b is missing
    assert labelled(test, tmp_path) == {"test/b/000.png": 1}
    for source in (train, val, test):
        pictures, _ = everything(source)
        numbers = [int(name.removesuffix(".png").rpartition("/")[2]) for name in files(source)]
        assert (
            pictures[:, 0, 0, 0].tolist() == numbers
        )  # the record is that of the file that describe() names


@pytest.mark.parametrize("num_classes", [3, 5])
def test_classes_are_matched_by_name_also_where_the_model_has_more(tmp_path, num_classes):
    make_folder(tmp_path, {"b": 1, "c": 1})
    opened = with_classes(
        sources.open_source(f"folder:{tmp_path}", "train"), ("a", "b", "c"), num_classes, "evals.x"
    )
    assert (
        sorted(everything(opened)[1]) == [1, 2] == sorted(opened.labels())
        and opened.num_classes == num_classes
    )
    with pytest.raises(UserError, match=r"evals\.x has the class 'b'"):
        with_classes(
            sources.open_source(f"folder:{tmp_path}", "train"), ("a", "c"), num_classes, "evals.x"
        )


def test_classes_of_a_model_without_names_are_matched_by_position_if_all_are_there(
    tmp_path, caplog
):
    make_folder(tmp_path, {"b": 1, "c": 1})
    named = sources.open_source(f"folder:{tmp_path}", "train")
    with caplog.at_level("INFO", "vit_jax"):
        assert with_classes(named, (), 2, "evals.x") is named
    (record,) = caplog.records
    assert record.getMessage() == (
        "evals.x: the model has no class names to match, so classes are matched by position: "
        "0 is 'b', 1 is 'c'"
    )
    for count, says in ((1, "has 2 classes, but the model has 1"), (3, "has 2 named classes, but")):
        with pytest.raises(UserError, match=rf"evals\.x {says}"):
            with_classes(named, (), count, "evals.x")
    (tmp_path / "a.csv").write_text("path,label\nb/000.png,0\nc/000.png,2\n")
    numbered = sources.open_source(f"csv:{tmp_path}/a.csv", "train")
    assert with_classes(numbered, (), 5, "evals.x") is numbered  # numbers mean what they are


def test_numbered_folders_have_the_labels_of_imagenet_v2(tmp_path):
    """Those that the builder of TFDS 4.9.10 reads from ImageNetV2's folders, which are numbers."""
    make_folder(tmp_path, {str(number): 2 for number in range(12)})
    builder = imagenet_v2_dataset_builder.Builder
    wanted = {
        example["file_name"]: example["label"]
        for _, example in builder._generate_examples(None, str(tmp_path))
    }
    source = sources.open_source(f"folder:{tmp_path}", "train")
    assert labelled(source, tmp_path) == wanted and wanted["10/000.png"] == 10
    assert source.class_names == tuple(str(number) for number in range(12))


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["10", "9", "08"], ["08", "9", "10"]),
        (["1", "01", "0", "2"], ["0", "01", "1", "2"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        (["10", "9", "-1"], ["-1", "10", "9"]),
    ],
)
def test_folders_are_in_the_order_of_numbers_only_if_all_are(tmp_path, names, wanted):
    make_folder(tmp_path, dict.fromkeys(names, 1))
    source = sources.open_source(f"folder:{tmp_path}", "train")
    assert list(source.class_names) == wanted
    assert labelled(source, tmp_path) == {
        f"{name}/000.png": number for number, name in enumerate(wanted)
    }


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folder_validation_has_three_names(tmp_path, name):
    make_folder(tmp_path, {"train/a": 2, f"{name}/a": 3})
    for split in ("val", "validation"):
        assert len(sources.open_source(f"folder:{tmp_path}", split)) == 3
    assert len(sources.open_source(f"folder:{tmp_path}", f"train+{name}[1:]")) == 4
    text = message(f"folder:{tmp_path}", "test")
    assert "'test'" in text and str(tmp_path) in text and "train" in text


def test_folder_without_splits_is_sliced_mixed(tmp_path):
    make_folder(tmp_path, dict.fromkeys("abcde", 20))
    everything_, most, rest = (
        files(sources.open_source(f"folder:{tmp_path}", split))
        for split in ("train", "train[:80%]", "train[80%:]")
    )
    assert (len(most), len(rest)) == (80, 20)
    assert most + rest == everything_  # the same order at every opening
    assert sorted(everything_) == sorted(str(path) for path in tmp_path.rglob("*.png"))
    # Were classes not mixed, the rest would be class e alone. A random fifth has 4 +- 1.6 of each
    # class.
    for part, expected in ((most, 16), (rest, 4)):
        counts = collections.Counter(name.split("/")[-2] for name in part)
        assert (
            set(counts) == set("abcde")
            and max(abs(count - expected) for count in counts.values()) <= 4
        )
    labels = labelled(sources.open_source(f"folder:{tmp_path}", "train[80%:]"), tmp_path)
    assert all(label == "abcde".index(name[0]) for name, label in labels.items())


def test_folder_lists_nested_and_leaves_out_hidden_and_foreign_files(tmp_path):
    make_folder(tmp_path, {"a": 1, "b/x/y": 2, ".thumbnails": 3})
    save(tmp_path / "a/.hidden.png")
    (tmp_path / "a/notes.txt").write_text("not an image")
    source = sources.open_source(f"folder:{tmp_path}/", "train")
    assert set(labelled(source, tmp_path)) == {"a/000.png", "b/x/y/000.png", "b/x/y/001.png"}


def test_folders_may_be_links(tmp_path):
    make_folder(tmp_path / "store", {"owl": 2, "jay": 3})
    (tmp_path / "set/train").mkdir(parents=True)
    for name in ("owl", "jay"):
        (tmp_path / "set/train" / name).symlink_to(tmp_path / "store" / name)
    assert len(sources.open_source(f"folder:{tmp_path}/set", "train")) == 5
    (tmp_path / "set/train/emu").symlink_to(tmp_path / "store/emu")
    assert "set/train/emu is a broken link" in message(f"folder:{tmp_path}/set", "train")
    (tmp_path / "set/train/emu").unlink()
    (tmp_path / "store/owl/circle").symlink_to(tmp_path / "store")
    (tmp_path / "store/back").symlink_to(tmp_path / "store")
    (tmp_path / "store/owl/gone.png").symlink_to(tmp_path / "elsewhere.png")
    found = image_folder.load(f"{tmp_path}/store")
    assert len(found) == 5
    assert found.ignored == {"behind a link to a folder above": 2, "behind a broken link": 1}
    # A link that is repaired changes no folder.
    save(tmp_path / "elsewhere.png")
    assert len(image_folder.load(f"{tmp_path}/store")) == 6


def test_names_that_are_no_utf8_are_listed(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    save(folder / os.fsdecode(b"\xe9t\xe9.png"))
    source = sources.open_source(f"folder:{tmp_path}", "train")
    assert (
        source.describe(0).endswith("caf\\xe9/\\xe9t\\xe9.png")
        and source.read([0])[0][:4] == b"\x89PNG"
    )


def test_folder_mistakes_are_named(tmp_path):
    assert str(tmp_path / "nowhere") in message(f"folder:{tmp_path}/nowhere", "train")

    make_folder(tmp_path / "unknown", {"train/a": 1, "val/a": 1, "val/z": 1})
    text = message(f"folder:{tmp_path}/unknown", "train")
    assert str(tmp_path / "unknown/val/z") in text and "train does not have" in text

    make_folder(tmp_path / "empty", {"train/a": 1})
    (tmp_path / "empty/train/b").mkdir()
    text = message(f"folder:{tmp_path}/empty", "train")
    assert str(tmp_path / "empty/train/b") in text and "no images" in text

    make_folder(tmp_path / "untrained", {"val/a": 1})
    text = message(f"folder:{tmp_path}/untrained", "val")
    assert str(tmp_path / "untrained") in text and "no train folder" in text

    make_folder(tmp_path, {"flat": 2})
    text = message(f"folder:{tmp_path}/flat", "train")
    assert str(tmp_path / "flat") in text and "no class folders" in text

    make_folder(tmp_path / "hollow", {"val/a": 1})
    (tmp_path / "hollow/train").mkdir()
    assert str(tmp_path / "hollow/train") in message(f"folder:{tmp_path}/hollow", "train")


def picture(mode: str) -> Image.Image:
    """A smooth picture of odd size, so that row padding shows; alpha is noise over opaque colours."""
    rng = np.random.default_rng(0)
    colours = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (61, 47), Image.Resampling.BICUBIC
    )
    if mode == "P":
        return colours.quantize(64)
    converted = colours.convert(mode)
    if mode in ("RGBA", "LA"):
        converted.putalpha(Image.fromarray(rng.integers(0, 256, (47, 61), np.uint8)))
    return converted


# Lossless formats must give Pillow's very pixels. For JPEG the inverse DCT, the upsampling of
# colour and the way from YCbCr or CMYK to RGB round differently in TensorFlow's libjpeg: 3 levels
# are seen, 1 on average.
LOSSLESS, JPEG = (0, 0.0), (6, 1.5)
FILES = {
    **{
        f"{mode.lower()}.png": (mode, {}, LOSSLESS) for mode in ("RGB", "L", "RGBA", "LA", "P", "1")
    },
    "transparent.png": ("P", dict(transparency=3), LOSSLESS),
    **{f"{mode.lower()}.jpg": (mode, {}, JPEG) for mode in ("RGB", "L", "CMYK")},
    "progressive.jpeg": ("RGB", dict(progressive=True), JPEG),
    "full_colour.JPEG": ("RGB", dict(subsampling=0), JPEG),
    **{
        f"{mode.lower()}.webp": (mode, dict(lossless=True, exact=True), LOSSLESS)
        for mode in ("RGB", "L", "RGBA")
    },
    "lossy.webp": ("RGB", {}, LOSSLESS),
    "animated.webp": (
        "RGB",
        dict(save_all=True, append_images=[picture("L")], lossless=True),
        LOSSLESS,
    ),
    **{f"{mode.lower()}.bmp": (mode, {}, LOSSLESS) for mode in ("RGB", "L", "RGBA", "P", "1")},
    **{f"{mode.lower()}.gif": (mode, {}, LOSSLESS) for mode in ("RGB", "L", "P")},
    "animated.gif": ("RGB", dict(save_all=True, append_images=[picture("L")]), LOSSLESS),
}
FILES |= {
    f"UPPER.{suffix.upper()}": FILES[f"rgb.{suffix}"]
    for suffix in ("jpg", "png", "webp", "bmp", "gif")
}


@pytest.mark.parametrize("screen", [(61, 47), (30, 20), (80, 90)])
@pytest.mark.parametrize(
    "options", [{}, dict(transparency=3), dict(interlace=1), dict(comment=b"x" * 999)]
)
def test_of_a_gif_the_first_frame_is_decoded_and_no_more_is_read(screen, options):
    file = io.BytesIO()
    picture("P").save(file, "GIF", save_all=True, append_images=[picture("L")] * 3, **options)
    encoded = bytearray(file.getvalue())
    encoded[6:10] = np.asarray(screen, "<u2").tobytes()
    first, pixels = gif.first_frame(bytes(encoded))
    assert len(first) < 0.6 * len(encoded)
    assert pixels == max(61 * 47, screen[0] * screen[1])
    every = tf.io.decode_gif(bytes(encoded))
    np.testing.assert_array_equal(tf.io.decode_gif(first), every[:1])
    np.testing.assert_array_equal(images.decode(bytes(encoded)), every[0])


def test_every_kind_of_image_file_decodes_as_by_pillow(tmp_path):
    for name, (mode, options, _) in FILES.items():
        (tmp_path / "a").mkdir(exist_ok=True)
        picture(mode).save(tmp_path / "a" / name, **options)
    source = sources.open_source(f"folder:{tmp_path}", "train")
    assert len(source) == len(FILES)
    decode = tf.function(images.decode, input_signature=[tf.TensorSpec([], tf.string)])
    for i in range(len(source)):
        name = source.describe(i).rpartition("/")[2]
        encoded, _ = source.parse(tf.constant(source.read([i])[0]), i)
        with Image.open(io.BytesIO(encoded.numpy())) as file:
            wanted = np.asarray(file.convert("RGB")).astype(int)
        found = decode(encoded)
        assert (found.dtype, found.shape) == (tf.uint8, (47, 61, 3)), name
        difference = np.abs(found.numpy() - wanted)
        largest, average = FILES[name][2]
        assert difference.max() <= largest and difference.mean() <= average, (
            name,
            difference.max(),
            difference.mean(),
        )
