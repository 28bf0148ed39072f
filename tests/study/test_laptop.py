"""The studies for a laptop and their data set."""

import sys

import numpy as np
import pytest
from conftest import ROOT

from vit_jax.data.sources import own
from vit_jax.study import definition


@pytest.fixture(scope="module")
def digits():
    """The module of the data set, as it lies beside the recipe."""
    sys.path.append(str(ROOT / "configs/studies"))
    import scattered_digits

    yield scattered_digits
    sys.path.remove(str(ROOT / "configs/studies"))


COUNTS = dict(data_size=30, hybrids=45, compute=27, optimizers=24, position_embeddings=12)
COUNTS |= dict(heads=18, shapes=27)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_every_run_of_a_laptop_study_has_a_config(name, count, tmp_path, monkeypatch):
    """Also outside of a checkout, where the data set is found beside the recipe."""
    monkeypatch.chdir(tmp_path)
    found = definition.read(f"{ROOT}/configs/studies/laptop.py:{name}")
    configs = [run.config() for run in found.runs]
    assert len({str(config) for config in configs}) == len(configs) == count
    assert all(config.data.name == "scattered_digits:ScatteredDigits" for config in configs)
    assert found.figure.over == "seed"


def test_the_class_is_the_left_digit_and_no_scan_is_in_two_splits(digits):
    splits = {name: digits.ScatteredDigits(name) for name in digits.IMAGES}
    scans = [{scan.tobytes() for scan in one.scans} for one in splits.values()]
    assert not set.intersection(*scans) and sum(map(len, scans)) == len(set.union(*scans))
    val = splits["val"]
    for i in range(100):
        image, label = val[i]
        assert image.shape == (32, 32, 3) and image.dtype == np.uint8
        left, right = val.columns[i]
        assert right - left >= 4
        top = val.rows[i, 0]
        window = image[top : top + 16, left : left + 4, 0]  # that the other digit can't reach
        (place,) = val.drawn[i, :1]
        np.testing.assert_array_equal(window, val.scans[place, :, :4])
        assert (image[:, :left] == 0).all() and val.labels[i] == label


def test_an_image_is_a_function_of_its_number(digits):
    one, other = digits.ScatteredDigits("train"), digits.ScatteredDigits("train")
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_array_equal(one[131_071][0], other[131_071][0])
    part = own.load("scattered_digits:ScatteredDigits", "train[:1000]")
    whole = own.load("scattered_digits:ScatteredDigits", "train")
    assert len(part) == 1000 and part.read([999]) == whole.read([999])
