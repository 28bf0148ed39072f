"""Prepared data sets: byte by byte what went in, whatever interrupts the work, and read by TFDS and
by training.
"""

import argparse
import collections
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile

import nasty
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from conftest import ROOT, last_error, metric_lines
from PIL import Image

from vit_jax import config as configs
from vit_jax.data import __main__ as command
from vit_jax.data import pillow
from vit_jax.data.prepare import command as prepare
from vit_jax.data.prepare import imagenet21k, shards, writer
from vit_jax.data.sources import open as sources
from vit_jax.errors import NegativeResult, UserError
from vit_jax.train import __main__ as train

CLASSES = {"n01440764": 3, "n02084071": 4, "n15102894": 2}  # class -> images of the fake release
CONFIG = """
def get_config(arg=""):
    return dict(total_steps=1, data=dict(name="digits", batch_size=2))
"""


def picture(number: int, size=(48, 40)) -> Image.Image:
    """A smooth colour picture."""
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def make_tar(path, files: dict[str, bytes]):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> tuple[pathlib.Path, dict[bytes, str]]:
    """A fake release: (folder of tars, WordNet id by image)."""
    folder, wnids = tmp_path_factory.mktemp("release"), {}
    for wnid, count in CLASSES.items():
        files = {f"{wnid}_{i}.JPEG": encoded(picture(len(wnids) + i)) for i in range(count)}
        wnids |= dict.fromkeys(files.values(), wnid)
        make_tar(folder / f"{wnid}.tar", files)
    return folder, wnids


@pytest.fixture
def config_file(tmp_path) -> str:
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of a few images."""
    monkeypatch.setattr(writer, "SHARD_BYTES", 1 << 14)


def run(config_file: str, *arguments: str, **overrides) -> dict:
    """`python -m vit_jax.data prepare` without the process."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, "prepare")
    config = configs.load(
        config_file, [f"--config.{key.replace('__', '.')}={v}" for key, v in overrides.items()]
    )
    report = prepare.run(config, parser.parse_args([str(argument) for argument in arguments]))
    assert json.loads(json.dumps(report)) == report
    return report


def contents(folder) -> dict[str, bytes]:
    """All files below a folder."""
    folder = pathlib.Path(folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def everything(name: str, data_dir, split: str = "train") -> list[tuple[bytes, int]]:
    """(encoded image, label) of a data set in order, by our reader."""
    source = sources.open_source(name, split, str(data_dir))
    found = [source.parse(tf.constant(source.read([i])[0]), i) for i in range(len(source))]
    return [(image.numpy(), int(label)) for image, label in found]


def make_folder(root, files: dict[str, bytes]):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def pictures(count: int) -> dict[str, bytes]:
    """Files of a folder: `count` images of each of the classes a, b, c."""
    return {
        f"{c}/{i:03}.jpg": encoded(picture(1000 * ord(c) + i)) for c in "abc" for i in range(count)
    }


def test_class_numbers_of_imagenet21k():
    ids = imagenet21k.ids()
    assert len(ids) == len(set(ids)) == imagenet21k.NUM_CLASSES == 21_843
    assert list(ids) == sorted(ids)
    assert (ids[0], ids[-1]) == ("n00004475", "n15102894")
    assert set(imagenet21k.WITHOUT_IMAGES) < set(ids)
    assert imagenet21k.RELEASES["fall 2011"][0] == len(ids) - len(imagenet21k.WITHOUT_IMAGES)


def test_imagenet21k_from_tars(release, config_file, tmp_path):
    folder, wnids = release
    arguments = (f"--from={folder}", "--partial", f"--out={tmp_path}/data")
    report = run(config_file, *arguments, data__name="imagenet21k")
    assert report["status"] == "prepared" and report["num_classes"] == 21_843
    assert report["examples"] == {"train": sum(CLASSES.values())}
    assert report["origin"]["release"] == "partial" and report["origin"]["classes"] == 3
    assert report["use"] == [
        "--config.data.name=imagenet21k",
        f"--config.data.data_dir={tmp_path}/data",
    ]

    found = everything("imagenet21k", tmp_path / "data")
    assert {image: imagenet21k.ids()[label] for image, label in found} == wnids  # byte for byte
    assert [label for _, label in found] != sorted(label for _, label in found)  # mixed
    source = sources.open_source("imagenet21k", "train", str(tmp_path / "data"))
    assert source.num_classes == 21_843 and tuple(source.class_names) == imagenet21k.ids()

    before = contents(tmp_path / "data")
    assert run(config_file, *arguments, data__name="imagenet21k")["status"] == "already prepared"
    assert contents(tmp_path / "data") == before
    assert not list((tmp_path / "data").rglob("*.preparing"))


def test_imagenet21k_must_be_a_whole_release(release, config_file, tmp_path, monkeypatch):
    folder, _ = release
    arguments = (f"--from={folder}", f"--out={tmp_path}/data")
    with pytest.raises(NegativeResult) as caught:
        run(config_file, *arguments, data__name="imagenet21k")
    for part in (
        "fall 2011",
        "winter 2021",
        "3 known classes",
        "9 images",
        "n00004475",
        "--partial",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(imagenet21k, "RELEASES", {"small": (3, 9)})
    assert run(config_file, *arguments, data__name="imagenet21k")["origin"]["release"] == "small"


def test_imagenet21k_names_unknown_empty_and_damaged_tars(release, config_file, tmp_path):
    folder, _ = release
    whole = (folder / "n01440764.tar").read_bytes()
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/n01440764.tar").write_bytes(whole)
    (tmp_path / "tars/n00000000.tar").write_bytes(whole)
    make_tar(tmp_path / "tars/n02084071.tar", {})
    arguments = (f"--from={tmp_path}/tars", f"--out={tmp_path}/data")
    with pytest.raises(NegativeResult, match=r"unknown classes: n00000000; empty: n02084071\.tar;"):
        run(config_file, *arguments, data__name="imagenet21k")
    report = run(config_file, *arguments, "--partial", "--name=some", data__name="imagenet21k")
    assert report["origin"]["unknown"] == ["n00000000"] and report["origin"]["empty"] == [
        "n02084071"
    ]
    assert report["examples"] == {"train": CLASSES["n01440764"]}

    second = 512 + -(-len(next(iter(release[1]))) // 512) * 512  # where the second header is
    damages = {
        "": "empty",
        "x" * 2000: "header",
        whole[:1000]: "end",
        whole[: second + 100]: "cut off",
    }
    for content, word in damages.items():
        (tmp_path / "tars/n15102894.tar").write_bytes(
            content.encode() if isinstance(content, str) else content
        )
        with pytest.raises(UserError, match=f"n15102894.*{word}") as caught:
            run(config_file, *arguments, "--partial", data__name="imagenet21k")
        assert "1 of the 4 tars" in str(caught.value) and not isinstance(
            caught.value, NegativeResult
        )


def test_imagenet21k_is_shrunk_in_the_same_go(release, config_file, tmp_path):
    arguments = (f"--from={release[0]}", "--partial", f"--out={tmp_path}", "--short_side=32")
    report = run(config_file, *arguments, data__name="imagenet21k")
    assert report["name"] == "imagenet21k_32"
    found = everything("imagenet21k_32", tmp_path)
    assert {Image.open(io.BytesIO(image)).size for image, _ in found} == {(38, 32)}
    assert {imagenet21k.ids()[label] for _, label in found} == set(CLASSES)


@pytest.mark.slow
def test_recipe_trains_on_imagenet21k(release, config_file, tmp_path):
    run(
        config_file,
        f"--from={release[0]}",
        "--partial",
        f"--out={tmp_path}/data",
        data__name="imagenet21k",
    )
    overrides = {
        "model.width": 16, "model.depth": 1, "model.mlp_dim": 32, "model.num_heads": 2, "image_size": 32,
        "data.data_dir": f"{tmp_path}/data", "data.batch_size": 8, "total_steps": 2, "log_every": 1,
    }  # fmt: skip
    recipe = ROOT / "configs/pretrain.py"
    arguments = [f"--config.{key}={value}" for key, value in overrides.items()]
    assert not train.main(
        [f"--config={recipe}:B/16,imagenet21k", f"--workdir={tmp_path}/run", *arguments]
    )
    losses = [line["train/loss"] for line in metric_lines(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_folder_becomes_array_record(config_file, tmp_path, small_shards):
    files = pictures(20)
    make_folder(
        tmp_path / "train-and-val",
        {f"train/{k}": v for k, v in files.items()} | {"val/b/x.png": b""},
    )
    Image.new("L", (5, 7)).save(tmp_path / "train-and-val/val/b/x.png")
    name = f"folder:{tmp_path}/train-and-val"
    report = run(
        config_file, f"--out={tmp_path}/out", data__name=name, data__split="train[:50%]+val"
    )
    assert report["name"] == "train_and_val_copy" and report["examples"] == {"train": 60, "val": 1}
    found = everything(report["name"], report["data_dir"])
    classes = {content: "abc".index(name[0]) for name, content in files.items()}
    assert len(found) == 60 and dict(found) == classes
    assert len(list((tmp_path / "out").rglob("*-train.array_record-*"))) > 3
    labels = [label for _, label in found[:30]]
    assert max(labels.count(c) for c in range(3)) < 20  # the first half is a sample of all classes

    builder = tfds.builder(report["name"], data_dir=report["data_dir"])
    assert builder.info.features["label"].names == ["a", "b", "c"]
    assert builder.info.supervised_keys == ("image", "label")
    by_tfds = builder.as_data_source("train", decoders=dict(image=tfds.decode.SkipDecoding()))
    assert [(example["image"], example["label"]) for example in by_tfds] == found
    decoded = tfds.data_source(report["name"], split="val", data_dir=report["data_dir"])[0]
    assert decoded["image"].shape == (7, 5, 3) and decoded["label"] == 1


def test_tfds_data_set_is_copied(config_file, tmp_path):
    make_folder(tmp_path / "in", pictures(3))
    first = run(
        config_file, f"--out={tmp_path}/a", "--name=first", data__name=f"folder:{tmp_path}/in"
    )
    second = run(
        config_file, f"--out={tmp_path}/b", data__name="first", data__data_dir=first["data_dir"]
    )
    assert second["name"] == "first_copy"
    assert sorted(everything("first_copy", tmp_path / "b")) == sorted(
        everything("first", tmp_path / "a")
    )


def test_classes_without_names_stay_without(config_file, tmp_path):
    make_folder(tmp_path, pictures(1))
    (tmp_path / "list.csv").write_text("path,label\na/000.jpg,7\nb/000.jpg,3\n")
    report = run(config_file, f"--out={tmp_path}/out", data__name=f"csv:{tmp_path}/list.csv")
    assert report["num_classes"] == 8
    assert sorted(label for _, label in everything("list_copy", tmp_path / "out")) == [3, 7]


def test_example_bytes_are_those_of_tensorflow():
    for size in (0, 1, 127, 128, 20_000, 3_000_000):
        for label in (0, 1, 127, 128, 21_842):
            record = shards.encode(dict(image=bytes(size), label=label))
            found = tf.train.Example.FromString(record).features.feature
            assert found["image"].bytes_list.value[:] == [bytes(size)]
            assert found["label"].int64_list.value[:] == [label] and len(found) == 2


def test_example_bytes_stay_the_same():
    """Of a map, whose order a release of protocol buffers could change."""
    wanted = (
        b"\n$\n\x10\n\x05image\x12\x07\n\x05\n\x03abc"
        b"\n\x10\n\x05label\x12\x07\x1a\x05\n\x03\x80\x80\x04"
    )
    assert shards.encode(dict(label=1 << 16, image=b"abc")) == wanted


def test_short_side(config_file, tmp_path):
    big = picture(0, (120, 90))
    sources_of = {
        "big.jpg": encoded(big, quality=95),
        "big.png": encoded(big, "PNG"),
        "tall.jpg": encoded(picture(1, (64, 301)), quality=95),
        "huge.jpg": encoded(picture(2, (900, 700)), quality=95),  # decoded at a reduced size
        "grey.jpg": encoded(big.convert("L"), quality=95),
        "cmyk.jpg": encoded(big.convert("CMYK"), quality=95),
        "alpha.png": encoded(big.convert("RGBA"), "PNG"),
        "palette.gif": encoded(big.quantize(256), "GIF"),
        "sixteen.png": encoded(
            Image.fromarray(np.asarray(big.convert("L")).astype(np.uint16) << 8), "PNG"
        ),
        "equal.jpg": encoded(picture(3, (32, 90))),
        "small.png": encoded(picture(4, (20, 500)), "PNG"),
    }
    make_folder(
        tmp_path / "in",
        {f"{number:02}/{name}": file for number, (name, file) in enumerate(sources_of.items())},
    )
    name = f"folder:{tmp_path}/in"
    report = run(config_file, "--short_side=32", f"--out={tmp_path}/out", data__name=name)
    assert report["name"] == "in_32" and report["origin"]["jpeg_quality"] == prepare.QUALITY
    found = {label: image for image, label in everything("in_32", tmp_path / "out")}
    for label, (name, file) in enumerate(sources_of.items()):
        if name in ("equal.jpg", "small.png"):
            assert found[label] == file
            continue
        image, before = Image.open(io.BytesIO(found[label])), Image.open(io.BytesIO(file))
        assert image.format == "JPEG" and min(image.size) == 32, name
        assert (
            abs(image.width / image.height - before.width / before.height)
            < 0.03 * before.width / before.height
        )
        assert image.mode == ("L" if name in ("grey.jpg", "sixteen.png") else "RGB")
        pixels = (big if name == "sixteen.png" else before).convert(image.mode)
        wanted = pixels.resize(image.size, Image.Resampling.BICUBIC)
        for mode, most in (
            ("L", 1.5),
            ("RGB", 5.0),
        ):  # at 32 pixels these colours suffer from 4:2:0
            levels = [np.asarray(file.convert(mode)).astype(int) for file in (image, wanted)]
            assert np.abs(levels[0] - levels[1]).mean() < most, (name, mode)


@pytest.mark.parametrize("side", [0, 40])
def test_a_copy_shows_what_the_files_show(side, config_file, tmp_path):
    """Copies are read as TFDS is, without EXIF, and TFDS decodes neither TIFF, HEIC nor AVIF."""
    files = {
        f"a/{number}{suffix}": nasty.encoded(photo, kind, orientation, **options)
        for number, photo in enumerate(nasty.photos(2))
        for orientation in (1, 6, 7)
        for suffix, kind, options in (
            (f"{orientation}.jpg", "JPEG", dict(quality=95, subsampling=0)),
            (f"{orientation}.png", "PNG", {}),
            (f"{orientation}.tif", "TIFF", {}),
            (f"{orientation}.avif", "AVIF", dict(quality=95, subsampling="4:4:4")),
            (f"{orientation}.heic", "HEIF", dict(quality=95)),
        )
    }
    make_folder(tmp_path / "set", files)
    name = f"folder:{tmp_path}/set"
    run(
        config_file,
        f"--out={tmp_path}/out",
        "--name=copied",
        f"--short_side={side}",
        data__name=name,
    )
    copied = [encoded for encoded, _ in everything("copied", tmp_path / "out")]
    wanted = [np.asarray(pillow.decode(content, rotates=True)) for content in files.values()]
    shapes = collections.Counter()
    for encoded in copied:
        found = tf.io.decode_image(encoded, channels=3, expand_animations=False).numpy()
        with Image.open(io.BytesIO(encoded)) as image:
            assert encoded in files.values() or pillow.orientation(image) == 1
        small = [np.asarray(Image.fromarray(one).resize(found.shape[1::-1])) for one in wanted]
        alike = [np.abs(found.astype(int) - one).mean() for one in small]
        assert min(alike) < 8  # of other pixels, 100
        shapes[found.shape[0] > found.shape[1]] += 1
    assert shapes[True] == sum(one.shape[0] > one.shape[1] for one in wanted) > 4
    upright = [content for path, content in files.items() if path.endswith(("1.jpg", "1.png"))]
    assert bool(side) or set(upright) <= set(copied)  # byte by byte


def test_corrupt_images_stop_or_are_left_out(config_file, tmp_path):
    files = pictures(5)
    files["b/bad.jpg"] = files["b/001.jpg"][:500]
    files["c/bad.png"] = b"no image"
    make_folder(tmp_path / "in", files)
    name = f"folder:{tmp_path}/in"
    for arguments in (
        ("--name=whole",),
        ("--short_side=16", "--name=less"),
        ("--short_side=512", "--name=same"),
    ):
        with pytest.raises(
            UserError, match=r"bad\.(jpg|png) can't be read as an image.*on_corrupt=skip"
        ):
            run(config_file, f"--out={tmp_path}/out", *arguments, data__name=name)
        report = run(
            config_file,
            f"--out={tmp_path}/out",
            *arguments,
            data__name=name,
            data__on_corrupt="skip",
        )
        assert sorted(map(os.path.basename, report["skipped"])) == ["bad.jpg", "bad.png"]
        assert (
            report["examples"] == {"train": 15}
            and len(everything(report["name"], tmp_path / "out")) == 15
        )
        assert (
            run(config_file, f"--out={tmp_path}/out", *arguments, data__name=name)["skipped"]
            == report["skipped"]
        )
    make_folder(tmp_path / "none", {"a/x.jpg": b"x"})
    with pytest.raises(NegativeResult, match="no image of train can be read"):
        run(
            config_file,
            f"--out={tmp_path}/o",
            data__name=f"folder:{tmp_path}/none",
            data__on_corrupt="skip",
        )


def read_some(i: int) -> tuple[bytes, int]:
    return np.random.default_rng(i).bytes(900 + i % 200), i % 3


class Numbers:
    """What `writer` needs of a source."""

    def __init__(self, count: int, example, fingerprint: str):
        self.count = count
        self.example = example
        self.describe = str
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.count


def many(count: int = 150, read=read_some) -> dict:
    return {
        "train": Numbers(count, read, "numbers"),
        "val": Numbers(20, read_some, "more"),
    }


AS_IT_IS = shards.Reader(lambda image: image, skip_corrupt=False)


def target(folder, **origin) -> writer.Target:
    return writer.Target("numbers", str(folder), ("x", "y", "z"), 3, origin)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_bytes_are_the_same_for_any_workers_and_after_a_failure(tmp_path, small_shards, workers):
    wanted = writer.write(target(tmp_path / "calm"), many(), AS_IT_IS, 2)
    calls = []

    def fails(i: int):
        calls.append(i)
        if len(calls) > 150:  # 64 of them are the sample
            raise RuntimeError("lightning")
        return read_some(i)

    with pytest.raises(RuntimeError, match="lightning"):
        writer.write(target(tmp_path / "stormy"), many(read=fails), AS_IT_IS, workers)
    staging = target(tmp_path / "stormy").staging
    assert not target(tmp_path / "stormy").folder.exists() and not list(staging.glob("*.tmp"))
    with pytest.raises(UserError, match="neither known to TFDS nor prepared"):
        sources.open_source("numbers", "train", str(tmp_path / "stormy"))
    done = {
        path.name: path.stat().st_mtime_ns for path in staging.glob("*array_record-?????-of-?????")
    }
    assert writer.write(target(tmp_path / "stormy"), many(), AS_IT_IS, workers) == wanted
    assert contents(tmp_path / "stormy") == contents(tmp_path / "calm")
    again = target(tmp_path / "stormy").folder
    assert {
        name: (again / name).stat().st_mtime_ns for name in done
    } == done  # what was done is not done again
    assert len(done) >= 1 or workers > 1


KILLED = """
import os, signal, sys
from test_prepare import AS_IT_IS, many, read_some, target, writer
writer.SHARD_BYTES = 1 << 14
calls = []

def dies(i):
    calls.append(i)
    if len(calls) > 150:
        os.kill(os.getpid(), signal.SIGKILL)
    return read_some(i)

splits = many(read=dies)
splits["val"].example = dies
writer.write(target(sys.argv[1]), splits, AS_IT_IS, 2)
"""


@pytest.mark.slow
def test_bytes_are_the_same_after_a_kill(tmp_path, small_shards):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a")]
    killed = subprocess.run(command, env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)))
    assert killed.returncode == -signal.SIGKILL
    staging = target(tmp_path / "a").staging
    assert list(staging.glob("*.tmp")) and list(staging.glob("*array_record-?????-of-?????"))
    writer.write(target(tmp_path / "a"), many(), AS_IT_IS, 2)
    writer.write(target(tmp_path / "b"), many(), AS_IT_IS, 2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_other_data_are_not_mixed_in(tmp_path, small_shards):
    def fails(i: int):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        writer.write(target(tmp_path), many(), AS_IT_IS, 2) and writer.write(
            target(tmp_path / "x"), many(read=fails), AS_IT_IS, 2
        )
    with pytest.raises(UserError, match="made from other data"):
        writer.write(target(tmp_path, short_side=8), many(), AS_IT_IS, 2)
    assert not writer.write(target(tmp_path), many(), AS_IT_IS, 2)[0]

    def dies(i: int):
        raise RuntimeError("lightning")

    later = {"train": many()["train"], "val": Numbers(20, dies, "more")}
    with pytest.raises(RuntimeError, match="lightning"):
        writer.write(target(tmp_path / "x"), later, AS_IT_IS, 2)
    later["val"] = Numbers(19, read_some, "others")
    assert writer.write(target(tmp_path / "x"), later, AS_IT_IS, 2)[0]  # nothing had been written


def test_two_processes_do_not_write_the_same(tmp_path):
    with writer.locked(target(tmp_path)), pytest.raises(UserError, match="another process"):
        writer.write(target(tmp_path), many(), AS_IT_IS, 2)


def test_disk_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a part of the path is a file.*same command"):
        writer.write(target(tmp_path / "file"), many(), AS_IT_IS, 2)

    def full(path, records):
        raise RuntimeError(
            "write() failed: No space left on device; writing /x; Could not submit chunk: 334"
        )

    monkeypatch.setattr(shards, "write_records", full)
    with pytest.raises(UserError, match=r"no space is left on the device.*same command"):
        writer.write(target(tmp_path / "out"), many(), AS_IT_IS, 2)


@pytest.mark.parametrize("limit", [3000, 40_000])
def test_file_size_limit_is_one_line(tmp_path, limit):
    """A real failure of array_record to write: Python ignores SIGXFSZ, so that it sees EFBIG."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UserError, match="larger than is allowed"):
            writer.write(target(tmp_path), many(), AS_IT_IS, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.write(target(tmp_path), many(), AS_IT_IS, 2)[0]


def test_manual_files_are_named(config_file, tmp_path):
    overrides = dict(data__name="imagenet2012", data__data_dir=str(tmp_path))
    with pytest.raises(
        NegativeResult,
        match=r"img_train\.tar and \S+img_val\.tar are not in .*downloads/manual.*image-net",
    ):
        run(config_file, **overrides)
    make_folder(tmp_path, {"downloads/manual/ILSVRC2012_img_val.tar": b""})
    with pytest.raises(
        NegativeResult, match=r"download yourself, ILSVRC2012_img_train\.tar is not in"
    ):
        run(config_file, **overrides)
    with pytest.raises(NegativeResult, match=r"manual is empty or does not exist.*TFDS says"):
        run(config_file, data__name="resisc45", data__data_dir=str(tmp_path / "other"))


def test_tfds_prepares_array_record_once(config_file, tmp_path, monkeypatch):
    from test_sources import TEST, TRAIN

    def examples(count):
        return (
            (str(i), dict(id=str(i), image=np.asarray(picture(i, (32, 32))), label=i % 10))
            for i in range(count)
        )

    cls = tfds.builder_cls("cifar10")
    monkeypatch.setattr(
        cls, "_split_generators", lambda self, dl: dict(train=examples(TRAIN), test=examples(TEST))
    )
    overrides = dict(data__name="cifar10", data__data_dir=str(tmp_path))
    report = run(config_file, **overrides)
    assert report["status"] == "prepared" and report["examples"] == dict(train=TRAIN, test=TEST)
    assert list(tmp_path.glob("cifar10/*/cifar10-train.array_record-*"))
    assert run(config_file, **overrides)["status"] == "already prepared"
    with pytest.raises(NegativeResult, match="no split 'validation', only"):
        run(config_file, **overrides, data__split="validation[:10%]")


def test_failures_of_tfds_are_one_line(config_file, tmp_path, monkeypatch):
    def fails(error):
        def call(self, **_):
            raise error

        monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", call)

    overrides = dict(data__name="cifar10", data__data_dir=str(tmp_path))
    fails(ConnectionError("gone\naway"))
    with pytest.raises(
        NegativeResult,
        match=r"TFDS fails to prepare cifar10: ConnectionError: gone away: .*copy .*cifar10/3",
    ):
        run(config_file, **overrides)
    fails(OSError(28, "No space left on device"))
    with pytest.raises(UserError, match="no space is left"):
        run(config_file, **overrides)


MISTAKES = {
    "digits is read where it is": ([], "digits"),
    "give --from=FOLDER": ([], "imagenet21k"),
    "--from is for data.name=imagenet21k": (["--from=x"], "digits"),
    "--partial has no effect": (["--partial"], "imagenet21k"),
    "no effect without --out": (["--short_side=8"], "digits"),
    "--short_side=-1 is negative": (["--short_side=-1", "--out=x"], "digits"),
    "is a data set of TFDS": (["--name=cifar10", "--out=x"], "digits"),
    "must be lower-case": (["--name=a-b", "--out=x"], "digits"),
    "not a local folder": (["--out=gs://nowhere/x"], "digits"),
    "data set 'foo_bar' is neither known to TFDS": ([], "foo_bar"),
    "--from": (["--from=/nowhere"], "imagenet21k"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_named(text, config_file, tmp_path):
    arguments, name = MISTAKES[text]
    with pytest.raises(UserError) as caught:
        run(config_file, *arguments, data__name=name, data__data_dir=str(tmp_path))
    assert text in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_command(release, config_file, tmp_path, capsys):
    arguments = [
        "prepare",
        f"--config={config_file}",
        "--config.data.name=imagenet21k",
        f"--from={release[0]}",
    ]
    arguments += [
        f"--config.data.data_dir={tmp_path}/data",
        "--workers=2",
        f"--json={tmp_path}/report.json",
    ]
    assert command.main(arguments) == 1
    assert "neither fall 2011" in last_error(capsys) and not (tmp_path / "data").exists()
    assert command.main([*arguments, "--partial"]) == 0
    assert (
        f"--config.data.name=imagenet21k --config.data.data_dir={tmp_path}/data"
        in capsys.readouterr().err
    )
    assert json.loads((tmp_path / "report.json").read_text())["examples"] == {"train": 9}
