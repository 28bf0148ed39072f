"""What a listing does not use is counted by kind, and the numbers add up."""

import logging
import os

import nasty
import numpy as np
import pytest
from test_listings import make_tar, png
from test_pipeline import SIDE, eval_config, train_config
from test_sources import make_folder, save

from vit_jax.data import pipeline
from vit_jax.data.sources import catalog, file_list, folder, ignored, index_cache, listing, tars
from vit_jax.data.sources import open as sources
from vit_jax.errors import UserError


def all_files(root) -> int:
    """Entries that are not folders, links to folders included."""
    return sum(
        len(files) + sum(os.path.islink(f"{path}/{name}") for name in folders)
        for path, folders, files in os.walk(root)
    )


def test_the_nasty_folder_adds_up(tmp_path):
    root = nasty.make(tmp_path / "photos")
    found = folder.load(str(root))
    assert found.ignored == {
        ".mov": 2,
        ".xmp": 1,
        "without a suffix": 1,
        "hidden": 2,
        "in hidden folders": 1,
        "in __MACOSX": 2,
        "beside the class folders": 1,
        ignored.BROKEN: 1,
        ignored.LOOP: 1,
    }
    assert found.class_names == ("jay", "owl")
    used = len(found.splits["train"])
    assert used == 34 and used + sum(found.ignored.values()) == all_files(root)
    again = folder.load(str(root))  # by the saved index, if a broken link does not forbid it
    assert again.ignored == found.ignored and again.fingerprint == found.fingerprint


def test_what_is_good_is_read_for_training_and_for_predictions(tmp_path):
    root = nasty.make(tmp_path / "photos")
    source = sources.open_source(f"folder:{root}", "train")
    config = train_config(len(source), on_corrupt="skip")
    host = pipeline.train_pipeline(config, source, np.arange(len(source)), 1)
    batch = next(host.batches())
    assert batch["mask"].sum() == sum(nasty.NUM_GOOD.values()) == 29
    assert len(host.skipped) == 5
    _, found = file_list.load([str(root)])
    rows = np.arange(40)
    host = pipeline.eval_pipeline(eval_config(), found, rows, len(rows), SIDE, "skip")
    assert next(host.batches())["mask"].sum() == 30  # and the one beside the class folders


def test_images_outside_of_split_folders_are_counted(tmp_path):
    make_folder(tmp_path, {"train/a": 2, "val/a": 1, "extra/a": 3})
    save(tmp_path / "train/cover.png")
    save(tmp_path / "cover.png")
    found = folder.load(str(tmp_path))
    assert found.ignored == {"beside the class folders": 2, "outside of the split folders": 3}


def test_foreign_folders_are_not_classes(tmp_path):
    make_folder(tmp_path, {"a": 1, "a/@eaDir/0.png": 1, "$RECYCLE.BIN": 1, "__MACOSX/a": 1})
    found = folder.load(str(tmp_path))
    assert found.class_names == ("a",)
    assert found.ignored == {"in @eaDir": 1, "in $RECYCLE.BIN": 1, "in __MACOSX": 1}


def test_members_of_tars_are_counted(tmp_path):
    files = {"owl/0.png": png(0), "owl/0.txt": b"x", "owl/._0.png": b"x", "owl/README": b"x"}
    files |= {"__MACOSX/owl/._0.png": b"x", "owl/1.png": png(1), "owl/1.cls": b"owl"}
    make_tar(tmp_path / "0.tar", files)
    (tmp_path / "list.txt").touch()
    (tmp_path / "1.tar.gz").touch()
    for _ in range(2):  # the second time by the saved index
        found = tars.load(str(tmp_path))
        assert len(found) == 2
        assert found.ignored == {
            **{".txt": 2, ".gz": 1, "hidden": 1, "in __MACOSX": 1, "without a suffix": 1}
        }


def test_predict_counts_what_it_does_not_read(tmp_path):
    root = nasty.make(tmp_path / "photos")
    paths, found = file_list.load([str(root)])
    assert len(paths) + sum(found.ignored.values()) == all_files(root)
    (tmp_path / "films").mkdir()
    (tmp_path / "films/0.mov").touch()
    with pytest.raises(UserError, match=r"has no images .*, but 1 file: 1 \.mov: give another"):
        file_list.load([str(tmp_path / "films")])


def test_an_index_of_fewer_suffixes_hides_no_file(tmp_path, monkeypatch):
    make_folder(tmp_path, {"a": 2})
    save(tmp_path / "a/0.webp")
    with monkeypatch.context() as patch:
        for module in (listing, folder):
            patch.setattr(module, "SUFFIXES", (".jpg", ".png"))
        before = folder.load(str(tmp_path))
        assert len(before) == 2 and before.ignored == {".webp": 1}
    found = folder.load(str(tmp_path))
    assert len(found) == 3 and not found.ignored


def test_a_folder_of_known_files_keeps_its_fingerprint(tmp_path):
    """As computed by the version before, over folders, counts and names."""
    make_folder(tmp_path, {"a": 2, "b": 1})
    names = index_cache.Strings.pack(["000.png", "001.png", "000.png"])
    wanted = index_cache.digest("\na\nb", np.asarray([0, 2, 1]), names.bytes, names.ends)
    assert folder.load(str(tmp_path)).fingerprint == wanted
    (tmp_path / "a/notes.txt").touch()
    assert folder.load(str(tmp_path)).fingerprint == wanted


def test_one_line_says_what_is_ignored(tmp_path, caplog):
    make_folder(tmp_path, {"a": 1})
    for i in range(3):
        (tmp_path / f"a/{i}.MOV").touch()
    for _ in range(2):
        catalog.listing(f"folder:{tmp_path}")
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [f"folder:{tmp_path} ignores 3 files: 3 .mov"]


def test_the_text_is_short():
    many = {f".{i}": 1 for i in range(30)} | {".mov": 1_500}
    text = ignored.text(many)
    assert text.startswith("1,530 files: 1,500 .mov, 1 .0, ") and text.endswith("21 of other kinds")
    assert (
        ignored.suffix_kind("a.b c") == ignored.suffix_kind("x." + "y" * 50) == "without a suffix"
    )


def test_hidden_folders_of_tars_are_not_classes(tmp_path):
    make_tar(tmp_path / "0.tar", {"./owl/0.png": png(0), "./.thumbs/0a.png": png(1)})
    found = tars.load(str(tmp_path))
    assert found.class_names == ("owl",) and found.ignored == {"in hidden folders": 1}
