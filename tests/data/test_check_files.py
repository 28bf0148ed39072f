"""`vit_jax.data check FOLDER`: every fault in one run, duplicates, classes, and the contact sheet."""

import json
import os
import unicodedata

import nasty
import numpy as np
import pytest
from conftest import last_error
from PIL import Image, ImageFont
from rich.cells import cell_len
from test_listings import make_tar

from vit_jax.cli.terminal import Console
from vit_jax.data import __main__ as command
from vit_jax.data import fonts
from vit_jax.data.check import contact_sheet, duplicates, examine, of_files, show

ONE_CLASS = "classes that have images (a classifier needs two or more)"


def check(path, tmp_path, *arguments) -> tuple[int, dict]:
    out = tmp_path / "check.json"
    words = ["check", str(path), f"--json={out}", f"--out={tmp_path}/sheets", *arguments]
    code = command.main(words)
    return code, json.loads(out.read_text())


def found(report: dict, key: str) -> dict[str, int]:
    return {each["kind"]: each["count"] for each in report[key]}


def fill(folder, pictures, count: int = 2) -> None:
    nasty.write({f"{i}.png": nasty.encoded(next(pictures), "PNG") for i in range(count)}, folder)


@pytest.fixture
def pictures():
    return nasty.photos(60, seed=1, width=240, height=230)


def test_the_nasty_folder_gives_one_report(tmp_path, capsys):
    root = nasty.make(tmp_path / "photos")
    code, report = check(root, tmp_path)
    printed, errors = capsys.readouterr()
    assert code == 1 and not report["ready"]
    assert found(report, "faults") == {
        examine.EMPTY: 1,
        examine.NO_IMAGE: 1,
        examine.TOO_LARGE: 1,
        examine.TRUNCATED: 1,
        examine.UNDECODABLE: 1,
    }
    names = {each["kind"]: each["examples"][0] for each in report["faults"]}
    assert names[examine.EMPTY].endswith("jay/empty.jpg")
    assert "floating-point" in names[examine.UNDECODABLE]
    assert found(report, "warnings") == {
        "files behind a broken link": 1,
        "files behind a link to a folder above": 1,
        "images with the suffix of another format, which are read all the same": 1,
        "images smaller than the usual 224 pixels": 29,
    }
    files = report["files"]
    assert files["found"] == 46 == files["images"] + sum(files["ignored"].values())
    assert report["classes"] == {"jay": {"train": 14}, "owl": {"train": 20}}
    assert report["formats"]["HEIF"] == report["formats"]["AVIF"] == 1
    assert sum(report["formats"].values()) == files["images"]
    assert sum(each["train"] for each in report["classes"].values()) == files["images"]
    assert report["orientations"] == {"1": 22, **{str(i): 1 for i in range(2, 9)}}
    assert max(map(cell_len, printed.splitlines())) <= 80
    assert errors.strip().splitlines()[-1].startswith(f"error: folder:{root} has faults: ")
    with Image.open(report["sheet"]) as sheet:
        assert sheet.size[0] > 8 * 128


def test_a_good_folder_has_no_faults(tmp_path, capsys, pictures):
    for split in ("train", "val"):
        fill(tmp_path / "data" / split / "owl", pictures, 3)
        fill(tmp_path / "data" / split / "jay", pictures, 2)
    code, report = check(tmp_path / "data", tmp_path)
    assert code == 0 and report["ready"] and report["faults"] == report["warnings"] == []
    # The other names of val are not shown.
    assert report["splits"] == dict(train=5, val=5)
    assert report["classes"] == dict(jay=dict(train=2, val=2), owl=dict(train=3, val=3))
    assert report["sizes"]["smallest"] == report["sizes"]["largest"] == [240, 230]
    assert report["formats"] == dict(PNG=10)
    assert "No faults" in capsys.readouterr().out


def test_all_faults_of_folders_are_named_at_once(tmp_path, capsys, pictures):
    root = tmp_path / "data"
    fill(root / "train/owl", pictures)
    fill(root / "train/Owl", pictures)
    composed, decomposed = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))
    for name in (composed, decomposed):
        fill(root / "train" / name, pictures)
    (root / "train/empty").mkdir()
    fill(root / "val/stray", pictures)
    fill(root / "val/lost", pictures)
    fill(root / "validation/owl", pictures)
    (root / "train/gone").symlink_to(root / "nowhere")
    code, report = check(root, tmp_path)
    assert code == 1
    lines = next(e for e in report["faults"] if e["kind"] == "faults of folders and classes")
    text = "\n".join(lines["examples"])
    assert lines["count"] == 6
    assert "train/gone is a broken link" in text
    assert "has both val and validation" in text
    assert "'\\xe9' and 'e\\u0301', which look the same" in text or "look the same" in text
    assert "val/lost is a class that train does not have" in text
    assert "val/stray is a class that train does not have" in text
    assert "train/empty has no images" in text
    assert found(report, "warnings")["groups of classes that differ in case only"] == 1


def test_files_and_folders_that_may_not_be_read_are_named(tmp_path, monkeypatch, pictures):
    root = tmp_path / "data"
    fill(root / "owl", pictures)
    fill(root / "secret", pictures)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (root / "owl/pipe.png").unlink(missing_ok=True)
    os.mkfifo(root / "owl/pipe.png")
    code, report = check(root, tmp_path)
    assert code == 1
    assert found(report, "faults") == {"faults of folders and classes": 1, examine.UNREADABLE: 1}
    assert "secret can't be listed (Permission denied)" in report["faults"][0]["examples"][0]


def test_duplicates_between_splits_and_with_two_labels_are_faults(tmp_path, pictures):
    root = tmp_path / "data"
    for folder in ("train/owl", "train/jay", "val/owl", "val/jay"):
        fill(root / folder, pictures)
    same = nasty.encoded(next(pictures), "JPEG")
    nasty.write({"leak.jpg": same}, root / "train/owl")
    nasty.write({"leak.jpg": same, "leak2.jpg": same}, root / "val/owl")
    other = nasty.encoded(next(pictures), "JPEG")
    nasty.write({"x.jpg": other}, root / "train/owl")
    nasty.write({"x.jpg": other}, root / "train/jay")
    twice = nasty.encoded(next(pictures), "JPEG")
    nasty.write({"y.jpg": twice, "z.jpg": twice}, root / "val/jay")
    code, report = check(root, tmp_path)
    assert code == 1
    assert found(report, "faults") == {
        "the same image in train and val": 1,
        "the same image with different labels": 1,
    }
    assert report["faults"][0]["examples"][0].count(" = ") == 2
    assert found(report, "warnings") == {"the same image twice in val": 1}


def test_copies_of_other_size_quality_and_rotation_are_near(tmp_path, pictures):
    root = tmp_path / "data"
    fill(root / "train/owl", pictures, 8)
    fill(root / "val/owl", pictures, 8)
    photo = next(nasty.photos(1, seed=9, width=480, height=460))
    nasty.write({"a.png": nasty.encoded(photo, "PNG")}, root / "train/owl")
    small = photo.resize((240, 230))
    nasty.write({"b.jpg": nasty.encoded(small, "JPEG", quality=60)}, root / "val/owl")
    turned = photo.transpose(Image.Transpose.ROTATE_90)  # which orientation 6 turns back
    nasty.write({"c.jpg": nasty.encoded(turned, "JPEG", 6)}, root / "val/owl")
    code, report = check(root, tmp_path)
    assert code == 0
    assert found(report, "warnings") == {
        ONE_CLASS: 1,
        "pairs of images that look the same in train and val": 2,
        "pairs of images that look the same in val": 1,
    }


def test_near_pairs_are_those_of_a_comparison_of_all():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (300, 8, 9))
    noisy = np.clip(base[:150] + rng.integers(-9, 10, (150, 8, 9)), 0, 255)
    thumbs = np.concatenate([base, noisy]).astype(np.uint8)
    bits = duplicates.hashes(thumbs)
    first, second = np.triu_indices(len(thumbs), 1)
    close = np.bitwise_count(bits[first] ^ bits[second]) <= 3
    levels = np.abs(thumbs[first].astype(int) - thumbs[second]).mean((1, 2))
    wanted = np.stack([first, second], 1)[close & (levels <= duplicates.LEVELS)]
    assert 20 < len(wanted) < 150
    np.testing.assert_array_equal(duplicates.near_pairs(thumbs), wanted)
    assert len(duplicates.near_pairs(thumbs[:0])) == 0


def test_hashes_compare_each_grey_value_with_its_right_neighbour():
    thumb = np.zeros((1, 8, 9), np.uint8)
    thumb[0, 0, 0] = thumb[0, 7, 7] = 9
    assert duplicates.hashes(thumb)[0] == (1 << 63) + 1


def test_many_classes_are_shown_in_part(capsys):
    counts = {f"class-{i:04}-{'x' * (i % 90)}": dict(train=i + 1, val=i % 3) for i in range(1_000)}
    show.show_classes(Console(width=80, highlight=False), counts)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) < 45 and max(map(len, printed)) <= 80
    text = "\n".join(printed)
    assert "(984 classes between)" in text and "class-0000" in text and "1,000" in text
    assert "train: 1,000 classes of 1 to 1,000 images, median 500.5; 9 of them have" in text
    assert "val: 1,000 classes of 0 to 2 images, median 1; 1,000 of them have" in text


def test_tars_and_csv_files_are_checked_too(tmp_path, pictures):
    files = {f"owl/{i}.png": nasty.encoded(next(pictures), "PNG") for i in range(2)}
    path = make_tar(tmp_path / "0.tar", files | {"owl/2.png": b"", "owl/2.txt": b"x"})
    for given in (path, f"tars:{path}"):
        code, report = check(given, tmp_path)
        assert code == 1 and found(report, "faults") == {examine.EMPTY: 1}
        assert report["files"] == dict(found=4, images=3, ignored={".txt": 1})
    (tmp_path / "bad.tar").write_bytes(b"x" * 2_000)
    code, report = check(tmp_path / "bad.tar", tmp_path)
    assert code == 1 and "not a tar file" in report["summary"] + str(report["faults"])
    nasty.write({"0.png": files["owl/0.png"]}, tmp_path)
    (tmp_path / "list.csv").write_text("path,labels\n0.png,a;b\n")
    code, report = check(tmp_path / "list.csv", tmp_path)
    assert code == 0 and report["classes"] == dict(a=dict(train=1), b=dict(train=1))


def test_one_class_is_a_warning(tmp_path, pictures):
    fill(tmp_path / "photos/owl", pictures)
    code, report = check(tmp_path / "photos", tmp_path)
    (warning,) = report["warnings"]
    assert code == 0 and warning == dict(kind=ONE_CLASS, count=1, examples=["owl"])


def test_a_folder_without_classes_is_examined_all_the_same(tmp_path, pictures):
    fill(tmp_path / "data", pictures)
    nasty.write({"empty.png": b""}, tmp_path / "data")
    code, report = check(tmp_path / "data", tmp_path)
    assert code == 1
    assert found(report, "faults") == {"faults of folders and classes": 1, examine.EMPTY: 1}
    assert report["files"] == dict(found=3, images=0, ignored={"beside the class folders": 3})


@pytest.mark.parametrize("folders", [(), ("owl",), ("train/owl", "val/owl")])
def test_a_folder_without_images_has_faults(folders, tmp_path):
    (tmp_path / "data").mkdir()
    for folder in folders:
        nasty.write({"clip.mov": b"x"}, tmp_path / "data" / folder)
    code, report = check(tmp_path / "data", tmp_path)
    assert code == 1 and list(found(report, "faults")) == ["faults of folders and classes"]
    assert report["files"]["found"] == len(folders) and report["files"]["images"] == 0
    assert report["sizes"] == report["formats"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got neither of FOLDER and --config"),
        (["x", "--config=configs/demo.py"], "got both of FOLDER and --config"),
        (["x", "--config.data.threads=1"], "--config.data.threads=1 has no effect without"),
        (["/none/such"], "/none/such does not exist"),
        (["tars:/none/such.tar"], "/none/such.tar does not exist"),
        (["setup.py"], "setup.py is a file"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path, capsys):
    assert command.main(["check", *arguments, f"--out={tmp_path}"]) == 2
    assert message in last_error(capsys)


def covered(text: str) -> bool:
    font = fonts.font_for(text)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return all(ord(c) in fonts.characters(font.path) for c in text)


def test_captions_have_a_font_with_their_characters(tmp_path):
    for text in ("owl", "h\u00e9ron", "\u4e2d", "\u767d\u9dfa", "\u0441\u043e\u0432\u0430"):
        assert covered(text)
    assert not covered("\U0010fffd")  # of no font, and no error
    names = ("h\u00e9ron", "\u4e2d\u56fd " * 30, "n" * 200)
    batch = dict(image=np.zeros((3, 96, 96, 3), np.uint8), label=np.arange(3), mask=np.ones(3))
    contact_sheet.draw(batch, names, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        captions = np.asarray(sheet.convert("L"))[96:]
    assert all((captions[:, i * 100 : i * 100 + 98] < 128).any() for i in range(3))
    assert (captions[:, 300:] == 255).all()  # nothing runs into the next column


def test_paths_mean_what_they_end_in(tmp_path):
    assert of_files.name_of("photos") == "folder:photos"
    assert of_files.name_of("a/LIST.csv") == "csv:a/LIST.csv"
    assert of_files.name_of("csv:x") == "csv:x"
    (tmp_path / "odd.tar").mkdir()
    assert of_files.name_of(f"{tmp_path}/odd.tar") == f"folder:{tmp_path}/odd.tar"


def test_patterns_of_tars_and_braces_in_folders_of_csv_files(tmp_path, pictures):
    for i in range(2):
        files = {f"{('owl', 'jay')[i]}/{i}.png": nasty.encoded(next(pictures), "PNG")}
        make_tar(tmp_path / f"train-00{i}.tar", files)
    for pattern in ("train-{000..001}.tar", "train-*.tar"):
        code, report = check(f"tars:{tmp_path}/{pattern}", tmp_path)
        assert code == 0 and report["files"]["images"] == 2 and not report["warnings"]
    nasty.write({"0.png": files["jay/1.png"]}, tmp_path / "a{b")
    (tmp_path / "a{b/list.csv").write_text("path,label\n0.png,a\n")
    assert check(tmp_path / "a{b/list.csv", tmp_path)[0] == 0


def test_a_list_of_pairs_that_ends_early_says_so(tmp_path, pictures, monkeypatch):
    picture = next(pictures)
    files = {f"{q}.jpg": nasty.encoded(picture, "JPEG", quality=q) for q in (80, 85, 90)}
    nasty.write(files, tmp_path / "data/owl")
    nasty.write({"0.png": nasty.encoded(next(pictures), "PNG")}, tmp_path / "data/jay")
    monkeypatch.setattr(duplicates, "MOST_PAIRS", 1)
    _, report = check(tmp_path / "data", tmp_path)
    assert any("(at least)" in kind for kind in found(report, "warnings"))
