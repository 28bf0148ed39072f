"""How commands start and end: what they say, and with which exit code."""

import errno
import importlib
import io
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, last_error
from rich.table import Table

from vit_jax import __main__ as root
from vit_jax import cli
from vit_jax.cli.terminal import Console
from vit_jax.errors import NegativeResult, Preempted, UserError

# What is true of a command that was stopped: the others have nothing that could be continued.
CONTINUES = ("train", "finetune", "vtab", "data")


def command(name: str) -> cli.Command:
    module = importlib.import_module(f"vit_jax.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"vit_jax.{name}.__main__")
    return module.COMMAND


def ending(error: BaseException, recovery: str = "run it again", debug: bool = False) -> int:
    def work():
        raise error

    return cli.run(work, debug, recovery)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a.py is wrong:\n  fix it"), 2, "error: a.py is wrong: fix it"),
        (NegativeResult("it does not fit"), 1, "error: it does not fit"),
        (KeyboardInterrupt(), 130, "error: interrupted: run it again"),
        (
            OSError(errno.ENOSPC, "full", "/data/x"),
            2,
            "error: no space is left on the device: /data/x: fix it or choose another path; "
            "run it again",
        ),
        (
            ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 588145604 bytes."),
            1,
            "error: there is not enough memory (RESOURCE_EXHAUSTED: Out of memory allocating "
            "588145604 bytes.): choose a smaller model, image or batch, or a larger machine; "
            "run it again",
        ),
        (
            MemoryError(),
            1,
            "error: there is not enough memory (MemoryError): choose a smaller model, image or "
            "batch, or a larger machine; run it again",
        ),
        (Preempted(), 75, ""),
    ],
)
def test_each_way_to_end_has_its_line_and_exit_code(error, code, line, capsys):
    assert ending(error) == code
    assert capsys.readouterr().err == f"{line}\n" * bool(line)


SWALLOWS = """
import sys, time
from vit_jax import cli, errors
errors.end_on_signals()
cli.CLEAN_UP_S = 0.3
def work():
    while True:
        try:
            print("here", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
sys.exit(cli.run(work, debug=False, recovery="nothing is lost"))
"""


def test_a_library_that_swallows_ctrl_c_does_not_keep_a_command_alive():
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", SWALLOWS], cwd=ROOT, **pipes) as job:
        assert job.stdout.readline() == "here\n"
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=20) == 130
        assert job.stderr.read() == "error: interrupted: nothing is lost\n"


def test_output_that_nobody_reads_is_no_error():
    """As in `vit_jax | head -0`."""
    command = [sys.executable, "-m", "vit_jax"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **pipes) as job:
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 141


def test_other_errors_and_debug_show_a_traceback():
    with pytest.raises(ZeroDivisionError):
        ending(ZeroDivisionError())
    with pytest.raises(UserError):
        ending(UserError("wrong"), debug=True)


@pytest.mark.parametrize("name", root.COMMANDS)
def test_a_stopped_command_promises_only_what_holds_for_it(name):
    recovery = command(name).recovery
    assert ("the same command continues" in recovery) == (name in CONTINUES)
    assert ("checkpoint" in recovery) == (name in ("train", "finetune"))


def test_the_work_gets_the_config_and_its_own_arguments(tmp_path, capsys):
    (tmp_path / "c.py").write_text("def get_config(arg='x'):\n    return dict(init_from=arg)\n")
    seen = []

    def add_arguments(parser, part):
        parser.add_argument(f"--of_{part}", type=int)

    one = cli.Command(
        "one",
        "Does one thing.\n\nMore.",
        seen.append,
        add_arguments,
        parts=dict(first="help", second="help"),
        config="a config",
        takes_weights=True,
        default_configs=dict(second=f"{tmp_path}/c.py:y"),
        json="a file",
    )
    assert one.main(["first", f"--config={tmp_path}/c.py", "--of_first=3", "--config.seed=7"]) == 0
    assert one.main(["second", "--of_second=4"]) == 0
    first, second = seen
    assert (first.part, first.of_first, first.config.seed, first.config.init_from) == (
        *("first", 3, 7),
        "x",
    )
    assert first.location == f"{tmp_path}/c.py" and first.overrides == ["--config.seed=7"]
    assert second.config.init_from == "y" and second.json is None
    assert one.main(["second", f"--config={tmp_path}/c.py", "--init_from", "z"]) == 0
    assert seen[-1].config.init_from == "z"
    assert one.main(["second", f"--json={tmp_path}"]) == 2
    assert "is a folder: choose a file" in last_error(capsys)
    with pytest.raises(SystemExit) as stop:
        one.main(["first"])
    assert stop.value.code == 2 and "--config" in last_error(capsys)


def test_a_command_without_a_config_refuses_what_it_does_not_know(capsys):
    plain = cli.Command("plain", "Plain.", print)
    with pytest.raises(SystemExit) as stop:
        plain.main(["--seed=1"])
    assert stop.value.code == 2
    assert last_error(capsys) == "error: unrecognized arguments: --seed=1: see --help"


def test_what_a_terminal_can_not_show_is_escaped(monkeypatch):
    plain = cli.Command("plain", "Plain.", lambda args: print("caf\u00e9 \udcff"))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert plain.main([]) == 0
    sys.stdout.flush()
    assert written.getvalue() == b"caf\\xe9 \\udcff\n"


def test_a_wrong_argument_is_one_line_without_escape_sequences(capsys):
    with pytest.raises(SystemExit):
        cli.Command("plain", "Plain.", print).main(["--a\nb", "\x1b[2J\u202e"])
    line = r"error: unrecognized arguments: --a b \x1b[2J\u202e: see --help"
    assert last_error(capsys) == line


def test_another_encoding_of_file_names_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert cli.Command("plain", "Plain.", print).main([]) == 2
    assert "in iso8859-1, which gives classes wrong names: set PYTHONUTF8=1" in last_error(capsys)


def test_tables_show_names_as_they_are():
    out = io.StringIO()
    table = Table("[red]", title="[/] :smile:")
    table.add_row("\x1b[31m\u202e[link=x]y[/link]")
    Console(file=out, width=80).print(table)
    text = out.getvalue()
    assert r"\x1b[31m\u202e[link=x]y[/link]" in text and "[/] :smile:" in text and "[red]" in text
    assert "\x1b" not in text and "\u202e" not in text


def test_the_root_command_lists_runs_and_refuses(capsys, monkeypatch):
    assert root.main(["--help"]) == 0 and root.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in root.COMMANDS)
    assert root.main(["fly"]) == 2
    assert last_error(capsys).startswith("error: 'fly' is not a command: choose one of train, ")
    monkeypatch.setattr("vit_jax.models.__main__.table", lambda: "a table")
    assert root.main(["models"]) == 0
    assert capsys.readouterr().out == "a table\n"


def test_results_may_go_to_a_device_or_through_a_link(tmp_path):
    cli.check_file("/dev/null")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    cli.write_json(str(fifo), 1)
    assert os.read(reader, 9) == b"1\n" and fifo.is_fifo()
    os.close(reader)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    cli.write_json(str(tmp_path / "link"), 1)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "1\n"


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = cli.epath.Path(tmp_path / "a.json")
    cli.replace_file(path, "old")
    cli.replace_file(path, "new")
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.json"]
