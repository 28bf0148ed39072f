"""Tar shards, manifests and folders: what they list, the index that is kept, and what is wrong with
them.
"""

import csv
import io
import json
import os
import tarfile
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
import tensorstore as ts
from etils.epath import backend
from PIL import Image

from vit_jax import config as configs
from vit_jax.cli import objects
from vit_jax.data.sources import (
    catalog,
    csv_file,
    file_list,
    folder,
    index_cache,
    listing,
    splits,
    tar_members,
    tars,
)
from vit_jax.data.sources import open as sources
from vit_jax.data.sources import (
    source as data_source,
)
from vit_jax.distributed import runtime
from vit_jax.errors import UserError
from vit_jax.train import run_data


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((3, 4, 3), number, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def make_tar(path, files: dict[str, bytes], form=tarfile.GNU_FORMAT) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def wds(numbers, label=lambda i: str(i % 3)) -> dict[str, bytes]:
    """Members of a WebDataset shard."""
    return {
        name: content
        for i in numbers
        for name, content in (
            (f"{i:04}.png", png(i)),
            (f"{i:04}.cls", label(i).encode()),
            (f"{i:04}.txt", b"a caption"),
        )
    }


def wrong(load, *args) -> str:
    with pytest.raises(UserError) as caught:
        load(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def pixels(listing, numbers) -> list[int]:
    """The grey value of each image, which is its number."""
    return [
        int(np.asarray(Image.open(io.BytesIO(listing.read([int(i)])[0])))[0, 0, 0]) for i in numbers
    ]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_webdataset_shards(tmp_path, form):
    make_tar(tmp_path / "birds-train-000000.tar", wds(range(7)), form)
    make_tar(tmp_path / "birds-train-000001.tar", wds(range(7, 12)), form)
    make_tar(tmp_path / "birds-val-000000.tar", wds(range(12, 15)), form)
    found = tars.load(str(tmp_path))
    assert {name: len(part) for name, part in found.splits.items()} == dict(
        train=12, training=12, val=3, valid=3, validation=3
    )
    assert (found.num_classes, found.class_names) == (3, ())
    assert pixels(found, range(15)) == list(range(15)) and found.labels().tolist() == [
        i % 3 for i in range(15)
    ]
    assert found.describe(13) == f"0013 in {tmp_path}/birds-val-000000.tar"
    source = sources.open_source(f"tars:{tmp_path}", "train[8:]")
    encoded, label = source.parse(tf.constant(source.read([2])[0]), 2)
    assert tf.io.decode_png(encoded).numpy()[0, 0, 0] == 10 and int(label) == 1


def test_patterns_choose_shards(tmp_path):
    for i in range(12):
        make_tar(tmp_path / f"train-{i:03}.tar", wds([i]))
    assert len(tars.load(f"{tmp_path}/train-{{002..010}}.tar").labels()) == 9
    assert len(tars.load(f"{tmp_path}/train-00[0-3].tar").labels()) == 4
    assert len(tars.load(f"{tmp_path}/train-007.tar").labels()) == 1
    assert "train-012.tar does not exist" in wrong(tars.load, f"{tmp_path}/train-{{010..012}}.tar")
    assert "no .tar files" in wrong(tars.load, f"{tmp_path}/val-*.tar")


def test_labels_come_from_json_folders_and_tar_names(tmp_path):
    make_tar(
        tmp_path / "json/0.tar", {"a.png": png(1), "a.json": json.dumps(dict(label="owl")).encode()}
    )
    assert tars.load(str(tmp_path / "json")).class_names == ("owl",)
    make_tar(
        tmp_path / "folders/0.tar",
        {"owl/a.png": png(1), "./jay/a.png": png(2), "jay/b.JPEG": png(3)},
    )
    found = tars.load(str(tmp_path / "folders"))
    assert found.class_names == ("jay", "owl") and found.labels().tolist() == [1, 0, 0]
    for wnid in ("n02", "n01"):
        make_tar(tmp_path / f"classes/{wnid}.tar", {f"{wnid}_7.JPEG": png(4)})
    found = tars.load(str(tmp_path / "classes"))
    assert found.class_names == ("n01", "n02") and found.labels().tolist() == [0, 1]


def test_val_may_have_no_class_of_its_own(tmp_path):
    make_tar(tmp_path / "train/0.tar", {"owl/a.png": png(1), "jay/a.png": png(2)})
    make_tar(tmp_path / "val/0.tar", {"owl/b.png": png(1)})
    assert tars.load(str(tmp_path)).labels().tolist() == [1, 0, 1]
    make_tar(tmp_path / "val/1.tar", {"emu/c.png": png(1)})
    assert "the class 'emu' in other splits but not in train" in wrong(tars.load, str(tmp_path))


def test_a_shard_that_is_replaced_while_it_is_read_is_named(tmp_path):
    paths = [tmp_path / f"birds-train-{i}.tar" for i in range(3)]
    for i, path in enumerate(paths):
        make_tar(path, wds(range(4 * i, 4 * i + 4)))
    source = sources.open_source(f"tars:{tmp_path}", "train[1:]")
    run_data.check_unchanged(source)
    os.utime(paths[1], ns=(0, 0))
    with pytest.raises(UserError, match=r"birds-train-1\.tar was changed while the run reads it"):
        run_data.check_unchanged(source)
    paths[1].unlink()
    with pytest.raises(UserError, match=r"birds-train-1\.tar was changed"):
        run_data.check_unchanged(source)


def test_broken_tars_are_named(tmp_path):
    make_tar(tmp_path / "none/shard-0001.tar", {"a.png": png(1)})
    assert "example a of" in wrong(tars.load, str(tmp_path / "none")) and "has no label" in wrong(
        tars.load, str(tmp_path / "none")
    )
    make_tar(tmp_path / "alone/0.tar", {"a.cls": b"1"})
    assert "has a label but no image" in wrong(tars.load, str(tmp_path / "alone"))
    make_tar(tmp_path / "json/0.tar", {"a.png": png(1), "a.json": b"[1]"})
    assert 'is not a JSON object with a "label"' in wrong(tars.load, str(tmp_path / "json"))
    make_tar(tmp_path / "whole.tar", wds(range(5)))
    whole = (tmp_path / "whole.tar").read_bytes()
    for name, content in dict(
        cut=whole[:1100], header=whole[:1792], text=b"hello" * 300, empty=b""
    ).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "x-0.tar").write_bytes(content)
        text = wrong(tars.load, str(tmp_path / name))
        assert str(tmp_path / name) in text
    (tmp_path / "zip").mkdir()
    with tarfile.open(tmp_path / "zip/0.tar", "w:gz") as archive:
        archive.add(tmp_path / "whole.tar", "a.png")
    assert "is truncated or not a tar file" in wrong(tars.load, str(tmp_path / "zip"))


def test_the_index_of_tars_is_kept_while_they_are_unchanged(tmp_path, monkeypatch, caplog):
    path = make_tar(tmp_path / "0.tar", wds(range(4)))
    first = tars.load(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(tar_members, "members", None)  # would fail
        again = tars.load(str(tmp_path))
    assert again.fingerprint == first.fingerprint and pixels(again, range(4)) == [0, 1, 2, 3]
    make_tar(tmp_path / "0.tar", wds(range(5, 11)))
    os.utime(path, ns=(1, 10**18))
    with caplog.at_level("INFO", "vit_jax"):
        changed = tars.load(str(tmp_path))
    assert "has changed since it was indexed" in caplog.text
    assert (
        pixels(changed, range(6)) == [5, 6, 7, 8, 9, 10]
        and changed.fingerprint != first.fingerprint
    )


def sizes(where) -> dict[str, int]:
    """Examples of each split, by the first of its names."""
    return {
        name: len(part)
        for name, part in tars.load(str(where)).splits.items()
        if name in folder.SPLITS
    }


def test_splits_are_named_below_the_given_folder(tmp_path):
    root = tmp_path / "val" / "train_shards"
    for number, name in enumerate(("train-000", "val-000", "shard-000", "test/train-val-000")):
        make_tar(root / f"{name}.tar", wds([number]))
    assert sizes(root) == dict(train=2, val=2) and sizes(f"{root}/*-000.tar") == dict(
        train=2, val=1
    )
    assert sizes(root / "val-000.tar") == dict(val=1) and sizes(root / "shard-000.tar") == dict(
        train=1
    )
    make_tar(root / "test/000.tar", wds([5]))
    assert sizes(root) == dict(train=2, val=2, test=1)


def test_tars_named_after_classes_are_no_splits(tmp_path):
    for name in ("train", "test", "owl"):
        make_tar(tmp_path / f"{name}.tar", {"a.png": png(1)})
    assert sizes(tmp_path) == dict(train=3) and tars.load(str(tmp_path)).class_names == (
        "owl",
        "test",
        "train",
    )
    make_tar(tmp_path / "val/test.tar", {"a.png": png(2)})
    assert sizes(tmp_path) == dict(train=3, val=1)


def add(archive, name: str, kind: bytes, target: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    archive.addfile(info)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_tars_may_end_with_other_members_than_files(tmp_path, form, kind, caplog):
    path = make_tar(tmp_path / "0.tar", {"owl/0.png": png(0), "owl/1.png": png(1)}, form)
    with tarfile.open(path, "a", format=form) as archive:
        add(archive, "owl/2.png" if kind != tarfile.DIRTYPE else "x" * 200, kind, "./owl/1.png")
    found = tars.load(str(tmp_path))
    assert pixels(found, range(len(found.labels()))) == [0, 1, 1][: 2 + (kind == tarfile.LNKTYPE)]
    assert ("1 images of" in caplog.text) == (kind == tarfile.SYMTYPE)


def test_tars_end_by_zeros_and_nothing_else(tmp_path):
    path = tmp_path / "0.tar"
    make_tar(path, {"owl/0.png": png(0), "owl/1.png": png(1)})
    whole = path.read_bytes()
    for keep in (1024, 2048):
        path.write_bytes(whole[:keep])
        text = wrong(tars.load, str(path))
        assert f"at byte {keep}, after its member owl/" in text and "cut off" in text
    for more in (b"", bytes(512), bytes(tar_members.CHUNK + 100)):
        path.write_bytes(whole[: 2048 + 512] + more)
        assert len(tars.load(str(path)).labels()) == 2
    for more in (whole, bytes(tar_members.CHUNK) + b"x"):
        path.write_bytes(whole + more)
        text = wrong(tars.load, str(path))
        assert "does not end with zeros at byte 2048" in text and "several tars in one file" in text


def test_links_to_nothing_and_sparse_members_are_named(tmp_path):
    path = make_tar(tmp_path / "0.tar", {"owl/0.png": png(0)})
    with tarfile.open(path, "a") as archive:
        add(archive, "owl/2.png", tarfile.LNKTYPE, "owl/none.png")
    assert f"member owl/2.png of {path} is not supported" in wrong(tars.load, path)
    info = tarfile.TarInfo("owl/3.png")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "0.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert f"member owl/3.png of {path} is not supported (a sparse" in wrong(tars.load, path)


def test_dots_in_names_lose_no_image(tmp_path):
    files = {
        "photo.1.PNG": png(1),
        "photo.1.cls": b"7",
        "photo.png": png(2),
        "photo.cls": b"5",
        "photo.meta.json": b"",
    }
    path = make_tar(
        tmp_path / "0.tar",
        files | {"v1.0/a.b.png": png(3), "v1.0/a.b.json": b'{"label": 6}', "._x.png": b""},
    )
    found = tars.load(path)
    assert pixels(found, range(3)) == [1, 2, 3] and found.labels().tolist() == [7, 5, 6]
    make_tar(tmp_path / "0.tar", {"owl/a.png": png(1), "owl/a.jpg": png(2)})
    assert "example owl/a of" in wrong(tars.load, path) and "has 2 images" in wrong(tars.load, path)


def test_marks_in_real_names_are_no_patterns(tmp_path):
    for number, name in enumerate(
        ("a[1].tar", "br [x]/train-0.tar", "br{1..2}/train-0.tar", "a1.tar", "p-1/{0..1}.tar")
    ):
        make_tar(tmp_path / name, wds([number]))
    for number, name in enumerate(
        ("a[1].tar", "br [x]/train-*.tar", "br{1..2}/train-*.tar", "a[1-9].tar", "p-{1..1}/*")
    ):
        assert pixels(tars.load(f"{tmp_path}/{name}"), [0]) == [number], name
    assert (
        len(tars.load(f"{tmp_path}/br{{1..2}}").labels())
        == len(tars.load(f"{tmp_path}/p-1/{{0..1}}.tar").labels())
        == 1
    )
    assert len(tars.load(f"{tmp_path}/br{{1..2}}/train-{{0..0}}.tar").labels()) == 1
    assert "folder" in wrong(tars.load, f"{tmp_path}/none/*.tar")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("cls", b" \n", "label of example a of .* is empty"),
        ("cls", b"x" * 300, "label of example a of .* has 300 bytes, more than 256"),
        (
            "json",
            b'{"label": null}',
            'member a.json of .* is not a JSON object with a "label" that is a text',
        ),
        (
            "json",
            b'{"label": true}',
            'member a.json of .* is not a JSON object with a "label" that is a text',
        ),
        ("json", b'{"label": "\\ud800"}', "example a of .* is not valid Unicode"),
        ("cls", b"99999999", "label 99999999 in 1 examples: numbers as labels must count from 0"),
    ],
)
def test_wrong_labels_are_named(tmp_path, name, content, message):
    path = make_tar(tmp_path / "0.tar", {"a.png": png(1), f"a.{name}": content})
    with pytest.raises(UserError, match=message):
        tars.load(path)


def test_classes_are_numbered_in_little_memory():
    texts = ["b", "a", "x" * 256, "b"] * 50_000
    tracemalloc.start()
    labels, names, count = listing.number_classes(
        iter(texts), {"train": np.arange(len(texts))}, "here"
    )
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()
    assert labels[:4].tolist() == [1, 0, 2, 1] and names == ("a", "b", "x" * 256) and count == 3
    assert listing.number_classes(["1009", "0"], {}, "here")[2] == 1010
    assert listing.number_classes(["1", "0", "01"], {}, "here")[0].tolist() == [1, 0, 1]


def write_manifest(root, rows, columns=("path", "label")) -> str:
    for number, row in enumerate(rows):
        path = root / row[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    with open(root / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(root / "list.csv")


def test_a_manifest_lists_images(tmp_path):
    rows = [
        ("b/1.png", "owl", "train"),
        ("2, two.png", "jay", "train"),
        ("ü.png", "owl", "holdout"),
    ]
    found = csv_file.load(write_manifest(tmp_path, rows, ("path", "label", "split")))
    assert {name: part.tolist() for name, part in found.splits.items()} == dict(
        train=[0, 1], holdout=[2]
    )
    assert (found.class_names, found.labels().tolist()) == (("jay", "owl"), [1, 0, 1])
    assert pixels(found, range(3)) == [0, 1, 2] and found.describe(2) == f"{tmp_path}/ü.png"
    assert len(sources.open_source(f"csv:{tmp_path}/list.csv", "holdout")) == 1


def test_numbers_as_labels_are_classes_as_they_are(tmp_path):
    found = csv_file.load(write_manifest(tmp_path, [("a.png", "7"), ("b.png", "0")]))
    assert (found.num_classes, found.class_names, found.labels().tolist()) == (8, (), [7, 0])


def test_wrong_manifests_are_named(tmp_path):
    path = write_manifest(tmp_path, [("a.png", "owl"), ("b.png", "jay")])
    for text, message in {
        "file,label\na.png,owl\n": "has no column 'path', it has 'file', 'label'",
        "path,class\na.png,owl\n": "has no column 'label'",
        "": "has no column 'path', it has no line",
        "path,label\n": "lists no images",
        "path,label\na.png,owl\nb.png\n": "line 3 of CSV file .* has no label",
        "path,label\na.png,owl\nb.png,jay\na.png,jay\n": r"lists a\.png twice, in lines 2 and 4",
        "path,label\na.png,owl\n./b.png,jay\n./a.png,jay\n": r"lists \./a\.png twice, in lines 2 and 4",
        f"path,label\na.png,owl\n{path[:-8]}a.png,jay\n": r"twice, in lines 2 and 3",
        "path,label\na.png,owl\n.,jay\n": r"line 3 of CSV file .* names the folder \.:",
        "path,label\na.png,  \n": r"label of line 2 of CSV file .* is empty",
        f"path,label\na.png,{'x' * 300}\n": r"label of line 2 of CSV file .* has 300 bytes",
        "path,label,splits\na.png,owl,train\n": "column 'splits', which is not known: call it 'split'",
        "path,label,spilt\na.png,owl,train\n": "column 'spilt', which is not known: call it 'split'",
        "path,label,Path\na.png,owl,b.png\n": "has the column 'path' twice: remove one",
        "path,label,labels\na.png,owl,jay\n": "has both columns 'label' and 'labels'",
        "path,label\na.png,owl\nb.png,jay, blue\n": "line 3 of CSV file .* has 3 cells for 2 columns",
        'path,label\na.png,"an\nowl"\n\nb.png,\n': "line 5 of CSV file .* has no label",
        'path,label\na.png,"owl\nb.png,jay\n': "is not a CSV file in UTF-8",
        "path,label\na.png,owl\nc.png,jay\nd.png,jay\n": r"2 of the 3 images .* do not exist, the first is c\.png in",
    }.items():
        with open(path, "w") as file:
            file.write(text)
        with pytest.raises(UserError, match=message):
            csv_file.load(path)
    with open(path, "wb") as file:
        file.write(b"path,label\n\xff\xfe,1\n")
    assert "is not a CSV file in UTF-8" in wrong(csv_file.load, path)
    assert "does not exist" in wrong(csv_file.load, str(tmp_path / "nowhere.csv"))
    assert "is a folder: give the CSV file" in wrong(csv_file.load, str(tmp_path))


@pytest.mark.parametrize(
    "head", ["PATH,Label,SPLIT", " path,label ,\tSplit", "\ufeffpath,label,split\u200b"]
)
def test_columns_are_known_in_capitals_and_with_blanks(tmp_path, head):
    rows = [("a.png", "owl", "train"), ("b.png", "owl", " val ")]
    splits = csv_file.load(write_manifest(tmp_path, rows, head.split(","))).splits
    assert {name: part.tolist() for name, part in splits.items()} == dict(train=[0], val=[1])


def test_other_columns_are_named_as_ignored(tmp_path, caplog):
    rows = [("a.png", "owl", "7"), ("b.png", "jay", "8")]
    assert (
        len(csv_file.load(write_manifest(tmp_path, rows, ("path", "label", "Width"))).splits) == 1
    )
    assert "list.csv: columns 'width' are ignored" in caplog.text


ALIKE = {
    "normalisation": ("caf\u00e9", "cafe\u0301"),
    "invisible": ("owl", "o\u200bwl"),
    "white space": ("great owl", "great\u00a0owl"),
}


@pytest.mark.parametrize("names", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("kind", ["folder", "csv", "tars"])
def test_classes_that_look_the_same_are_an_error_that_shows_how_they_differ(tmp_path, kind, names):
    if kind == "folder":
        # Of another split, in which a class would be unknown.
        make_folder(tmp_path, {f"train/{names[0]}": 1, "train/x": 1, f"val/{names[1]}": 1})
        text = wrong(folder.load, str(tmp_path))
    elif kind == "csv":
        path = write_manifest(tmp_path, [(f"{i}.png", name) for i, name in enumerate(names)])
        text = wrong(csv_file.load, path)
    else:
        make_tar(tmp_path / "a.tar", {f"{name}/{i}.png": png(i) for i, name in enumerate(names)})
        text = wrong(tars.load, str(tmp_path))
    assert f"{min(names)!a} and {max(names)!a}, which look the same" in text


def test_parts_of_a_mixture_do_not_make_two_of_a_class(tmp_path):
    composed, decomposed = ALIKE["normalisation"]
    first = folder.load(make_folder(tmp_path / "first", {composed: 1}))
    second = folder.load(make_folder(tmp_path / "second", {decomposed: 1}))
    assert "data.mixture has the classes" in wrong(
        data_source.mixture, [first, second], [1, 1], ["first", "second"]
    )


def test_classes_that_differ_in_case_are_classes_and_a_warning(tmp_path, caplog):
    found = folder.load(make_folder(tmp_path, {"train/Owl": 1, "train/owl": 1, "val/owl": 1}))
    assert found.num_classes == 2
    assert caplog.text.count("differ only in upper and lower case, such as 'Owl' and 'owl'") == 1


def test_white_space_around_labels_is_none_of_theirs(tmp_path):
    found = csv_file.load(
        write_manifest(tmp_path, [("a.png", " owl"), ("b.png", "owl "), ("./c.png", "a jay")])
    )
    assert found.class_names == ("a jay", "owl") and found.labels().tolist() == [1, 1, 0]


def make_folder(root, counts: dict[str, int]) -> str:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number:03}.png").write_bytes(png(number))
    return str(root)


def test_a_listing_is_kept_until_a_file_comes_or_goes(tmp_path, monkeypatch):
    root = make_folder(tmp_path, {"train/a": 2, "train/b/deep/er": 3, "val/a": 1})
    first = folder.load(root)

    def kept() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(folder, "scan", None)  # would fail
            try:
                folder.load(root)
            except TypeError:
                return False
        return True

    assert kept() and folder.load(root).fingerprint == first.fingerprint
    (tmp_path / "train/b/deep/er/new.png").write_bytes(png(9))
    assert not kept() and len(folder.load(root).labels()) == 7 and kept()
    (tmp_path / "train/a/000.png").unlink()
    assert not kept() and len(folder.load(root).labels()) == 6
    (tmp_path / "train/c").mkdir()
    assert not kept() and "train/c has no images" in wrong(folder.load, root)


def test_a_damaged_index_is_built_again(tmp_path, caplog):
    root = make_folder(tmp_path, {"a": 2})
    folder.load(root)
    path = runtime.folder() / f"folder-{index_cache.VERSION}-{index_cache.digest(root)}.npz"
    for content in (b"", b"PK\3\4 no zip", path.read_bytes()[:200]):
        path.write_bytes(content)
        caplog.clear()
        assert len(folder.load(root).labels()) == 2 and "is damaged" in caplog.text
    with np.load(path, allow_pickle=False) as archive:
        assert "images.bytes" in archive.files


def test_an_index_that_can_not_be_kept_costs_only_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "file" / "below"))
    assert len(folder.load(make_folder(tmp_path / "data", {"a": 2})).labels()) == 2
    assert "can't be saved" in caplog.text and "VIT_JAX_CACHE" in caplog.text


def test_strings_are_what_was_packed():
    names = ["", "a", "ümläut", "x" * 1000, "line\nbreak", os.fsdecode(b"no utf8 \xff")]
    packed = index_cache.Strings.pack(names)
    assert list(packed) == names and packed[-1] == names[-1] and len(packed) == 6
    with pytest.raises(IndexError):
        packed[6]


class MemoryFiles:
    """TensorFlow's gfile with its memory file system standing in for gs://."""

    def __getattr__(self, name: str):
        function = getattr(tf.io.gfile, name)

        def call(path: str, *args, **kwargs):
            found = function(path.replace("gs://", "ram://"), *args, **kwargs)
            if name != "walk":
                return found
            return ((folder.replace("ram://", "gs://"), *below) for folder, *below in found)

        return call


@pytest.fixture
def put(monkeypatch):
    """put(path, content) makes an object on gs://, for both clients."""
    monkeypatch.setattr(type(backend.tf_backend), "gfile", MemoryFiles())
    memory = ts.KvStore.open("memory://").result()
    monkeypatch.setattr(objects, "locate", lambda path, retries=0: (memory, path))

    def write(path: str, content: bytes) -> None:
        file = path.replace("gs://", "ram://")
        tf.io.gfile.makedirs(os.path.dirname(file))
        if tf.io.gfile.exists(file):
            tf.io.gfile.remove(file)
        with tf.io.gfile.GFile(file, "wb") as opened:
            opened.write(content)
        memory.write(path, content).result()

    return write


def test_stores_are_read_through_their_clients(put, tmp_path):
    for name, number in (("a/0.png", 1), ("a/x/1.png", 2), ("b/2.png", 3), (".old/3.png", 4)):
        put(f"gs://birds/{name}", png(number))
    found = folder.load("gs://birds/")
    assert found.class_names == ("a", "b") and pixels(found, range(3)) == [1, 2, 3]
    put("gs://birds/list.csv", b"path,label\nb/2.png,owl\n")
    assert pixels(csv_file.load("gs://birds/list.csv"), [0]) == [3]
    put("gs://birds/wrong.csv", b"path,label\nb/2.png,owl\nb/none.png,owl\n")
    assert "the first is b/none.png in line 3" in wrong(csv_file.load, "gs://birds/wrong.csv")
    make_tar(tmp_path / "0.tar", wds(range(3)))
    put("gs://shards/0.tar", (tmp_path / "0.tar").read_bytes())
    for where in ("gs://shards", "gs://shards/*.tar"):
        found = tars.load(where)
        assert pixels(found, range(3)) == [0, 1, 2] and found.labels().tolist() == [0, 1, 2]
    make_tar(tmp_path / "1.tar", wds(range(3, 6)))
    put("gs://shards/0.tar", (tmp_path / "1.tar").read_bytes())
    assert "0.tar has changed since" in wrong(found.read, [0])
    assert pixels(tars.load("gs://shards"), range(3)) == [3, 4, 5]
    paths, images = file_list.load(["gs://birds/a/0.png", "gs://birds/b"])
    assert paths == ["gs://birds/a/0.png", "gs://birds/b/2.png"]
    assert pixels(images, range(2)) == [1, 3]
    assert "gs://birds/none does not exist" in wrong(folder.load, "gs://birds/none")
    assert "gs://birds/none.csv does not exist" in wrong(csv_file.load, "gs://birds/none.csv")


@pytest.mark.parametrize("load", [folder.load, tars.load, csv_file.load])
def test_unknown_stores_are_named(load):
    assert "use a local path or gs://" in wrong(load, "nostore://x/y")


@pytest.mark.parametrize("text, count", [("10%", 100), ("37", 37), ("100%", 1000), ("0.5%", 5)])
def test_stratified_parts_keep_proportions_and_nest(text, count):
    labels = np.repeat([0, 1, 2, 3], [500, 300, 190, 10])
    chosen = splits.stratified(labels, text, 0, "here")
    assert len(np.unique(chosen)) == count and (np.diff(chosen) > 0).all()
    share = np.bincount(labels[chosen], minlength=4) - np.bincount(labels) * count / 1000
    assert np.abs(share).max() <= 1.5
    assert set(chosen) <= set(splits.stratified(labels, "1000", 0, "here"))
    assert set(splits.stratified(labels, "30", 0, "x")) <= set(
        splits.stratified(labels, "30%", 0, "x")
    )
    if count < 1000:
        assert set(chosen) != set(splits.stratified(labels, text, 1, "here"))


def test_a_part_of_nothing_or_of_too_much_is_named():
    for text in ("0", "0.01%", "1001", "101%"):
        assert "examples of here" in wrong(splits.stratified, np.zeros(1000, int), text, 0, "here")


def training(**data):
    config = configs.defaults()
    config.data.update(data)
    return config


def test_a_subset_is_a_source_of_its_own():
    source = sources.open_training(training(name="digits", subset="20%").data)
    assert len(source) == 215
    labels = source.labels()
    assert abs(np.bincount(labels) - 21.5).max() <= 2
    for i in (0, 7, 214):
        _, label = source.parse(tf.constant(source.read([i])[0]), tf.constant(i, tf.int64))
        assert int(label) == labels[i]
    assert catalog.declared(training(name="digits", subset="20%")).num_examples == 215


def test_fingerprints_stay_the_same(tmp_path):
    """Runs save them, and stop if they change."""
    for name in ("train/owl/0.png", "train/jay/1.JPG", "val/owl/deep/2.png", "a", "b", "c"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert folder.load(str(tmp_path / "folder")).fingerprint == "1adb4fa4ec586f95"
    shard = {"a.png": b"xx", "a.cls": b"7", "b.png": b"y", "b.cls": b"3"}
    path = make_tar(tmp_path / "tars/train-0.tar", shard)
    assert tars.load(path).fingerprint == "20fd1ad9238748dc"
    rows = [("a.png", "owl", "train"), ("b.png", "jay", "train"), ("c.png", "owl", "val")]
    found = csv_file.load(write_manifest(tmp_path, rows, ("path", "label", "split")))
    assert found.fingerprint == "ed4e22861135e581"
    rows = [("a.png", "owl;jay"), ("b.png", ""), ("c.png", "emu")]
    found = csv_file.load(write_manifest(tmp_path, rows, ("path", "labels")))
    assert found.fingerprint == "401c63c9a59e6f13"
    config = training(name="mixture", mixture=(("digits@train", 1.0), ("digits@val", 1.0)))
    assert sources.open_training(config.data).fingerprint == "digits+digits"


def test_a_mixture_unites_classes_by_name(tmp_path):
    one = make_folder(tmp_path / "one", {"owl": 3, "jay": 2})
    two = make_folder(tmp_path / "two", {"train/emu": 2, "train/owl": 1, "val/emu": 1})
    config = training(
        name="mixture", mixture=((f"folder:{one}", 3.0), (f"folder:{two}@train[:2]", 1.0))
    )
    source = sources.open_training(config.data)
    assert source.class_names == ("jay", "owl", "emu") and source.parts == ((5, 3.0), (2, 1.0))
    records = source.read(list(range(7)))
    for i, record in enumerate(records):
        encoded, label = source.parse(tf.constant(record), tf.constant(i, tf.int64))
        assert source.describe(i).split("/")[-2] == source.class_names[int(label)]
        assert tf.io.decode_png(encoded).numpy()[0, 0, 0] == int(source.describe(i)[-7:-4])
    assert source.labels().tolist() == [
        source.class_names.index(source.describe(i).split("/")[-2]) for i in range(7)
    ]
    assert source.read([6, 0, 5]) == [records[6], records[0], records[5]]


def test_mixtures_that_do_not_fit_are_named(tmp_path):
    named = make_folder(tmp_path / "named", {"owl": 1, "jay": 1})
    numbers = write_manifest(tmp_path, [("a.png", "0"), ("b.png", "2")])
    config = training(name="mixture", mixture=((f"folder:{named}", 1.0), (f"csv:{numbers}", 1.0)))
    assert "different numbers of classes" in wrong(sources.open_training, config.data)
