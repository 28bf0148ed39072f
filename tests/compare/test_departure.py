"""Where metrics begin to differ, events that may be the reason, and runs that are kept as data."""

import json
import math
import shutil

import numpy as np
import pytest
from conftest import last_error
from report.workdirs import START, make_lines, make_run

from vit_jax import config as configs
from vit_jax.compare import __main__ as compare
from vit_jax.compare import departure
from vit_jax.report.series import from_lines

NAN = {"eval/val/loss": math.nan}


def lines(key: str, values: dict[int, float]) -> list[dict]:
    return [{"step": step, key: value} for step, value in values.items()]


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "expected"),
    [
        ({1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.5}, 0.0, None),
        ({1: 2.0, 2: 1.5}, {1: 2.0, 2: np.nextafter(1.5, 2)}, 0.0, (2, 1)),
        ({1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.5001}, 1e-4, None),
        ({1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.5001}, 1e-5, (2, 1)),
        ({10: 2.0, 20: 1.5}, {5: 9.0, 10: 2.0, 15: 9.0, 20: 1.6}, 0.0, (20, 10)),
        ({1: math.nan}, {1: math.nan}, 0.0, None),
        ({1: math.inf}, {1: math.inf}, 0.0, None),
        ({1: 2.0}, {1: math.nan}, 0.5, (1, None)),
        ({1: math.inf}, {1: -math.inf}, 0.5, (1, None)),
        ({1: 0.0}, {1: 0.0, 2: 5.0}, 0.0, None),
        ({1: 0.0}, {1: 1e-30}, 0.1, (1, None)),
    ],
)
def test_the_first_step_that_differs(a, b, tolerance, expected):
    runs = [from_lines(lines("train/loss", values)) for values in (a, b)]
    found = departure.first(*runs, tolerance)
    assert (found and (found.step, found.last_same)) == expected


def test_the_earliest_metric_counts_and_time_does_not():
    a, b = make_lines(), make_lines()
    for line in b:
        line["perf/step_ms"] = 5.0
    b[7]["train/loss"] += 0.1
    b[5]["eval/val/top1"] += 0.1
    found = departure.first(from_lines(a), from_lines(b), 0.0)
    assert (found.step, found.quantity, found.last_same) == (30, "eval/val/top1", 25)
    b[5]["train/loss"] += 0.1
    assert departure.first(from_lines(a), from_lines(b), 0.0).quantity == "train/loss"


@pytest.fixture
def pair(tiny, tmp_path):
    """The folders of two runs that differ at step 60."""
    loaded = configs.load(tiny, [])
    changed = make_lines()
    for line in changed[11:]:
        line["train/loss"] += 1e-3
    make_run(tmp_path / "a", loaded)
    make_run(tmp_path / "b", loaded, changed)
    return tmp_path / "a", tmp_path / "b"


def compared(a, b, *flags: str) -> dict:
    out = a.parent / "found.json"
    code = compare.main([str(a), str(b), f"--json={out}", *flags])
    found = json.loads(out.read_text())
    assert code == (0 if found["same"] else 1)
    return found


def test_events_of_one_run_where_they_part(pair):
    a, b = pair
    assert compared(a, b)["causes"] == []
    starts = [START, START | dict(first_step=55, changed={"versions.jax": ["1", "2"]})]
    (b / "goodput.json").write_text(json.dumps(dict(records=starts)))
    part = dict(spike=58, detected=59, step=56, batches=[56, 58])
    (b / "left_out.json").write_text(json.dumps([part]))
    skipped = dict(use="train", id=3, name="cat.jpg", reason="truncated")
    (b / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
    assert compared(a, b)["causes"] == [
        "b was started again after step 55 with versions.jax 1 -> 2",
        "b went back to step 56 and left out batches 56 to 58, after a loss spike",
        "only b skipped the image cat.jpg",
    ]
    (a / "goodput.json").write_text((b / "goodput.json").read_text())
    assert not any("started" in text for text in compared(a, b)["causes"])


@pytest.mark.parametrize(
    ("part", "values", "expected"),
    [
        ("code", ("1a", "2b"), "another code: 1a in a, 2b in b"),
        ("data_fingerprint", ("x", "y"), "another training data: x in a, y in b"),
        ("versions", (dict(jax="1"), dict(jax="2")), "versions (jax): 1 in a, 2 in b"),
        ("devices", (dict(count=8), dict(count=4)), "devices (count): 8 in a, 4 in b"),
    ],
)
def test_records_that_differ(pair, part, values, expected):
    for folder, value in zip(pair, values, strict=True):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    found = compared(*pair)
    assert found["causes"] == [expected] and found[part.removesuffix("_fingerprint")]


def test_a_version_without_a_key_is_no_difference(pair):
    """Nor is one that did not record devices."""
    a, b = pair
    for folder, change in ((a, lambda config: config["data"].pop("decode")), (b, lambda _: None)):
        record = json.loads((folder / "config.json").read_text())
        change(record["config"])
        record["devices"] = {} if folder == a else dict(kind="cpu")
        (folder / "config.json").write_text(json.dumps(record))
    found = compared(a, b)
    assert not found["config"] and not found["devices"] and not found["causes"]


def test_what_follows_the_departure_is_no_reason(pair):
    """A start after the step whose metrics part, and an evaluation of it."""
    a, b = pair
    (b / "goodput.json").write_text(json.dumps(dict(records=[START, START | dict(first_step=60)])))
    text = (b / "metrics.jsonl").read_text()
    late = json.dumps({"step": 60, "eval/other/top1": 0.5})
    (b / "metrics.jsonl").write_text(text + late + "\n")
    assert compared(a, b)["causes"] == []


def test_keys_that_change_no_number_are_no_reason(tiny, tmp_path):
    late = make_lines()
    late[-1]["train/loss"] = 5.0
    make_run(tmp_path / "a", configs.load(tiny, []))
    make_run(tmp_path / "b", configs.load(tiny, ["--config.checkpoint.every=3"]), late)
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found["config"] == {"checkpoint.every": [4, 3]} and not found["causes"]


# --- references ---


def run_of_seed(folder, tiny: str, seed: int, shift: float, **record) -> str:
    found = make_lines()
    for line in found:
        line |= {key: line[key] + shift for key in ("train/loss", "eval/val/top1") if key in line}
    return make_run(folder, configs.load(tiny, [f"--config.seed={seed}"]), found, **record)


@pytest.fixture
def kept(tiny, tmp_path):
    """A reference of three runs, whose losses are 0, 0.01 and 0.02 above `make_lines`."""
    devices = dict(kind="cpu", cores=2)
    runs = [
        run_of_seed(tmp_path / f"seed{i}", tiny, i, 0.01 * i, devices=devices) for i in range(3)
    ]
    path = tmp_path / "kept.json"
    assert compare.main([*runs, f"--save={path}"]) == 0
    return path


def test_a_reference_stands_for_its_first_run(kept, tmp_path):
    assert compared(kept, tmp_path / "seed0")["same"]
    found = compared(kept, tmp_path / "seed1")
    assert found["first_step"] == 5 and found["config"] == {"seed": [0, 1]}


@pytest.mark.parametrize(("shift", "same"), [(0.05, True), (0.13, False), (-0.13, False)])
def test_on_another_machine_the_end_is_in_an_interval(kept, tiny, tmp_path, shift, same):
    """By Student's t with 2 degrees of freedom: 0.01 +- 9.925 * 0.01 * sqrt(4 / 3)."""
    run_of_seed(tmp_path / "b", tiny, 0, shift, devices=dict(kind="cpu", cores=96))
    found = compared(kept, tmp_path / "b")
    assert found["same"] == same and found["first_step"] == 5
    if not same:
        value, low, high = found["outside_interval"]["eval/val/top1"]
        assert value == pytest.approx(0.9 + 0.05 + shift)
        assert (low + high) / 2 == pytest.approx(0.95 + 0.01)
        assert (high - low) / 2 == pytest.approx(9.9248 * 0.01 * math.sqrt(4 / 3), rel=1e-4)


@pytest.mark.parametrize(
    ("record", "config", "text"),
    [
        ({}, "optim.lr=0.5", "is not of the recipe of the reference (optim.lr)"),
        (dict(data_fingerprint="b"), "", "is not of the recipe of the reference (data_finger"),
        (dict(sizes=dict(total_steps=200)), "", "has not ended"),
    ],
)
def test_only_runs_of_the_recipe_are_held_against_intervals(
    kept, tiny, tmp_path, capsys, record, config, text
):
    content = json.loads(kept.read_text())
    content["record"]["data_fingerprint"] = "a"
    kept.write_text(json.dumps(content))
    found = make_lines()
    found[3]["train/loss"] += 1e-3
    loaded = configs.load(tiny, [f"--config.{config}"] if config else [])
    make_run(tmp_path / "b", loaded, found, devices=dict(kind="cpu", cores=96), **record)
    seen = compared(kept, tmp_path / "b")
    assert not seen["same"] and text in last_error(capsys)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda found: found.pop("series"), "is not a reference run"),
        (lambda found: found["series"]["train/loss"]["step"].pop(), "is not a reference run"),
        (lambda found: found["series"]["train/loss"]["step"].reverse(), "is not a reference run"),
        (lambda found: found.update(intervals={"a": [1]}), "is not a reference run"),
        (lambda found: found.update(command=None), "is not a reference run"),
    ],
)
def test_damaged_references(kept, tmp_path, capsys, damage, text):
    found = json.loads(kept.read_text())
    damage(found)
    kept.write_text(json.dumps(found))
    assert compare.main([str(kept), str(tmp_path / "seed0")]) == 2
    assert text in last_error(capsys)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a"], "give two or more"),
        (["a", "a/"], "given twice"),
        (["a", "b", "--tolerance=-1"], "--tolerance=-1.0 must be 0 or more"),
        (["a", "nothing"], "nothing has no run"),
        (["a", "missing.json"], "missing.json is not a reference run"),
        (["a", "empty"], "have no metric at the same step"),
        (["a", "other", "--save=x.json"], "differs from a in optim.lr"),
        (["a", "b", "--save=no/x.json"], "does not exist"),
        (["a", "b", "--save=x"], "give a name with .json"),
        (["a", "b", "--save=x.json"], "the seeds 0, 0"),
        (["a", "b", "--save=x.json", "--json=y.json"], "give one"),
        (["a", "half", "--save=x.json"], "half is not a complete run (stopped at step 50 of"),
        (["a", "nan", "--save=x.json"], "do not both have eval/val/loss, or it is not finite"),
        (["a", "code", "--save=x.json"], "differs from a in code"),
    ],
)
def test_errors(pair, tiny, tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    loaded = configs.load(tiny, ["--config.seed=1"])
    make_run(tmp_path / "half", loaded, make_lines(10))
    shutil.rmtree(tmp_path / "half/checkpoints/100")
    (tmp_path / "half/goodput.json").unlink()
    make_run(tmp_path / "nan", loaded, [*make_lines()[:-1], make_lines()[-1] | NAN])
    make_run(tmp_path / "code", loaded, code="1a")
    make_run(tmp_path / "empty", configs.load(tiny, []), lines("train/loss", {7: 1.0}))
    make_run(tmp_path / "other", configs.load(tiny, ["--config.optim.lr=1.0"]))
    assert compare.main(words) == 2
    assert text in last_error(capsys)
