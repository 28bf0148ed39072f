"""Where the log goes, and the summary at the end of a run."""

import ast
import io
import json
import logging

import pytest
from etils import epath
from rich.console import Console

from vit_jax import cli
from vit_jax import config as configs
from vit_jax.checkpoints.manager import KeepBest
from vit_jax.cli import spool
from vit_jax.errors import UserError
from vit_jax.train import console, metrics

log = logging.getLogger("vit_jax.test")

TOTALS = {
    "steps": 1200, "seconds": 3723.0, "paused": {"evaluation": 61.0, "checkpoints": 3.2},
    "perf/images_per_sec": 12345.6, "perf/images_per_sec_per_chip": 1543.2, "perf/mfu": 0.512,
    "perf/step_ms_p50": 83.04, "perf/step_ms_p95": 91.0, "perf/data_wait": 0.013, "perf/compile_s": 41.26,
    "perf/hbm_gib": 11.5,
}  # fmt: skip


@pytest.fixture
def process(monkeypatch):
    """Makes this one process of several."""

    def be(index: int, count: int) -> None:
        monkeypatch.setattr(metrics.jax, "process_index", lambda: index)
        monkeypatch.setattr(metrics.jax, "process_count", lambda: count)
        monkeypatch.setattr(metrics.jax.distributed, "is_initialized", lambda: count > 1)

    return be


def test_one_process_writes_everything_to_log_and_stderr(tmp_path, capsys):
    with cli.logging_to(epath.Path(tmp_path)):
        log.info("hello")
        log.warning("careful")
    err, text = capsys.readouterr().err, (tmp_path / "log.txt").read_text()
    assert err == text and [line.split(" ", 1)[1] for line in text.splitlines()] == [
        "I hello",
        "W careful",
    ]
    assert not (tmp_path / "logs").exists()


def test_the_others_write_a_log_of_their_own_and_only_warnings_to_stderr(tmp_path, capsys, process):
    process(3, 4)
    with pytest.raises(UserError), cli.logging_to(epath.Path(tmp_path)):
        log.info("hello")
        log.warning("careful")
        raise UserError("no data: get some")
    text = (tmp_path / "logs/process_3.txt").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in text] == [
        "I hello",
        "W careful",
        "E UserError: no data: get some",
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[process 3] ") and line.endswith("W careful")
    assert not (tmp_path / "log.txt").exists()


def write_lines(folder) -> None:
    lines = [
        {"step": 10, "eval/val/top1": 0.5, "eval/val/loss": 1.0},
        {"step": 20, "eval/val/top1": 0.75, "train/loss": 1.0, "eval/probe/fewshot_5": 0.25},
        {"step": 30, "eval/val/top1": 0.625},
        {"step": 40, "train/loss": 0.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


DAMAGED = ["", "{", "[10]", '{"step": 15', '{"step": "15"}', '{"step": 15, "train/loss": "x"}',
           "\0" * 8, "nonsense", "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_lines_after_a_damaged_one_are_kept(text, tmp_path, caplog):
    write_lines(tmp_path)
    path = epath.Path(tmp_path / "metrics.jsonl")
    whole = path.read_text().splitlines()
    damaged = "\n".join([whole[0], text, *whole[1:], '{"step": 4'])
    (tmp_path / "damaged_metrics.jsonl").write_text("an older one")
    path.write_text(damaged)
    assert [line["step"] for line in metrics.read_lines(path)] == [10, 20, 30, 40]
    with caplog.at_level(logging.WARNING, "vit_jax"):
        metrics.rewind(path, 30)
    assert path.read_text().splitlines() == whole[:3]
    assert (tmp_path / "damaged_metrics_2.jsonl").read_text() == damaged
    assert (
        "line 2 can't be read" in caplog.text and "kept as damaged_metrics_2.jsonl" in caplog.text
    )


def test_a_checkpoint_that_was_evaluated_after_its_save_is_ranked_by_the_line(tmp_path):
    """Checkpoints 4 and 6 were saved when a signal came; 6 has no line, and 2 its own score."""
    best = KeepBest("eval/val/top1")
    best.add(2, {"eval/val/top1": 0.5})
    path = epath.Path(tmp_path / "metrics.jsonl")
    lines = [{"step": step, "eval/val/top1": top1} for step, top1 in ((2, 0.9), (3, 1.0), (4, 0.7))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics.rank(best, [2, 4, 6], path)
    assert best.scores == {2: 0.5, 4: 0.7}
    metrics.rank(KeepBest(""), [2, 4], tmp_path / "nothing.jsonl")


def test_a_half_line_at_the_end_is_dropped_silently(tmp_path, caplog):
    write_lines(tmp_path)
    path = epath.Path(tmp_path / "metrics.jsonl")
    whole = path.read_text()
    path.write_text(whole + '{"step": 50, "tra')
    metrics.rewind(path, 40)
    assert path.read_text() == whole
    assert not caplog.text and len(list(tmp_path.iterdir())) == 1


def test_names_can_not_control_the_terminal(tmp_path, capsys):
    with cli.logging_to(epath.Path(tmp_path)):
        log.warning("\x1b[2J%s is skipped", "caf\udce9\x07")
    text = capsys.readouterr().err
    assert r"\x1b[2Jcaf\xe9\x07 is skipped" in text
    assert (tmp_path / "log.txt").read_text() == text


def test_the_summary_is_lines_where_there_is_no_terminal(tmp_path, capsys):
    write_lines(tmp_path)
    with cli.logging_to(epath.Path(tmp_path)):
        console.show_summary(spool.LocalFiles(epath.Path(tmp_path)), TOTALS, {})
    assert capsys.readouterr().err == (tmp_path / "log.txt").read_text()
    lines = [
        line.split(" I ")[1].split() for line in (tmp_path / "log.txt").read_text().splitlines()
    ]
    assert [" ".join(line) for line in lines] == [
        "steps 1,200 in 1:02:03",
        "images/s 12,346, 1,543.2 per chip",
        "MFU 51.2%",
        "step ms median 83.0, p95 91.0",
        "data wait 1.3% of the time of the steps",
        "compilation 41.3 s",
        "device memory peak 11.50 GiB",
        "evaluation 1:01",
        "checkpoints 0:03",
        "eval/probe fewshot_5 0.2500 at step 20, best 0.2500 at step 20",
        "eval/val top1 0.6250 at step 30, best 0.7500 at step 20",
    ]


def test_the_summary_is_a_table_on_a_terminal_and_lines_in_the_log(tmp_path, capsys, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100)
    )
    with cli.logging_to(epath.Path(tmp_path)):
        console.show_summary(spool.LocalFiles(epath.Path(tmp_path)), TOTALS, {})
    assert "images/s" in screen.getvalue() and "│" in screen.getvalue()
    assert capsys.readouterr().err == ""
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 9


def test_what_is_not_known_is_left_out_and_no_steps_are_no_summary(tmp_path, capsys):
    rows = dict(console.summary_rows(dict(steps=1, seconds=1.0, paused={})))
    assert list(rows) == ["steps"]
    console.show_summary(spool.LocalFiles(epath.Path(tmp_path)), dict(steps=0), {})
    assert capsys.readouterr().err == ""


def test_tensorboard_has_the_config_once_per_start(tmp_path, tiny, capsys):
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.plugins.hparams import metadata

    config = configs.load(tiny)
    values = dict(configs.flatten(config))
    with metrics.MetricWriter(spool.LocalFiles(epath.Path(tmp_path)), 7, config) as writer:
        writer.write(8, {"train/loss": 1.0})
    assert "warmup_steps" not in "".join(capsys.readouterr())
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("config")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert text.step == 7 and all(line.startswith("    ") for line in lines)
    pairs = [line.strip().split(" = ", 1) for line in lines]
    assert {key: ast.literal_eval(value) for key, value in pairs} == values
    found = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(found).hparams
    assert settings.keys() == values.keys()
    assert settings["optim.lr"].number_value == 1e-3 and settings["model.scan"].bool_value is False
    assert settings["model.variant"].string_value == "Ti/4"
    assert settings["data.augment"].string_value == "()"
