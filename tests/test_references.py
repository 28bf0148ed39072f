"""The table of published accuracies, and the command that checks it, with the stand-ins whose
accuracies timm 1.0.31 and transformers 5.24 measured on the same digits.
"""

import json
import shlex

import pytest
from conftest import ROOT, last_error

from references import check
from vit_jax import config as configs
from vit_jax.data.sources.catalog import CATALOG
from vit_jax.errors import NegativeResult
from vit_jax.evaluate import __main__ as evaluate

STAND_INS = ROOT / "references/stand_ins.csv"
EXAMPLES = 360  # of the test split of digits
TABLES = (STAND_INS, check.IMAGENET)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_row_has_the_command_that_measures_it(path):
    rows = check.read_table(path)
    assert len({(row["weights"], row["data"]) for row in rows}) == len(rows)
    arguments = set()
    for row in rows:
        config, init_from, *overrides = shlex.split(row["command"])[3:]
        assert config == f"--config=configs/evaluate.py:{row['data']}"
        assert init_from == f"--config.init_from={row['weights']}"
        assert row["data"] in CATALOG and 10 < row["top1"] < 100 and row["source"]
        arguments.add((row["data"], *overrides))
    for data, *overrides in arguments:
        entry = configs.load(f"{ROOT}/configs/evaluate.py:{data}", overrides).evals.test
        assert entry.type == "classification"
        assert entry.data.crop == ("central" if overrides else "weights")


@pytest.mark.parametrize("row", check.read_table(STAND_INS), ids=lambda row: row["weights"])
def test_stand_ins_have_the_accuracy_that_other_code_measured(row, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = [*shlex.split(row["command"])[3:], f"--json={tmp_path}/result.json"]
    assert evaluate.main(command) == 0
    top1 = json.loads((tmp_path / "result.json").read_text())["eval/test/top1"]
    assert round(top1 * EXAMPLES) == round(row["top1"] / 100 * EXAMPLES)
    assert check.judged(row, 100 * top1, 0.0)["agrees"]
    assert not check.judged(row, 100 * (top1 - 1 / EXAMPLES), 0.1)["agrees"]


def test_what_differs_and_what_fails_is_named_and_the_rest_is_not_measured_again(
    tmp_path, monkeypatch, capsys
):
    calls = []

    def measure(row, overrides):
        calls.append((row["weights"].split("/")[-1], overrides))
        if "transformers" in row["weights"]:
            raise NegativeResult("error: the network is down")
        return row["top1"] + 0.3 * ("timm" in row["weights"])

    monkeypatch.setattr(check, "measure", measure)
    command = [f"--table={STAND_INS}", f"--json={tmp_path}/found.json", "--config.data.data_dir=D"]
    assert check.main(command) == 1
    assert "of 3 accuracies 1 differ by more than 0.1 percentage points, and 1 could not" in (
        last_error(capsys)
    )
    assert [name for name, _ in calls] == [
        "published_digits.npz",
        "timm_digits",
        "transformers_digits",
    ]
    assert calls[0][1] == ["--config.data.data_dir=D"]
    calls.clear()
    assert check.main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["agrees", "DIFFERS", "FAILED"]
    assert lines[1].split()[1:6] == ["published", "88.61", "measured", "88.91", "+0.30"]
    assert lines[2].endswith("stand_ins/transformers_digits: error: the network is down")
    assert [name for name, _ in calls] == ["transformers_digits"]
    assert check.main([*command, "--tolerance=0.3", "--only=timm"]) == 0  # judged anew
    assert capsys.readouterr().out.startswith("agrees")


MISTAKES = {
    "--table=nowhere.csv": "nowhere.csv is not a table of weights, data, image_size, top1",
    "--table={tmp}/short.csv": "short.csv is not a table of",
    "--table={tmp}/other.csv": "whose commands begin with python -m vit_jax.evaluate",
    "--table={tmp}/head.csv": "it has no rows",
    "--onyl=timm": "--onyl=timm is not known",
    "--only=nothing": "match --only=nothing",
    "--only=(": "--only=( is not a valid regular expression",
    "--json={tmp}/null.json": "null.json is not a file of earlier results",
    "--json={tmp}/list.json": "list.json is not a file of earlier results",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_mistakes_end_in_one_clear_line(flag, tmp_path, capsys):
    (tmp_path / "short.csv").write_text("weights,top1\na,5\n")
    (tmp_path / "null.json").write_text("null")
    (tmp_path / "list.json").write_text('[{"weights": "a"}]')
    header = ",".join(check.COLUMNS)
    (tmp_path / "head.csv").write_text(f"{header}\n")
    (tmp_path / "other.csv").write_text(f"{header}\na,digits,8,5,me,rm -r /\n")
    flags = [f"--table={STAND_INS}", flag.format(tmp=tmp_path)]
    assert check.main(flags) == 2
    assert MISTAKES[flag] in last_error(capsys)


def test_a_command_that_fails_says_why():
    row = check.read_table(STAND_INS)[0]
    with pytest.raises(NegativeResult, match="nowhere"):
        check.measure(row | dict(command="python -m vit_jax.evaluate --config=nowhere.py"), [])
